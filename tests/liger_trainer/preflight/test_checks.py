"""Each seeded fault is named before the first step, and a clean run gets no message."""

import re

import pytest
import torch
from datasets import Dataset
from recipe_fixtures import ROOT, command, write_model, write_recipe, write_rows
from seeded_faults import END_INSIDE, FAULTS, answers, chats, said_before_first_step, trainer, with_template
from tiny_models import VOCAB, tiny_model, tiny_tokenizer
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForTokenClassification,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    T5Config,
)

from liger_trainer import LigerDPOConfig, LigerDPOTrainer, LigerSFTConfig, LigerTrainer, LigerTrainingArguments
from liger_trainer.preflight.context import PreflightContext
from liger_trainer.preflight.feature import NAMES
from liger_trainer.preflight.model_checks import missing_packages


def checks_in(said):
    matches = [re.match(rf"({'|'.join(NAMES)}): ", line) for line in said]
    return [match[1] for match in matches if match]


def table():
    """The rows of the table in the docs: fault, whether TRL and Axolotl say so, and the check that does here."""
    page = (ROOT / "docs" / "trainers.md").read_text()
    rows = re.findall(r"^\| ([^|\n]+) \| (yes|no) \| ([a-z ]+) \| `(\w+)` \|$", page, re.MULTILINE)
    return {what: (by_trl, by_axolotl, check) for what, by_trl, by_axolotl, check in rows if check in NAMES}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.build.__name__.strip("_"))
def test_seeded_faults_are_caught_as_the_docs_say(fault, tmp_path, monkeypatch):
    if fault.needs_gpu:
        monkeypatch.setattr(PreflightContext, "on_gpu", True)
    found = checks_in(said_before_first_step(lambda: fault.build(True, tmp_path / "ours")))
    assert found == [fault.check]
    said = said_before_first_step(lambda: fault.build(False, tmp_path / "stock"))
    by_trl = bool(fault.said_by_trl) and any(fault.said_by_trl in line for line in said)
    assert table()[fault.what] == ("yes" if by_trl else "no", fault.said_by_axolotl, fault.check), said


def test_the_table_has_each_fault_and_the_docs_each_check():
    assert list(table()) == [fault.what for fault in FAULTS]
    assert {fault.check for fault in FAULTS} == set(NAMES)
    text = (ROOT / "docs" / "trainers.md").read_text()
    assert not [name for name in NAMES if f"`{name}`" not in text]


def test_rows_that_are_exchanged_before_training(tmp_path):
    """For a stream, which has no length, or for fewer rows. None of them has been left out."""
    for exchange in (lambda rows: rows.to_iterable_dataset(), lambda rows: rows.select(range(2))):
        trained = trainer(True, tmp_path, answers())
        trained.train_dataset = exchange(trained.train_dataset)
        assert checks_in(said_before_first_step(lambda trained=trained: trained)) == []


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        pytest.param(answers(), {}, id="answers"),
        pytest.param(answers(), {"packing": True, "max_length": 32}, id="packed"),
        pytest.param([{"text": f"w{i} w4 w5"} for i in range(5, 13)], {}, id="text"),
        pytest.param([{"prompt": f"w{i}", "completion": " w4 w5"} for i in range(5, 13)], {}, id="prompts"),
        pytest.param([{"text": "w4 w5 " * 40}] * 4, {"max_length": 16}, id="cut text"),
        pytest.param(chats(), {"assistant_only_loss": True, "processing_class": with_template(END_INSIDE)}, id="chats"),
    ],
)
def test_runs_without_a_fault_are_told_nothing(rows, options, tmp_path):
    assert not checks_in(said_before_first_step(lambda: trainer(True, tmp_path, rows, **options)))


def test_chunks_of_text_need_no_end(tmp_path):
    chunks = [{"input_ids": [5 + i] * 16, "labels": [5 + i] * 16} for i in range(4)]
    assert not checks_in(said_before_first_step(lambda: trainer(True, tmp_path, chunks, max_length=16)))


def test_checks_are_silenced_by_name(tmp_path):
    rows = answers(end=())
    options = {"learning_rate": 1e-9, "skip_checks": ["learning_rate"]}
    assert checks_in(said_before_first_step(lambda: trainer(True, tmp_path, rows, **options))) == ["end_token_learned"]
    options["skip_checks"] = ["all"]
    assert not checks_in(said_before_first_step(lambda: trainer(True, tmp_path, rows, **options)))


def test_use_liger_false_is_the_stock_trainer(tmp_path):
    rows = answers(end=())
    assert not checks_in(said_before_first_step(lambda: trainer(True, tmp_path, rows, use_liger=False)))


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="skip_checks has 'warm_up'; expected names of .*warmup"):
        LigerSFTConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, skip_checks=["warm_up"])


def test_pairs_are_checked_in_their_chosen_answers(tmp_path):
    rows = Dataset.from_list([{"prompt": f"w{i}", "chosen": " w4", "rejected": " w5"} for i in range(5, 13)])

    tiny_model("llama").save_pretrained(tmp_path / "model")

    def build(**options):
        args = LigerDPOConfig(
            output_dir=str(tmp_path),
            bf16=False,
            use_cpu=True,
            max_steps=6,
            report_to="none",
            disable_tqdm=True,
            gradient_checkpointing=False,
            save_strategy="no",
            **options,
        )
        path = str(tmp_path / "model")
        return LigerDPOTrainer(model=path, args=args, train_dataset=rows, processing_class=tiny_tokenizer())

    assert not checks_in(said_before_first_step(build))
    assert checks_in(said_before_first_step(lambda: build(learning_rate=1e-9))) == ["learning_rate"]


def test_checks_draw_no_random_numbers(tmp_path):
    built = trainer(True, tmp_path, answers())
    before = torch.get_rng_state()
    built.callback_handler.callbacks[-1].on_train_begin(built.args, built.state, built.control)
    assert torch.equal(torch.get_rng_state(), before)


def translator():
    """A model of two texts, and rows with labels of another length than their tokens."""
    config = T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    rows = [{"input_ids": [5] * n + [2], "labels": [4, 5, 2]} for n in range(4, 12)]
    return AutoModelForSeq2SeqLM.from_config(config), rows, DataCollatorForSeq2Seq


def tagger():
    """A model that classifies tokens. In its rows the last token, the end token, has no class."""
    model = AutoModelForTokenClassification.from_config(tiny_model("llama").config)
    rows = [{"input_ids": [5] * n + [2], "labels": [-100] + [1] * (n - 1) + [-100]} for n in range(4, 12)]
    return model, rows, DataCollatorForTokenClassification


@pytest.mark.parametrize("kind", [translator, tagger])
def test_labels_that_are_no_next_tokens_are_not_read(kind, tmp_path):
    def build():
        model, rows, collator = kind()
        tokenizer = tiny_tokenizer()
        args = LigerTrainingArguments(
            output_dir=str(tmp_path),
            bf16=False,
            use_cpu=True,
            max_steps=1,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            liger_config={"fused_linear_cross_entropy": False},
        )
        return LigerTrainer(model, args, collator(tokenizer), rows, processing_class=tokenizer)

    assert not checks_in(said_before_first_step(build))


def test_labels_of_another_length_are_not_read(tmp_path):
    """A collator of the user's makes other labels of them, so that they are not the next tokens."""
    rows = [{"input_ids": [5, 6, 7, 8, 2], "labels": [1, 0]}] * 4 + [{"input_ids": [5] * 12, "labels": [5]}]

    def collate(batch):
        ids = tiny_tokenizer().pad({"input_ids": [row["input_ids"] for row in batch]}, return_tensors="pt")
        return ids | {"labels": ids["input_ids"].masked_fill(ids["attention_mask"] == 0, -100)}

    def build():
        options = {"use_cpu": True, "bf16": False, "max_steps": 1, "report_to": "none"}
        args = LigerTrainingArguments(output_dir=str(tmp_path), remove_unused_columns=False, **options)
        given = {"data_collator": collate, "processing_class": tiny_tokenizer()}
        return LigerTrainer(tiny_model("llama"), args, train_dataset=Dataset.from_list(rows), **given)

    assert not checks_in(said_before_first_step(build))


def test_packages_are_named_as_pip_has_them():
    assert missing_packages(tiny_model("qwen3_5_text")) == ["flash-linear-attention"]
    assert missing_packages(tiny_model("llama")) == []


def test_recipes_are_checked_and_skip_by_name(tmp_path, capsys):
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl")
    recipe = write_recipe(tmp_path, warmup_steps=50, max_steps=6)
    code, _, err = command(capsys, "train", recipe)
    assert code == 0
    assert checks_in(re.findall(r"\[liger_trainer\] (.*)", err)) == ["warmup"]
    code, _, err = command(capsys, "train", recipe, "--output_dir", tmp_path / "second", "--skip_checks", "warmup")
    assert code == 0
    assert not checks_in(re.findall(r"\[liger_trainer\] (.*)", err))
