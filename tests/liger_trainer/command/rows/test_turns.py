"""System prompts in a column, and messages marked as learned or not: used as meant, or refused."""

import json

import pytest
from datasets import Dataset
from recipe_fixtures import command, write_recipe

from liger_trainer import LigerSFTTrainer
from liger_trainer.command.recipe.read import TRAINERS, RecipeArguments, parse_recipe
from liger_trainer.command.rows.load import load_rows
from liger_trainer.command.rows.sources import find_sources
from liger_trainer.command.rows.turn_weights import check_turn_weights
from liger_trainer.command.run.train import build_trainer
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
    assert "the column system is not read, because prompt is not a list of messages" in capsys.readouterr().err
    load(tmp_path, [{"system_prompt": "w3", "messages": [USER, ANSWER]}])
    assert "set columns: {system: system_prompt}" in capsys.readouterr().err


OFF, ON = ANSWER | {"weight": 0}, ANSWER | {"weight": 1}
REFUSED = {
    "weight 0": ([USER, OFF, USER, ON], False, r"messages\[1\] with weight 0 and the role 'assistant', .* be learned"),
    "train false": ([USER, ANSWER | {"train": False}], False, r"messages\[1\] with train False .* be learned"),
    "a user": ([USER | {"train": False}, ANSWER], False, r"messages\[0\] .* Set train_on: \[assistant\]"),
    "half": ([USER, ANSWER | {"weight": 0.5}], True, "with weight 0.5; expected 0 or 1"),
    "parts": ([USER, ANSWER | {"train_detail": [{"begin": 0}]}], True, "with train_detail .* whole messages"),
}


@pytest.mark.parametrize("messages, answers_alone, said", REFUSED.values(), ids=REFUSED)
def test_weights_that_the_training_would_not_follow(messages, answers_alone, said):
    rows = Dataset.from_list([{"messages": [USER, ANSWER]}, {"messages": messages}])
    with pytest.raises(RecipeError, match=f"Row 1 of the dataset has .*{said}"):
        check_turn_weights(rows, answers_alone)


def test_weights_that_the_training_follows():
    answers = [USER | {"train": False}, ON, USER | {"weight": 0}, OFF, USER | {"train": True}]
    check_turn_weights(Dataset.from_list([{"messages": answers}]), answers_alone=True)
    check_turn_weights(Dataset.from_list([{"prompt": [USER, OFF, USER], "completion": [ON]}]), answers_alone=False)
    pair = {"chosen": [USER | {"weight": 0}, ON], "rejected": [USER | {"weight": 0}, ON]}
    check_turn_weights(Dataset.from_list([pair]), answers_alone=False)
    check_turn_weights(Dataset.from_list([{"text": "w3"}]), answers_alone=False)
    with pytest.raises(RecipeError, match=r"chosen\[1\] with weight 0 .* Remove the row, or weight"):
        check_turn_weights(Dataset.from_list([{"chosen": [USER, OFF], "rejected": [USER, ON]}]), answers_alone=False)


FIRST, SECOND, LAST = ({"role": "assistant", "content": f"w{number}"} for number in (10, 20, 30))
CHAT = [USER, FIRST, USER | {"content": "w5"}, SECOND, USER | {"content": "w6"}, LAST]
LEARNED = {
    "answers": (CHAT, ["assistant"], [10, 20, 30]),
    "without one": ([*CHAT[:3], SECOND | {"weight": 0}, *CHAT[4:]], ["assistant"], [10, 30]),
    "a user too": ([CHAT[0] | {"train": True}, *CHAT[1:]], ["assistant"], [4, 10, 20, 30]),
    "users": (CHAT, ["user"], [4, 5, 6]),
    "all": (CHAT, ["user", "assistant"], [4, 10, 5, 20, 6, 30]),
    "assistant first": ([FIRST, *CHAT[2:]], ["assistant"], [10, 20, 30]),
}
TEMPLATES = {
    "plain": "{% for m in messages %}{{ '<s> ' if not loop.first }}{{ m['content'] + ' </s> ' }}{% endfor %}",
    "marked": (
        "{% for m in messages %}{{ '<s> ' if not loop.first }}{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] + ' </s> ' }}{% endgeneration %}{% else %}{{ m['content'] + ' </s> ' }}{% endif %}{% endfor %}"
    ),
    "no empty list": (
        "{{ messages[0]['role'][:0] }}{% for m in messages %}{{ '<s> ' if not loop.first }}"
        "{{ m['content'] + ' </s> ' }}{% endfor %}"
    ),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("messages, roles, learned", LEARNED.values(), ids=LEARNED)
def test_what_is_learned_of_messages(messages, roles, learned, template, folder):
    """Each learned message counts with its end-of-turn token, and nothing else does."""
    (folder / "model" / "chat_template.jinja").write_text(template)
    (folder / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    recipe = parse_recipe(str(write_recipe(folder, prompt_template=None, train_on=roles)))
    trainer = build_trainer(recipe, find_sources(recipe), [], LigerSFTTrainer)
    row = trainer.train_dataset[0]
    want = [token for number in learned for token in (number, 2)]
    got = [label for label in row["labels"] if label != -100]
    assert [token for token in got if token != 1] == want  # 1 is the generation prompt, which precedes each turn
    contents = [int(turn["content"][1:]) for turn in messages]
    assert [token for token in row["input_ids"] if token > 2] == contents


def test_train_on_where_it_has_no_meaning(folder, capsys):
    write = {"prompt_template": None, "train_on": ["assistant"]}
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "w3", "completion": "w4"}) + "\n")
    code, _, err = command(capsys, "train", write_recipe(folder, **write), "--dry_run")
    assert code == 2 and "train_on is ['assistant'], but the rows have prompt, completion and no messages" in err
    code, _, err = command(capsys, "train", write_recipe(folder, **write), "--dry_run", "--trainer", "dpo")
    assert code == 2 and "train_on is ['assistant'], which LigerDPOTrainer does not read" in err
    code, _, err = command(capsys, "train", write_recipe(folder, **write, assistant_only_loss=False), "--dry_run")
    assert code == 2 and "but assistant_only_loss is false. Remove one of them" in err


ASKED = {
    "sft": (
        {"q": "w3", "a": "w4", "prompt": "w9"},
        {"question": "q", "answer": "a"},
        {"prompt": [{"role": "user", "content": "w3"}], "completion": [{"role": "assistant", "content": "w4"}]},
    ),
    "dpo": (
        {"q": "w3", "chosen": "w4", "rejected": "w5"},
        {"question": "q"},
        {
            "prompt": [{"role": "user", "content": "w3"}],
            "chosen": [{"role": "assistant", "content": "w4"}],
            "rejected": [{"role": "assistant", "content": "w5"}],
        },
    ),
    "grpo": (
        {"q": "w3", "a": "4"},
        {"question": "q", "answer": "a"},
        {"answer": "4", "prompt": [{"role": "user", "content": "w3"}]},
    ),
}


@pytest.mark.parametrize("trainer, row, columns, expected", [(k, *v) for k, v in ASKED.items()], ids=ASKED)
def test_questions_and_answers_become_turns(trainer, row, columns, expected, tmp_path):
    assert load(tmp_path, [row], trainer, columns=columns).to_list() == [expected]
    first = next(name for name in ("prompt", "chosen") if name in expected)
    with_prompt = expected | {first: [SYSTEM, *expected[first]]}
    assert load(tmp_path, [row], trainer, columns=columns, system_prompt="w3").to_list() == [with_prompt]


def test_wrong_questions_and_answers_are_refused(tmp_path):
    row = {"q": "w3", "a": "w4", "p": "w5"}
    with pytest.raises(RecipeError, match="which has question and prompt. Keep one form"):
        load(tmp_path, [row], columns={"question": "q", "prompt": "p"})
    with pytest.raises(RecipeError, match="Row 1 of the dataset has answer 7; expected text"):
        load(tmp_path, [row, row | {"a": 7}], columns={"question": "q", "answer": "a"})
    with pytest.raises(RecipeError, match="system_prompt is 'w3', but prompt is not a list of messages"):
        load(tmp_path, [row], columns={"prompt": "q", "completion": "a"}, system_prompt="w3")
    with pytest.raises(RecipeError, match="system_prompt is 'w3', but the rows also have a column system"):
        load(tmp_path, [{"system": "w5", "messages": [USER, ANSWER]}], system_prompt="w3")
    with pytest.raises(RecipeError, match="Row 0 of the dataset has two system prompts: 'w9' in system_prompt"):
        load(tmp_path, [{"messages": [SYSTEM, USER, ANSWER]}], system_prompt="w9")


def test_rows_without_a_message_to_learn():
    for messages in ([USER, OFF], [USER]):
        rows = Dataset.from_list([{"messages": [USER, ANSWER]}, {"messages": messages}])
        with pytest.raises(RecipeError, match="learned, but row 1 of the dataset has none in messages"):
            check_turn_weights(rows, answers_alone=True)


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
    told = "chosen begins with the prompt in 1 of 1 rows, first in row 0, so the model reads it twice. Remove it"
    assert told in capsys.readouterr().err
    load(tmp_path, [{"prompt": "The", "chosen": "The sky", "rejected": "Them"}], "dpo")
    assert "begins with the prompt" not in capsys.readouterr().err
