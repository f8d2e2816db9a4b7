"""Mistakes of the first hour: each message blames what is wrong, and says what to do."""

import csv
import json
import re

import pytest
from recipe_fixtures import command, write_recipe

QUESTIONS = [{"question": f"w{10 + i} w20", "answer": f"w{30 + i} w40"} for i in range(6)]
CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.fixture
def own_rows(folder):
    """A folder with a tiny model that has a chat template, and questions and answers in qa.csv."""
    (folder / "model" / "chat_template.jinja").write_text(CHAT)
    with open(folder / "qa.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(QUESTIONS)
    return folder


def train(capsys, folder, *options, **keys):
    defaults = {
        "dataset_name": "qa.csv",
        "prompt_template": None,
        "columns": {"question": "question", "answer": "answer"},
    }
    return command(capsys, "train", write_recipe(folder, **(defaults | keys)), *options)


def test_a_misspelt_column_of_the_data_is_not_the_wrong_way_round(own_rows, capsys):
    code, _, err = train(capsys, own_rows, "--dry_run", columns={"question": "quest", "answer": "answer"})
    assert code == 2 and "columns names 'quest'. Did you mean question?" in err and "wrong way" not in err
    code, _, err = train(capsys, own_rows, "--dry_run", columns={"q": "question", "a": "answer"})
    assert code == 2 and "columns sets 'a', which the trainer does not read" in err
    assert "Its name comes first: columns: {question: ..., answer: ...}." in err


def test_a_split_that_a_file_does_not_have_names_its_key(own_rows, capsys):
    code, _, err = train(capsys, own_rows, "--dry_run", dataset_eval_split="test", eval_strategy="epoch")
    assert code == 2 and "Correct dataset_eval_split. To hold out rows of it, set eval_fraction: 0.1" in err
    code, _, err = train(capsys, own_rows, "--dry_run", dataset_train_split="tran")
    assert code == 2 and "Correct dataset_train_split." in err and "eval_fraction" not in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"question,answer\n", "cannot be loaded: it has no rows."),
        ("question,answer\ncafé,w5\n".encode("latin-1"), "it is not in UTF-8"),
    ],
    ids=["no rows", "Latin-1"],
)
def test_a_file_that_cannot_be_read(content, message, own_rows, capsys):
    (own_rows / "qa.csv").write_bytes(content)
    code, _, err = train(capsys, own_rows, "--dry_run")
    assert code == 2 and message in err
    assert "no data!" not in err


def test_rows_without_a_learned_token_cause_no_warning_of_numpy(own_rows, capsys, recwarn):
    code, _, err = train(capsys, own_rows, max_length=2)
    assert code == 2 and "Nothing can be learned from the 6 train rows" in err
    assert not [warning for warning in recwarn if warning.category is RuntimeWarning]


def test_the_model_is_not_written_over(own_rows, capsys):
    before = (own_rows / "model" / "model.safetensors").read_bytes()
    for resumes in ("false", "auto"):
        code, _, err = train(capsys, own_rows, output_dir=str(own_rows / "model"), resume_from_checkpoint=resumes)
        assert code == 2 and "the folder of model_name_or_path, which would be written over" in err
        assert "delete" not in err
    assert (own_rows / "model" / "model.safetensors").read_bytes() == before


def test_a_finished_run_is_said_to_be_finished(own_rows, capsys):
    keys = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    code, _, err = train(capsys, own_rows, **keys)
    assert code == 0 and "training 2 steps. The first one takes longest." in err
    code, _, err = train(capsys, own_rows, resume_from_checkpoint=True, **keys)
    assert code == 0 and "training 0 steps" not in err
    assert re.search(
        r"nothing is left to train: the run in '.*out' has had its 2 steps. To go on, raise max_steps", err
    )


def test_short_prompts_that_all_answers_repeat_are_told(own_rows, capsys):
    rows = [{"prompt": f"w{i}", "chosen": f"w{i} w50", "rejected": f"w{i} w51"} for i in range(10, 14)]
    (own_rows / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"trainer": "dpo", "dataset_name": "pairs.jsonl", "columns": None}
    code, _, err = train(capsys, own_rows, "--dry_run", **keys)
    assert code == 0 and "chosen begins with the prompt in 4 of 4 rows, first in row 0" in err
    rows[0]["chosen"] = "w50"  # by chance, in three of four rows
    (own_rows / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = train(capsys, own_rows, "--dry_run", **keys)
    assert code == 0 and "chosen begins with" not in err


def test_a_folder_that_is_not_there(folder, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for words in (("chat", "nowhere"), ("doctor", "nowhere")):
        code, _, err = command(capsys, *words)
        assert code == 2 and "There is no folder 'nowhere' here, so it is taken for a name on the Hub" in err
    code, _, err = command(capsys, "chat", "nowhere", "--base")
    assert code == 2 and "--base is only for adapters, but there is no folder 'nowhere'" in err


def test_a_reward_function_by_its_file(own_rows, capsys):
    (own_rows / "my_score.py").write_text("def score(completions, **columns):\n    return [1.0] * len(completions)\n")
    rows = "".join(json.dumps({"prompt": f"w{i}"}) + "\n" for i in range(4))
    (own_rows / "prompts.jsonl").write_text(rows)
    keys = {
        "trainer": "grpo",
        "dataset_name": "prompts.jsonl",
        "columns": None,
        "max_length": None,
        "num_generations": 2,
    }
    code, _, err = train(capsys, own_rows, "--dry_run", reward_funcs=["my_score.py:score"], **keys)
    assert code == 2 and "Write my_score.score, as Python imports it." in err
