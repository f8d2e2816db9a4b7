"""Rows that no trainer can use: each is an error in one line with file, row, field, value and remedy, no traceback."""

import json
import time

import pytest

from liger_trainer.command.recipe.read import TRAINERS, RecipeArguments
from liger_trainer.command.rows.load import load_rows
from liger_trainer.errors import RecipeError

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
TURNS = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def load(folder, rows, trainer="sft", **keys):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = RecipeArguments(dataset_name="rows.jsonl", trainer=trainer, **keys)
    return load_rows(args, folder, TRAINERS[trainer].columns, 0)[0]


BAD = {
    "null text": ("sft", [{"text": "a"}, {"text": None}], r"Row 1 of the dataset has text None; expected text"),
    "only nulls": ("sft", [{"text": None}], "Row 0 of the dataset has text None; expected text"),
    "number as text": ("sft", [{"text": 5}, {"text": 6}], "Row 0 of the dataset has text 5; expected text"),
    "one number": ("sft", [{"text": "a"}, {"text": 5}], "Row 1 of the dataset has text 5; expected text"),
    "null completion": (
        "sft",
        [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}],
        r"Row 1 of the dataset has completion None; expected text, as in every row\. Correct or remove it",
    ),
    "number as prompt": ("sft", [{"prompt": 3, "completion": "b"}], "Row 0 of the dataset has prompt 3; expected"),
    "no messages": ("sft", [{"messages": []}], r"Row 0 of the dataset has messages \[\]; expected a list of messages"),
    "one without messages": (
        "sft",
        [{"messages": [USER, ANSWER]}, {"messages": []}],
        r"Row 1 of the dataset has messages \[\]; expected a list of messages",
    ),
    "messages as text": ("sft", [{"messages": "hi"}], "Row 0 of the dataset has messages 'hi'; expected a list"),
    "messages of texts": ("sft", [{"messages": ["hi"]}], r"Row 0 of the dataset has messages \['hi'\]; expected"),
    "a message without role": (
        "sft",
        [{"messages": [USER, ANSWER]}, {"messages": [USER, {"content": "Hello"}]}],
        "Row 1 of the dataset has messages .*each with role and content",
    ),
    "a message without content": (
        "sft",
        [{"messages": [USER, ANSWER]}, {"messages": [USER, {"role": "assistant"}]}],
        "Row 1 of the dataset has messages .*each with role and content",
    ),
    "a misspelt role": (
        "sft",
        [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER | {"role": "asistant"}]}],
        "Row 1 of the dataset has messages with the role 'asistant'; expected 'assistant'",
    ),
    "a role in capitals": (
        "sft",
        [{"prompt": [USER | {"role": "User"}], "completion": [ANSWER]}],
        "Row 0 of the dataset has prompt with the role 'User'; expected 'user'",
    ),
    "a role of ShareGPT": (
        "sft",
        [{"messages": [USER | {"role": "human"}, ANSWER]}],
        "Row 0 of the dataset has messages with the role 'human'; expected 'user'",
    ),
    "pairs without a difference": (
        "dpo",
        [{"prompt": "a", "chosen": "b", "rejected": "b"}, {"prompt": "c", "chosen": "d", "rejected": "d"}],
        "chosen and rejected are the same in every row",
    ),
    "a number as content": (
        "sft",
        [{"messages": [{"role": "user", "content": 1}]}],
        "Row 0 of the dataset has messages .*each with role and content",
    ),
    "turns in chosen": (
        "dpo",
        [{"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": TURNS[1]}],
        "Row 0 of the dataset has chosen .* It has turns with from and value: set prompt_template: sharegpt.$",
    ),
    "turns in messages": ("sft", [{"messages": TURNS}], "set prompt_template: sharegpt"),
    "turns in prompt": ("dpo", [{"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:]}], "from and value"),
    "text, then messages": (
        "sft",
        [{"text": "a"}, {"messages": [USER, ANSWER]}],
        "Row 0 of the dataset has messages None; expected a list of messages.*as in every row",
    ),
    "prompts as text, then as messages": (
        "sft",
        [{"prompt": "a", "completion": "b"}, {"prompt": [USER], "completion": [ANSWER]}],
        r"Row 1 of the dataset has prompt \[.*\]; expected text, as in every row",
    ),
    "prompt as text, completion as messages": (
        "sft",
        [{"prompt": "a", "completion": [ANSWER]}],
        "prompt is text; completion is a list of messages",
    ),
    "labels as text": (
        "kto",
        [{"prompt": "a", "completion": "b", "label": "good"}],
        "Row 0 of the dataset has label 'good'; expected true or false, without quotes",
    ),
    "a label as text": (
        "kto",
        [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "b", "label": "good"}],
        "label .*expected true or false, without quotes",
    ),
    "null label": (
        "kto",
        [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "b", "label": None}],
        "Row 1 of the dataset has label None; expected true or false",
    ),
    "number as label": (
        "kto",
        [{"prompt": "a", "completion": "b", "label": 1}, {"prompt": "a", "completion": "b", "label": 2}],
        r"Row 1 of the dataset has label 2; expected true or false, without quotes \(or 1 and 0\), as in every",
    ),
    "null chosen": (
        "dpo",
        [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": None, "rejected": "c"}],
        "Row 1 of the dataset has chosen None; expected text",
    ),
    "empty chosen without a prompt": (
        "dpo",
        [{"chosen": "ab", "rejected": "ac"}, {"chosen": "", "rejected": "c"}],
        "Row 1 of the dataset has chosen '', without a prompt",
    ),
    "answers without a prompt": (
        "dpo",
        [{"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}, {"chosen": [ANSWER], "rejected": [ANSWER]}],
        "Row 1 of the dataset has chosen .*, without a prompt",
    ),
    "other prompts in chosen and rejected": (
        "dpo",
        [{"chosen": [USER, ANSWER], "rejected": [{"role": "user", "content": "Ho"}, ANSWER]}],
        "Row 0 of the dataset: chosen and rejected start with different prompts",
    ),
    "prompt as text, answers alone as messages": (
        "orpo",
        [{"prompt": "Hi", "chosen": [ANSWER], "rejected": [ANSWER]}],
        "prompt is text; chosen is a list of messages",
    ),
    "empty completions": (
        "sft",
        [{"prompt": "a", "completion": " "}] * 2,
        "completion has an empty answer in every row",
    ),
    "messages without a word": (
        "sft",
        [{"messages": [USER, ANSWER | {"content": ""}]}],
        "messages has an empty answer in every row",
    ),
    "no tokens": ("sft", [{"input_ids": [1, 2]}, {"input_ids": []}], r"Row 1 of the dataset has input_ids \[\]"),
    "tokens as text": ("sft", [{"input_ids": "a"}], "Row 0 of the dataset has input_ids 'a'; expected a list of token"),
    "empty prompt for rewards": ("grpo", [{"prompt": []}], r"Row 0 of the dataset has prompt \[\]"),
}


@pytest.mark.parametrize("trainer, rows, message", BAD.values(), ids=BAD)
def test_row_that_no_trainer_can_use(trainer, rows, message, tmp_path):
    with pytest.raises(RecipeError, match=message) as error:
        load(tmp_path, rows, trainer)
    assert str(error.value).startswith("dataset_name 'rows.jsonl'")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "trainer, rows, count",
    [
        ("sft", [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}], 1),
        ("sft", [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER | {"content": " "}]}], 1),
        ("sft", [{"messages": [USER, ANSWER]}, {"messages": [USER, CALL]}], 0),
        ("kto", [{"prompt": "a", "completion": c, "label": bool(c)} for c in ("b", "")], 0),
    ],
)
def test_a_few_empty_answers_are_told(trainer, rows, count, tmp_path, capsys):
    """Real data such as Alpaca has them, and a rejected answer may well be empty."""
    assert len(load(tmp_path, rows, trainer)) == 2
    assert ("1 of 2 rows have an empty answer" in capsys.readouterr().err) == bool(count)


def test_long_values_are_shortened(tmp_path):
    with pytest.raises(RecipeError, match="Row 0 of the dataset has messages 'xxx") as error:
        load(tmp_path, [{"messages": "x" * 5000}])
    assert len(str(error.value)) < 400
    with pytest.raises(RecipeError, match="Row 0 of the dataset has conversations 'xxx") as error:
        load(tmp_path, [{"conversations": "x" * 5000}], prompt_template="sharegpt")
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "blank.jsonl"])
def test_a_file_without_rows(name, tmp_path):
    (tmp_path / name).write_text({"rows.json": "[]", "rows.csv": "text\n", "blank.jsonl": "\n\n"}.get(name, ""))
    with pytest.raises(RecipeError, match=f"dataset_name '{name}', .*(has no rows|corresponds to no data)"):
        load_rows(RecipeArguments(dataset_name=name), tmp_path, TRAINERS["sft"].columns, 0)


@pytest.mark.parametrize("name", ["latin.jsonl", "utf16.jsonl", "latin.csv", "ragged.csv", "random.parquet"])
@pytest.mark.parametrize("template", ["none", "alpaca"])
def test_a_file_that_cannot_be_read(name, template, tmp_path):
    """Each gives one line. The JSON reader takes Latin-1 for text, and decoding it later would fail."""
    latin = '{"instruction": "caf\xe9", "output": "b", "text": "caf\xe9"}\n'.encode("latin-1")
    content = {
        "latin.jsonl": latin,
        "utf16.jsonl": '{"text": "b"}\n'.encode("utf-16"),
        "latin.csv": "text\ncaf\xe9\n".encode("latin-1"),
        "ragged.csv": b"a\nb,c\n1,2,3,4\n",
    }
    (tmp_path / name).write_bytes(content.get(name, b"PAR1 but not really"))
    with pytest.raises(RecipeError, match=f"dataset_name '{name}', split 'train', cannot be loaded: ") as error:
        load_rows(RecipeArguments(dataset_name=name, prompt_template=template), tmp_path, TRAINERS["sft"].columns, 0)
    assert "\n" not in str(error.value)
    assert name[:3] not in ("lat", "utf") or "UTF" in str(error.value) or "utf-8" in str(error.value)


def test_turns_of_another_name(tmp_path):
    """`prompt_template: sharegpt` also reads turns from `messages`, as some files name them."""
    train = load(tmp_path, [{"messages": TURNS}], prompt_template="sharegpt")
    assert train.to_list() == [{"messages": [USER, ANSWER]}]


def test_messages_under_the_name_of_turns(tmp_path):
    with pytest.raises(RecipeError, match="name the column messages, and unset prompt_template"):
        load(tmp_path, [{"conversations": [USER, ANSWER]}], prompt_template="sharegpt")


GOOD = {
    "tool calls and parts": ("sft", [{"messages": [USER, CALL]}, {"messages": [USER, ANSWER]}]),
    "content in parts": ("sft", [{"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}, ANSWER]}]),
    "several users": ("sft", [{"messages": [USER | {"role": f"user_{n}"} for n in (1, 2)] + [ANSWER]}]),
    "empty text": ("sft", [{"text": ""}, {"text": "a"}]),
    "empty prompt": ("sft", [{"prompt": "", "completion": "a"}]),
    "numbers 0 and 1 as labels": ("kto", [{"prompt": "a", "completion": "b", "label": i} for i in (0, 1)]),
    "pairs without a prompt": ("dpo", [{"chosen": [USER, ANSWER], "rejected": [USER, CALL]}]),
}


@pytest.mark.parametrize("trainer, rows", GOOD.values(), ids=GOOD)
def test_rows_that_pass(trainer, rows, tmp_path):
    assert len(load(tmp_path, rows, trainer)) == len(rows)


def test_a_prompt_that_stands_in_the_answers_too(tmp_path):
    """With a text `prompt` and whole conversations in chosen and rejected, TRL's DPO would add text to messages."""
    other = ANSWER | {"content": "Ho"}
    train = load(tmp_path, [{"prompt": "Hi", "chosen": [USER, ANSWER], "rejected": [USER, other]}], "dpo")
    assert train.column_names == ["chosen", "rejected"]


def test_a_prompt_next_to_messages_is_refused(tmp_path):
    """With `prompt` and `messages` but no `completion`, TRL's SFT looks for the completion."""
    train = load(tmp_path, [{"prompt": "Hi", "prompt_id": "1", "messages": [USER, ANSWER]}])
    assert train.column_names == ["prompt_id", "messages"]


def test_many_rows_in_seconds():
    """Rows are read one by one, which is quick compared with tokenising them."""
    from datasets import Dataset

    from liger_trainer.command.rows.checks import check_rows

    texts = Dataset.from_dict({"text": ["some words"] * 200_000})
    talks = Dataset.from_dict({"messages": [[USER, ANSWER]] * 50_000})
    started = time.perf_counter()
    check_rows(texts, ("text",))
    check_rows(talks, ("messages",))
    assert time.perf_counter() - started < 10
