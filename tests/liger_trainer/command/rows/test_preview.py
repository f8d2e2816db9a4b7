"""`liger-trainer train RECIPE --preview` shows the rows as the trainer gets them, with learned tokens marked."""

import json

import pytest
import torch
from recipe_fixtures import command, write_model, write_recipe

CHAT = (
    "{% for m in messages %}{{ m['content'] }} {% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preview")
    write_model(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(CHAT)
    return folder


@pytest.fixture
def folder(base, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "model").symlink_to(base / "model")
    return tmp_path


def preview(capsys, folder, rows, *words, **keys):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"prompt_template": None, "max_length": 10} | keys
    code, out, err = command(capsys, "train", write_recipe(folder, **keys), "--preview", *words)
    assert not (folder / "out").exists(), "a preview leaves nothing behind"
    return code, out, err


PAIR = {"prompt": "w4 w5 ", "completion": "w6 w7"}
LONG = {"prompt": "w4 w5 ", "completion": " ".join(["w6"] * 20)}
TOO_LONG = {"prompt": " ".join(["w4"] * 20) + " ", "completion": "w6"}


def test_prompt_and_completion(folder, capsys):
    code, out, err = preview(capsys, folder, [PAIR, LONG, TOO_LONG, PAIR], "3")
    assert code == 0, err
    assert "Row 0: 5 tokens, 3 of them learned\nw4 w5« w6 w7 </s>»\n" in out
    cut = "« " + " ".join(["w6"] * 8) + "»"
    assert f"Row 1: 10 tokens, 8 of them learned\nw4 w5{cut}\n" in out
    assert "3 of 4 rows: 2 used of 3; 1 cut to max_length 10, or as long; 1 dropped" in out and "Row 2" not in out
    assert "Summary" not in out


def test_one_row_without_a_number(folder, capsys):
    code, out, err = preview(capsys, folder, [PAIR, LONG])
    assert code == 0, err
    assert "Row 0" in out and "Row 1" not in out


def test_text_learns_all_but_its_first_token(folder, capsys):
    code, out, err = preview(capsys, folder, [{"text": "w4 w5 w6"}])
    assert code == 0, err
    assert "Row 0: 4 tokens, 3 of them learned\nw4« w5 w6 </s>»\n" in out


def test_marked_tokens_are_the_ones_that_the_loss_counts(folder, capsys):
    """Messages where only the assistant's turns are learned, compared with the stock trainer's labels."""
    from trl import SFTConfig, SFTTrainer

    turns = [("user", "w4 w5"), ("assistant", "w6"), ("user", "w7"), ("assistant", "w8 w9")]
    rows = [{"messages": [{"role": role, "content": content} for role, content in turns]}]
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} {{ eos_token }}"
        "{% endgeneration %}{% else %}{{ m['content'] }} {% endif %}{% endfor %}"
    )
    (folder / "chat.jinja").write_text(template)
    keys = {"assistant_only_loss": True, "chat_template_path": str(folder / "chat.jinja")}
    code, out, err = preview(capsys, folder, rows, **keys)
    assert code == 0, err
    assert "Row 0: 8 tokens, 5 of them learned\nw4 w5« w6 </s>» w7« w8 w9 </s>»\n" in out

    from datasets import Dataset

    args = SFTConfig(output_dir=str(folder / "stock"), bf16=False, report_to="none", **keys)
    stock = SFTTrainer(str(folder / "model"), args, train_dataset=Dataset.from_list(rows))
    labels = stock.data_collator([stock.train_dataset[0]])["labels"]
    assert int((labels[:, 1:] != -100).sum()) == 5


def test_a_text_next_to_a_completion_does_not_take_its_end_token(folder, capsys):
    """TRL adds the end to the text, and trains on prompt and completion."""
    code, out, err = preview(capsys, folder, [PAIR | {"text": "w4 w5 w6 w7"}])
    assert code == 0, err
    assert "w4 w5« w6 w7 </s>»\n" in out


def test_packed_rows(folder, capsys):
    code, out, err = preview(capsys, folder, [PAIR, PAIR, LONG], "3", packing=True)
    assert code == 0, err
    assert "Sequence 1: 10 tokens, 6 of them learned\nw4 w5« w6 w7 </s>» w4 w5« w6 w7 </s>»\n" in out
    assert "1 cut to max_length 10" in out


def test_preferences(folder, capsys):
    rows = [{"prompt": "w4 w5 ", "chosen": "w6", "rejected": " ".join(["w7"] * 12)}]
    for trainer, first in (("dpo", 0), ("orpo", 1), ("cpo", 1)):  # the latter two begin with the tokenizer's bos_token
        code, out, err = preview(capsys, folder, rows, trainer=trainer)
        assert code == 0, err
        bos = "<s> " if first else ""
        assert f"Row 0, chosen: {4 + first} tokens, 2 of them learned\n{bos}w4 w5« w6 </s>»\n" in out, trainer
        kept = "« " + " ".join(["w7"] * (8 - first)) + "»"
        assert (f"Row 0, rejected: 10 tokens, {8 - first} of them learned\n{bos}w4 w5{kept}\n") in out, trainer


def test_reward_models_score_whole_texts(folder, capsys):
    rows = [{"prompt": "w4 w5 ", "chosen": "w6", "rejected": "w7 w8"}]
    code, out, err = preview(capsys, folder, rows, trainer="reward")
    assert code == 0, err
    assert "Row 0, chosen: 4 tokens\nw4 w5 w6 </s>\n" in out
    assert "Row 0, rejected: 5 tokens\nw4 w5 w7 w8 </s>\n" in out
    assert "The model scores each whole text at its last token" in out and "«" not in out


_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("dpo", "cpo", "reward")]


@pytest.mark.parametrize("trainer", ["orpo", "kto", *_SLOW])
def test_pairs_with_the_same_chat_in_messages(trainer, folder, capsys):
    """Rows of UltraFeedback: TRL's ORPO and CPO refuse rows of two kinds, and the others take any one of them."""
    asked = {"role": "user", "content": "w4 w5"}
    answers = [{"role": "assistant", "content": text} for text in ("w6", "w7 w8")]
    row = {"prompt": "w4 w5", "chosen": [asked, answers[0]], "rejected": [asked, answers[1]]}
    code, out, err = preview(capsys, folder, [row | {"messages": [asked, answers[0]], "label": 1}], trainer=trainer)
    assert code == 0, err
    assert "Columns of the rows: chosen, rejected." in out
    assert "w4 w5" in out and "w6 </s>" in out and "w7 w8 </s>" in out
    assert "is left out" not in err
    code, out, err = preview(capsys, folder, [row, row | {"prompt": "Answer in Latin."}], trainer=trainer)
    assert code == 0 and "prompt is left out" in err and "In 1 of 2 rows, first in row 1, it is another text" in err


def test_kto(folder, capsys):
    code, out, err = preview(capsys, folder, [PAIR | {"label": False}], trainer="kto")
    assert code == 0, err
    assert "Row 0, label false: 5 tokens, 3 of them learned\nw4 w5« w6 w7 </s>»\n" in out
    pairs = [{"prompt": "w4 w5 ", "chosen": "w6", "rejected": "w7"}]
    code, out, err = preview(capsys, folder, pairs, trainer="kto")
    assert code == 0, err
    assert "label true: 4 tokens" in out and "label false: 4 tokens" in out


def test_medusa_shows_the_rows_of_sft(folder, capsys):
    code, out, err = preview(capsys, folder, [PAIR], trainer="medusa")
    assert code == 0, err
    assert "w4 w5« w6 w7 </s>»" in out


def test_refusals(folder, capsys, monkeypatch):
    code, _, err = preview(
        capsys,
        folder,
        [{"prompt": "w4"}],
        trainer="grpo",
        reward_funcs=["boxed_answer"],
        per_device_train_batch_size=8,
        max_length=None,
    )
    assert code == 2 and "--preview" in err and "generates its completions" in err
    code, _, err = preview(capsys, folder, [PAIR], "0")
    assert code == 2 and "--preview is '0'; expected a whole number above 0" in err
    code, out, err = preview(capsys, folder, [PAIR], "--max_steps", "3", "--eval_fraction", "0.5")
    assert code == 2 and "which has no effect without eval_strategy" in err, "the recipe is checked as for a training"


def test_with_dry_run(folder, capsys):
    for words in (("1", "--dry_run"), ("--dry_run",)):
        code, out, err = preview(capsys, folder, [PAIR], *words)
        assert code == 2 and "--preview and --dry_run are both given" in err and not out


def test_a_checkpoint_is_not_asked_for(folder, capsys):
    code, out, err = preview(capsys, folder, [PAIR], "1", "--resume_from_checkpoint", "true")
    assert code == 0 and "Row 0" in out, err


def test_characters_of_several_tokens():
    """Text is split where a mask begins, even within a character, and nothing is lost."""
    from liger_trainer.command.rows.preview import marked

    class Bytes:
        def decode(self, ids, **options):
            return bytes(ids).decode("utf-8", errors="replace")

    ids = list("aé".encode())
    assert marked(Bytes(), torch.tensor(ids), torch.tensor([False, True, True])) == "a«é»"
    assert marked(Bytes(), torch.tensor(ids), torch.tensor([False, False, True])) == "a\ufffd«\ufffd»"
