"""Columns under the user's own names, mixtures of data sets, lines of text, and turns that call tools."""

import json
from collections import Counter

import pytest
import yaml
from datasets import Dataset
from recipe_fixtures import command, write_model, write_recipe

from liger_trainer.command.recipe.read import TRAINERS, RecipeArguments
from liger_trainer.command.rows.columns import prepare_rows
from liger_trainer.command.rows.load import load_rows
from liger_trainer.data.formats import alpaca_row, sharegpt_row
from liger_trainer.errors import RecipeError

USER, ANSWER = {"role": "user", "content": "w4"}, {"role": "assistant", "content": "w5"}
PAIR = {"prompt": "question", "completion": "answer"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("columns") / "model"))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.name


def load(folder, rows=None, trainer="sft", seed=0, **keys):
    if rows is not None:
        keys["dataset_name"] = write(folder / "rows.jsonl", rows)
    return load_rows(RecipeArguments(trainer=trainer, **keys), folder, TRAINERS[trainer].columns, seed)[0]


def test_alpaca_tells_once_what_it_leaves_out_and_refuses_pictures(tmp_path, capsys):
    row = {"instruction": "w3", "output": "w4", "system": "w5", "history": [["w6", "w7"]]}
    assert load(tmp_path, [row] * 3, prompt_template="alpaca").to_list() == [alpaca_row(row)] * 3
    assert "does not read" not in capsys.readouterr().err
    load(tmp_path, [row | {"source": "a", "id": i} for i in range(3)], prompt_template="alpaca")
    said = "liger-trainer: prompt_template: alpaca does not read the columns source, id, which are left out."
    assert capsys.readouterr().err.splitlines().count(said) == 1
    with pytest.raises(RecipeError, match="pictures in images, which prompt_template: alpaca does not read. Write"):
        load(tmp_path, [row | {"images": ["a.png"]}], prompt_template="alpaca")


@pytest.mark.parametrize(
    "trainer, columns, row, expected",
    [
        ("sft", PAIR, {"question": "w4", "answer": "w5"}, {"prompt": "w4", "completion": "w5"}),
        ("sft", {"messages": "chat"}, {"chat": [USER, ANSWER]}, {"messages": [USER, ANSWER]}),
        ("sft", {"text": "content"}, {"content": "w4"}, {"text": "w4"}),
        ("medusa", {"input_ids": "tokens"}, {"tokens": [4, 5]}, {"input_ids": [4, 5]}),
        (
            "sft",
            {"messages": "chat", "images": "pictures"},
            {"chat": [USER, ANSWER], "pictures": ["https://a.b/c.png"]},
            {"messages": [USER, ANSWER], "images": ["https://a.b/c.png"]},
        ),
        (
            "dpo",
            {"prompt": "q", "chosen": "good", "rejected": "bad"},
            {"q": "w4", "good": "w5", "bad": "w6"},
            {"prompt": "w4", "chosen": "w5", "rejected": "w6"},
        ),
        (
            "kto",
            PAIR | {"label": "liked"},
            {"question": "w4", "answer": "w5", "liked": True},
            {"prompt": "w4", "completion": "w5", "label": True},
        ),
        (
            "grpo",
            {"prompt": "question", "solution": "answer"},
            {"question": "w4", "answer": "w5"},
            {"prompt": "w4", "solution": "w5"},
        ),
        # The columns are swapped; one has the other's name.
        (
            "sft",
            {"prompt": "completion", "completion": "prompt"},
            {"prompt": "w5", "completion": "w4"},
            {"prompt": "w4", "completion": "w5"},
        ),
        (
            "sft",
            {"prompt": "question"},
            {"question": "w4", "prompt": "w9", "completion": "w5"},
            {"prompt": "w4", "completion": "w5"},
        ),
        # Columns that the trainer would prefer are left out; columns that it does not read stay.
        (
            "sft",
            PAIR,
            {"question": "w4", "answer": "w5", "messages": [USER, ANSWER], "text": "w6", "id": 1},
            {"prompt": "w4", "completion": "w5", "id": 1},
        ),
        ("sft", {"text": "content"}, {"content": "w4", "prompt": "w7", "completion": "w8"}, {"text": "w4"}),
    ],
)
def test_columns(trainer, columns, row, expected, tmp_path):
    assert load(tmp_path, [row], trainer, columns=columns).to_list() == [expected]


TOKENS = {"input_ids": [4, 5, 6]}


@pytest.mark.parametrize(
    "more, unread",
    [
        ({"messages": [USER, ANSWER]}, "messages"),
        ({"text": "w4 w5"}, "text"),
        ({"prompt": "w4", "completion": "w5"}, "completion and prompt"),
        ({"prompt": [USER], "completion": [ANSWER], "labels": [-100, 5, 6]}, "completion and prompt"),
    ],
)
def test_tokens_beside_texts_are_trained_as_trl_does_and_the_texts_are_left_out(more, unread, tmp_path, capsys):
    expected = TOKENS | {name: value for name, value in more.items() if name == "labels"}
    assert load(tmp_path, [TOKENS | more]).to_list() == [expected]
    verb = "are" if " and " in unread else "is"
    err = capsys.readouterr().err
    assert f"input_ids is trained as it is, so {unread} {verb} not read. To train on {unread}, set columns: {{" in err
    with pytest.raises(RecipeError, match="system_prompt is 'w9', but input_ids is not a list of messages"):
        load(tmp_path, [TOKENS | more], system_prompt="w9")


@pytest.mark.parametrize("keys", [{"columns": {"messages": "messages"}}, {"prompt_template": "last_turn"}])
def test_tokens_and_their_labels_are_left_out_where_the_recipe_names_texts(keys, tmp_path):
    (row,) = load(tmp_path, [TOKENS | {"labels": [-100, 5, 6], "messages": [USER, ANSWER]}], **keys).to_list()
    assert row == ({"messages": [USER, ANSWER]} if "columns" in keys else {"prompt": [USER], "completion": [ANSWER]})


def test_labels_of_texts_are_left_out(tmp_path, capsys):
    """TRL would take them for the labels of the tokens that it makes of the text."""
    assert load(tmp_path, [{"text": "w4", "labels": 3}]).to_list() == [{"text": "w4"}]
    assert "labels is not read, because the rows are tokenized from text." in capsys.readouterr().err


@pytest.mark.parametrize(
    "keys, more",
    [
        ({"columns": {"messages": "messages"}}, {"messages": [USER, ANSWER]}),  # the recipe says what is trained
        ({}, {"prompt": "w4", "completion": "w5", "completion_mask": [0, 0, 1]}),  # TRL reads that they are there
        ({}, {"messages": [USER, ANSWER], "images": ["https://a.b/c.png"]}),  # TRL tokenizes images itself
    ],
)
def test_texts_beside_tokens_that_are_read(keys, more, tmp_path):
    (row,) = load(tmp_path, [TOKENS | more], **keys).to_list()
    assert row.items() >= more.items()
    assert ("input_ids" in row) == (not keys)


@pytest.mark.parametrize(
    "template, columns, row, expected",
    [
        (
            "alpaca",
            {"instruction": "q", "input": "more", "output": "a"},
            {"q": "w3", "more": "w4", "a": "w5"},
            alpaca_row({"instruction": "w3", "input": "w4", "output": "w5"}),
        ),
        (
            "sharegpt",
            {"conversations": "dialog"},
            {"dialog": [{"from": "human", "value": "w4"}, {"from": "gpt", "value": "w5"}]},
            {"messages": [USER, ANSWER]},
        ),
        ("last_turn", {"messages": "chat"}, {"chat": [USER, ANSWER]}, {"prompt": [USER], "completion": [ANSWER]}),
    ],
)
def test_columns_of_a_template(template, columns, row, expected, tmp_path):
    assert load(tmp_path, [row], prompt_template=template, columns=columns).to_list() == [expected]


def test_columns_of_each_data_set(tmp_path):
    names = [
        write(tmp_path / "a.jsonl", [{"question": "w4", "answer": "w5"}]),
        write(tmp_path / "b.jsonl", [{"q": "w6", "a": "w7"}]),
    ]
    columns = [PAIR, {"prompt": "q", "completion": "a"}]
    rows = load(tmp_path, dataset_name=names, columns=columns)
    assert rows.to_list() == [{"prompt": "w4", "completion": "w5"}, {"prompt": "w6", "completion": "w7"}]
    table = tmp_path / "d.csv"  # pandas and the JSON reader have different string types
    table.write_text("prompt,completion\nw8,w9\n")
    rows = load(tmp_path, dataset_name=[names[0], str(table)], columns=[PAIR, {}])
    assert rows.to_list()[1] == {"prompt": "w8", "completion": "w9"}
    plain = write(tmp_path / "c.jsonl", [{"prompt": "w8", "completion": "w9"}])
    rows = load(tmp_path, dataset_name=[names[0], plain], columns=[PAIR, {}])
    assert rows.to_list() == [{"prompt": "w4", "completion": "w5"}, {"prompt": "w8", "completion": "w9"}]
    with pytest.raises(RecipeError, match="columns lists 2 mappings, and dataset_name has 1 names"):
        load(tmp_path, dataset_name=names[0], columns=columns)


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"prompt": "qestion", "completion": "answer"}, "names 'qestion'. Did you mean question?"),
        (
            {"promt": "question", "completion": "answer"},
            "it has the columns promt, completion; the trainer needs one of.* sets 'promt'. Did you mean prompt?",
        ),
        ({"question": "prompt"}, r"maps them the wrong way round. .* columns: \{prompt: question\}"),
        ({"question": "prompt", "answer": "completion"}, r"columns: \{prompt: question, completion: answer\}"),
        ({"prompt": "question", "completion": "question"}, "expected a mapping .* each named once"),
        ({"prompt": ["question"]}, "expected a mapping"),
        ({}, "expected a mapping"),
        ([], "expected a mapping"),
        ("prompt=question", "columns is 'prompt=question'; expected a mapping"),
        ({"prompt": "question"}, "it has the columns prompt, answer; the trainer needs one of"),
        ({"prompt": "number", "completion": "answer"}, "Row 0 of the dataset has prompt 5; expected text"),
    ],
)
def test_columns_that_are_wrong(columns, message, tmp_path):
    row = {"question": "w4", "answer": "w5"} | ({"number": 5} if "number" in str(columns) else {})
    with pytest.raises(RecipeError, match=message):
        load(tmp_path, [row], columns=columns)


MESSAGES = {"messages": [USER, ANSWER]}
NOT_FITTING = {
    "a pair from messages": ("dpo", "none", MESSAGES, "Such a trainer compares two answers: write .* set trainer: sft"),
    "rows for KTO": ("kto", "none", MESSAGES | {"label": True}, "set prompt_template: last_turn"),
    "Alpaca by other names": (
        "sft",
        "alpaca",
        {"instruct": "w3", "output": "w4"},
        r"map them: columns: \{instruction: its name here\}",
    ),
}


@pytest.mark.parametrize("trainer, template, row, said", NOT_FITTING.values(), ids=NOT_FITTING)
def test_rows_of_another_form_are_told_what_fits(trainer, template, row, said, tmp_path):
    with pytest.raises(RecipeError, match=said) as caught:
        load(tmp_path, [row], trainer, prompt_template=template)
    assert trainer != "dpo" or "prompt_template" not in str(caught.value)


def test_columns_on_the_command_line_and_in_the_preview(model, tmp_path, capsys):
    write(tmp_path / "rows.jsonl", [{"question": "w4 ", "answer": "w5"}] * 4)
    keys = {"prompt_template": None, "model_name_or_path": model}
    path = write_recipe(tmp_path, **keys)
    option = "{prompt: question, completion: answer}"
    code, out, err = command(capsys, "train", path, "--columns", option, "--preview")
    assert code == 0 and "Columns of the rows: prompt, completion.\n" in out and "w4« w5 </s>»" in out, err
    path = write_recipe(tmp_path, columns=PAIR, **keys)
    code, out, err = command(capsys, "train", path, "--dry_run")
    assert code == 0 and yaml.safe_load(out)["columns"] == PAIR
    code, _, err = command(capsys, "train", path, "--columns", "{prompt: answer, completion: qestion}")
    assert code == 2 and "Did you mean question?" in err
    code, out, err = command(capsys, "train", path)
    assert code == 0 and "4 used of 4" in out, err
    code, _, err = command(capsys, "train", write_recipe(tmp_path, columns=5, **keys))
    assert code == 2 and "columns is 5. Field 'columns'" in err


def mixture(folder, **keys):
    names = [
        write(folder / "a.jsonl", [{"text": f"a{i}"} for i in range(300)]),
        write(folder / "b.jsonl", [{"text": f"b{i}"} for i in range(60)]),
    ]
    return load(folder, dataset_name=names, **keys)["text"]


def test_weights(tmp_path):
    first = mixture(tmp_path, dataset_weights=[3, 1])
    counts = Counter(text[0] for text in first)
    assert counts["b"] == 60 and 120 < counts["a"] < 240  # until the smaller one ends
    assert [text for text in first if text[0] == "a"] == [f"a{i}" for i in range(counts["a"])]
    assert mixture(tmp_path, dataset_weights=[0.75, 0.25]) == first != mixture(tmp_path, dataset_weights=[3, 1], seed=1)
    both = mixture(tmp_path, dataset_weights=[3, 1], dataset_stopping_strategy="all_exhausted")
    assert len(set(both)) == 360 and len(both) > 380  # rows of the smaller one repeat
    once = mixture(tmp_path, dataset_weights=[3, 1], dataset_stopping_strategy="all_exhausted_without_replacement")
    assert sorted(once) == sorted(mixture(tmp_path)) and len(once) == 360
    assert len(mixture(tmp_path, dataset_weights=[3, 1], max_rows=20)) == 20


@pytest.mark.parametrize("weights", [[1], [1, 2, 3], [1, 0], [1, -1], [1, float("nan")], []])
def test_wrong_dataset_weights_are_refused(weights, tmp_path):
    with pytest.raises(RecipeError, match="dataset_weights is .* expected a number above 0 for each dataset_name"):
        mixture(tmp_path, dataset_weights=weights)


def test_weights_in_a_recipe(model, tmp_path, capsys):
    names = [write(tmp_path / f"{name}.jsonl", [{"text": f"{name} w5"}] * 40) for name in ("w3", "w4")]
    keys = {"prompt_template": None, "model_name_or_path": model}
    path = write_recipe(tmp_path, dataset_name=names, dataset_weights=[3, 1], eval_dataset_name=names[0], **keys)
    words = ("--eval_strategy", "epoch", "--dataset_weights", "1", "1", "--preview", "6")
    code, out, err = command(capsys, "train", path, *words)
    assert code == 0 and "w3« w5" in out and "w4« w5" in out, err
    code, _, err = command(capsys, "train", path, "--dataset_stopping_strategy", "never")
    assert code == 2 and "never" in err and "first_exhausted" in err
    path = write_recipe(tmp_path, dataset_name=names[0], dataset_weights=[1, 1], **keys)
    code, _, err = command(capsys, "train", path)
    assert code == 2 and "dataset_weights is [1, 1]; expected" in err


def test_lines_of_text(tmp_path):
    (tmp_path / "rows.txt").write_text("w3 w4\n\n  \nw5\n")
    assert load(tmp_path, dataset_name="rows.txt").to_list() == [{"text": "w3 w4"}, {"text": "w5"}]
    assert load(tmp_path, dataset_name="rows.txt", trainer="grpo", columns={"prompt": "text"})["prompt"][:] == [
        "w3 w4",
        "w5",
    ]
    for nothing in ("", "\n \n"):
        (tmp_path / "empty.txt").write_text(nothing)
        with pytest.raises(RecipeError, match="'empty.txt', split 'train', has no rows"):
            load(tmp_path, dataset_name="empty.txt")


def call(name="look_up", **arguments):
    return {"from": "function_call", "value": json.dumps({"name": name, "arguments": arguments})}


def called(name="look_up", **arguments):
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


TURNS = [{"from": "human", "value": "w4"}, call(word="w6"), {"from": "observation", "value": "w7"}]
MESSAGES = [USER, called(word="w6"), {"role": "tool", "content": "w7"}]


def test_turns_that_call_tools(tmp_path):
    answer = {"from": "gpt", "value": "w5"}
    row = {"conversations": [*TURNS, answer], "tools": "[]"}
    assert load(tmp_path, [row], prompt_template="sharegpt").to_list() == [
        {"messages": [*MESSAGES, ANSWER], "tools": "[]"}
    ]
    two = json.dumps([{"name": "f", "arguments": '{"x": 1}'}, {"name": "g", "arguments": {}}])
    made = sharegpt_row({"conversations": [TURNS[0], {"from": "function_call", "value": two}]})["messages"][1]
    assert [part["function"] for part in made["tool_calls"]] == [
        {"name": "f", "arguments": {"x": 1}},
        {"name": "g", "arguments": {}},
    ]
    pair = {"conversations": TURNS, "chosen": answer, "rejected": answer | {"value": "w9"}}
    assert load(tmp_path, [pair], "dpo", prompt_template="sharegpt")[0]["prompt"] == MESSAGES


@pytest.mark.parametrize(
    "value",
    [
        "look_up(w6)",
        "[5]",
        '{"name": "f"}',
        '{"name": 1, "arguments": {}}',
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": [1]}',
    ],
)
def test_a_call_that_is_malformed(value, tmp_path):
    row = {"conversations": [TURNS[0], {"from": "function_call", "value": value}]}
    with pytest.raises(RecipeError, match=r"Row 0 .* function_call .* in conversations\[1\]; expected JSON such as"):
        load(tmp_path, [row], prompt_template="sharegpt")


def test_tools_that_are_text(tmp_path):
    texts = {'[{"name": "f"}]': '[{"name": "f"}]', " ": "[]", None: "[]"}
    rows = [{"messages": [USER, ANSWER], "tools": text} for text in texts]
    assert load(tmp_path, rows)["tools"][:] == list(texts.values())
    with pytest.raises(RecipeError, match=r"Row 1 of the dataset has tools 'look_up\(\)', which is not JSON"):
        load(tmp_path, [rows[0], rows[0] | {"tools": "look_up()"}])


def test_calls_in_a_later_row_keep_their_arguments(tmp_path):
    """datasets infers a message's fields from the first thousand rows."""
    plain = {"conversations": [TURNS[0], {"from": "gpt", "value": "w5"}], "id": 1}
    rows = [plain] * 1500
    rows[1200] = {"conversations": TURNS[:2], "id": 2}
    rows[1400] = {"conversations": [TURNS[0], call("add", x=1)], "id": 3}
    found = load(tmp_path, rows, prompt_template="sharegpt")
    assert found[0] == {"messages": [USER, ANSWER], "id": 1}
    assert found[1200]["messages"] == MESSAGES[:2] and found[1400]["messages"] == [USER, called("add", x=1)]


@pytest.mark.diagonal
@pytest.mark.parametrize("count", [3, 12_000], ids=["a few", "12 MB"])
@pytest.mark.parametrize(
    "first, last",
    [({}, {"x": 1}), ({"x": 1}, {"x": "w9"}), ({"x": None}, {"x": 2}), ({"x": {"y": 1}}, {"x": {"z": [1]}})],
)
def test_mixed_extra_keys(count, first, last, tmp_path):
    rows = [{"text": "w3 " * 350} | first] * count + [{"text": "w4"} | last]
    found = load(tmp_path, rows)
    assert len(found) == count + 1 and found[count] == {"text": "w4"} | last


def _turns(*texts):
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


def _parts(text):
    return [{"type": "text", "text": text}]


@pytest.mark.parametrize(
    "prompt, asked, as_told",
    [
        ("w4", _parts("w4"), ""),  # content as parts, which some sources write for text too
        ("w9", _parts("w4"), "In 2 of 2 rows, first in row 0, it is another text"),
        (None, "w4", ""),  # a column without a single text
    ],
)
def test_a_prompt_beside_whole_conversations(prompt, asked, as_told, capsys):
    answers = [_parts("w5"), _parts("w6")] if isinstance(asked, list) else ["w5", "w6"]
    row = {"prompt": prompt, "chosen": _turns(asked, answers[0]), "rejected": _turns(asked, answers[1])}
    rows = prepare_rows(Dataset.from_list([row] * 2), "none", TRAINERS["dpo"].columns, set())
    assert rows.column_names == ["chosen", "rejected"]
    said = capsys.readouterr().err
    assert as_told in said and bool(as_told) == ("is left out" in said)


def test_a_prompt_beside_a_turn_that_is_null():
    row = {"prompt": "w9", "chosen": [*_turns("w4", "w5"), None], "rejected": _turns("w4", "w6")}
    with pytest.raises(RecipeError, match="Row 0 of the dataset has chosen"):
        prepare_rows(Dataset.from_list([row] * 2), "none", TRAINERS["dpo"].columns, set())
