"""The card of a trainer with its own text: TRL's metadata, and a text from a template of `ModelCard`."""

import pytest
from datasets import Dataset
from huggingface_hub import ModelCard
from tiny_models import text_rows, tiny_model, tiny_tokenizer

from liger_trainer import LigerSFTConfig, LigerSFTTrainer
from liger_trainer.trainers.model_card import CardText


class Told(LigerSFTTrainer):
    text: CardText | None = None

    def card_text(self):
        return self.text


@pytest.fixture
def card_of(tmp_path):
    def write(text, base="", **options):
        args = LigerSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **options)
        model = tiny_model("llama")
        model.config._name_or_path = base
        trainer = Told(model, args, train_dataset=Dataset.from_list(text_rows(2)), processing_class=tiny_tokenizer())
        trainer.text = text
        trainer.create_model_card("mine", tags="liger-trainer")
        return ModelCard.load(tmp_path / "README.md")

    return write


def test_metadata_equal_trl_s(card_of):
    """A custom text changes no line of them."""
    stock = card_of(None, "someone/base")
    card = card_of(CardText("base"), "someone/base")
    assert sorted(card.data.tags) == sorted(stock.data.tags) and "liger-trainer" in card.data.tags
    stock.data.tags = card.data.tags = None  # TRL keeps it in a set
    assert card.data.to_dict() == stock.data.to_dict()
    assert card.data.base_model == "someone/base" and card.data.model_name == "mine"
    assert "fine-tuned version of [someone/base](https://huggingface.co/someone/base)." in card.text


def test_text_is_written_as_it_is(card_of, tmp_path):
    """Braces in rows and templates are not read as code of the card's template."""
    card = card_of(CardText("base", trained="- Data: `{{ 7 * 7 }}` {% raw %}"), str(tmp_path))
    assert "- Data: `{{ 7 * 7 }}` {% raw %}\n\n### Framework versions\n\n- TRL: 1." in card.text
    assert "fine-tuned version of `base`." in card.text and "None" not in card.content


@pytest.mark.parametrize("quick", [True, False])
def test_quick_start(quick, card_of, tmp_path):
    card = card_of(CardText("base", quick_start=quick))
    assert ("## Quick start" in card.text) == (f'model="{tmp_path}"' in card.text) == quick
    assert "## Training procedure\n\nThis model was trained with SFT.\n" in card.text


def test_pages_of_trackers(card_of, monkeypatch):
    monkeypatch.setattr("trl.trainer.utils.get_trackio_space_url", lambda: "https://a.b/run")
    assert "The run is logged in [Trackio](https://a.b/run).\n" in card_of(CardText("base")).text
    monkeypatch.setattr("trl.trainer.utils.get_trackio_space_url", lambda: None)
    assert "logged in" not in card_of(CardText("base")).text
