"""The card of a trainer with its own text: TRL's metadata, and a text from a template of `ModelCard`."""

import pytest
from datasets import Dataset
from huggingface_hub import ModelCard
from tiny_models import text_rows, tiny_model, tiny_tokenizer

from liger_trainer import LigerSFTConfig, LigerSFTTrainer
from liger_trainer.trainers.model_card import CardText, accuracy_lines


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


def test_the_line_about_the_guesses_of_heads():
    """By position, of the last evaluation, or else of the last log of training."""
    train = [{"eagle_step1_accuracy": 0.1, "eagle_step2_accuracy": 0.05}, {"loss": 1.0}]
    assert accuracy_lines(train).endswith("(training): 0.100, 0.050\n")
    evaluated = [*train, {"eval_eagle_step2_accuracy": 0.25, "eval_eagle_step1_accuracy": 0.5}, {"train_loss": 1.0}]
    assert accuracy_lines(evaluated).endswith("by position ahead (evaluation): 0.500, 0.250\n")
    heads = [{f"medusa_head{k}_accuracy": k / 16 for k in (10, 2, 1)} | {"mean_token_accuracy": 0.9}]
    assert accuracy_lines(heads).endswith(": 0.062, 0.125, 0.625\n")
    assert accuracy_lines([{"loss": 1.0, "mean_token_accuracy": 0.5}]) == ""
