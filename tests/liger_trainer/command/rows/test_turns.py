"""System prompts in a column, and messages that say whether they are learned: taken as meant, or refused."""

import json

import pytest
from datasets import Dataset
from recipe_fixtures import command, write_recipe

from liger_trainer.command.recipe.read import TRAINERS, RecipeArguments
from liger_trainer.command.rows.load import load_rows
from liger_trainer.command.rows.turn_weights import check_turn_weights
from liger_trainer.data.formats import sharegpt_row
from liger_trainer.errors import RecipeError

USER, ANSWER = {"role": "user", "content": "w4"}, {"role": "assistant", "content": "w5"}
SYSTEM = {"role": "system", "content": "w3"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def load(folder, rows, trainer="sft", **keys):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = RecipeArguments(dataset_name="rows.jsonl", trainer=trainer, **keys)
    return load_rows(args, folder, TRAINERS[trainer].columns, 0)[0]


PLACED = {
    "messages": ("sft", {"messages": [USER, ANSWER]}, {"messages": [SYSTEM, USER, ANSWER]}),
    "a prompt": (
        "sft",
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": [SYSTEM, USER], "completion": [ANSWER]},
    ),
    "a pair": (
        "dpo",
        {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": "w6"}]},
        {"chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, ANSWER | {"content": "w6"}]},
    ),
    "the same once more": ("sft", {"messages": [SYSTEM, USER, ANSWER]}, {"messages": [SYSTEM, USER, ANSWER]}),
}


@pytest.mark.parametrize("trainer, row, expected", PLACED.values(), ids=PLACED)
def test_a_system_column_is_the_first_message(trainer, row, expected, tmp_path):
    assert load(tmp_path, [row | {"system": "w3"}], trainer).to_list() == [expected]


def test_system_columns_with_gaps_keys_and_templates(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    rows = load(tmp_path, [{"system": None, "messages": [USER, ANSWER]}, {"system": "w3", "messages": [USER, call]}])
    assert [turn["role"] for turn in rows[0]["messages"]] == ["user", "assistant"]
    assert rows[1]["messages"][0]["content"] == "w3"
    last = load(tmp_path, [{"system": "w3", "messages": [USER, ANSWER]}], prompt_template="last_turn")
    assert last.to_list() == [{"prompt": [SYSTEM, USER], "completion": [ANSWER]}]
    kept = load(tmp_path, [{"system": "w3", "prompt": [USER]}], "grpo")
    assert kept.to_list() == [{"system": "w3", "prompt": [SYSTEM, USER]}]


def test_two_system_prompts(tmp_path, capsys):
    said = "has two system prompts: 'w9' in the column system, and 'w3' in the first message. Keep one of them"
    with pytest.raises(RecipeError, match=f"Row 1 of the dataset {said}"):
        load(tmp_path, [{"system": system, "messages": [SYSTEM, USER, ANSWER]} for system in ("w3", "w9")])
    turns = [{"from": "system", "value": "w3"}, {"from": "human", "value": "w4"}, {"from": "gpt", "value": "w5"}]
    with pytest.raises(RecipeError, match=f"Row 4 of the dataset {said}"):
        sharegpt_row({"conversations": turns, "system": "w9"}, 4)
    with pytest.raises(RecipeError, match="Row 0 of the dataset has system 5; expected text, or nothing"):
        load(tmp_path, [{"system": 5, "messages": [USER, ANSWER]}])
    load(tmp_path, [{"system": "w3", "prompt": "w4", "completion": "w5"}])
    assert "the column system is not read, because prompt is no list of messages" in capsys.readouterr().err
    load(tmp_path, [{"system_prompt": "w3", "messages": [USER, ANSWER]}])
    assert "set columns: {system: system_prompt}" in capsys.readouterr().err


OFF, ON = ANSWER | {"weight": 0}, ANSWER | {"weight": 1}
REFUSED = {
    "weight 0": ([USER, OFF, USER, ON], True, r"messages\[1\] with weight 0 and the role 'assistant', .* be learned"),
    "train false": ([USER, ANSWER | {"train": False}], True, r"messages\[1\] with train False .* be learned"),
    "a user": ([USER | {"train": False}, ANSWER], False, r"messages\[0\] .* Set assistant_only_loss: true"),
    "a user to learn": ([USER | {"train": True}, ANSWER], True, "would not be learned, because of assistant_only_loss"),
    "half": ([USER, ANSWER | {"weight": 0.5}], True, "with weight 0.5; expected 0 or 1"),
    "parts": ([USER, ANSWER | {"train_detail": [{"begin": 0}]}], True, "with train_detail .* whole messages"),
}


@pytest.mark.parametrize("messages, answers_alone, said", REFUSED.values(), ids=REFUSED)
def test_weights_that_the_training_would_not_follow(messages, answers_alone, said):
    rows = Dataset.from_list([{"messages": [USER, ANSWER]}, {"messages": messages}])
    with pytest.raises(RecipeError, match=f"Row 1 of the dataset has .*{said}"):
        check_turn_weights(rows, answers_alone)


def test_weights_that_the_training_follows():
    answers = [USER | {"train": False}, ON, USER | {"weight": 0}, ANSWER | {"train": True}]
    check_turn_weights(Dataset.from_list([{"messages": answers}]), answers_alone=True)
    check_turn_weights(Dataset.from_list([{"prompt": [USER, OFF, USER], "completion": [ON]}]), answers_alone=False)
    pair = {"chosen": [USER | {"weight": 0}, ON], "rejected": [USER | {"weight": 0}, ON]}
    check_turn_weights(Dataset.from_list([pair]), answers_alone=False)
    check_turn_weights(Dataset.from_list([{"text": "w3"}]), answers_alone=False)
    with pytest.raises(RecipeError, match=r"completion\[0\] with weight 0 .* Remove the row, or weight"):
        check_turn_weights(Dataset.from_list([{"prompt": [USER], "completion": [OFF]}]), answers_alone=False)


def test_keys_of_sharegpt_turns_stay():
    turns = [{"from": "human", "value": "w4"}, {"from": "gpt", "value": "w5", "weight": 0, "text": None}]
    assert sharegpt_row({"conversations": turns})["messages"] == [USER, OFF]


def test_a_recipe_refuses_them_before_a_model_is_loaded(folder, capsys):
    (folder / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}")
    (folder / "rows.jsonl").write_text(json.dumps({"messages": [USER, OFF, USER, ON]}) + "\n")
    recipe = write_recipe(folder, prompt_template=None)
    code, _, err = command(capsys, "train", recipe, "--dry_run")
    assert code == 2 and "messages[1] with weight 0" in err.strip().splitlines()[-1]
    code, _, err = command(capsys, "train", recipe, "--dry_run", "--prompt_template", "last_turn")
    assert code == 0 and "weight" not in err, err


def test_answers_of_messages_that_repeat_the_prompt(tmp_path, capsys):
    other = ANSWER | {"content": "w6"}
    once = {"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": [other]}
    twice = once | {"chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, other]}
    assert load(tmp_path, [once, once], "dpo").to_list() == [once] * 2
    assert "begins with the prompt" not in capsys.readouterr().err
    assert load(tmp_path, [once, twice], "dpo").to_list() == [once] * 2
    told = capsys.readouterr().err
    for name in ("chosen", "rejected"):
        assert f"{name} begins with the prompt in 1 of 2 rows, first in row 1, and is read without it." in told
    row = {"prompt": [USER], "completion": [USER, ANSWER], "label": True}
    assert load(tmp_path, [row, row | {"label": False}], "kto")["completion"] == [[ANSWER]] * 2
    assert load(tmp_path, [row | {"system": "w3"}])[0]["prompt"] == [SYSTEM, USER]


def test_texts_that_repeat_the_prompt_are_told(tmp_path, capsys):
    row = {"prompt": "Which colour has the sky? ", "chosen": "Which colour has the sky? Blue", "rejected": "Red"}
    assert load(tmp_path, [row], "dpo").to_list() == [row]
    told = "chosen begins with the prompt in 1 of 1 rows, first in row 0, so that the model reads it twice. Remove it"
    assert told in capsys.readouterr().err
    load(tmp_path, [{"prompt": "The", "chosen": "The sky", "rejected": "Them"}], "dpo")
    assert "begins with the prompt" not in capsys.readouterr().err
