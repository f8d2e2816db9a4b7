"""Rows: every kind of source, and an error for each way in which data can be missing."""

import json

import pytest

from liger_trainer.command.recipe.read import TRAINERS, RecipeArguments
from liger_trainer.command.rows.load import load_rows
from liger_trainer.data.formats import alpaca_row, sharegpt_row
from liger_trainer.errors import RecipeError
from liger_trainer.paths import shipped

COLUMNS = TRAINERS["sft"].columns
ALPACA = [
    {"instruction": f"Count to {i}.", "input": "" if i % 2 else f"from {i}", "output": f"{i}!"} for i in range(10)
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def load(folder, seed=0, columns=COLUMNS, **keys):
    return load_rows(RecipeArguments(**keys), folder, columns, seed)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv"])
def test_local_files(suffix, tmp_path):
    import pandas

    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        write(path, ALPACA)
    elif suffix == ".json":  # a list, as the Alpaca data has it
        path.write_text(json.dumps(ALPACA))
    elif suffix == ".parquet":
        pandas.DataFrame(ALPACA).to_parquet(path)
    else:
        pandas.DataFrame(ALPACA).to_csv(path, index=False)
    train, evaluation = load(tmp_path, dataset_name=str(path), prompt_template="alpaca")
    assert evaluation is None
    assert train.column_names == ["prompt", "completion"]
    assert train.to_list() == [alpaca_row(row) for row in ALPACA]


def test_relative_to_the_recipe_or_to_the_working_directory(tmp_path, monkeypatch):
    folder = tmp_path / "recipes"
    folder.mkdir()
    write(folder / "rows.jsonl", ALPACA[:3])
    assert len(load(folder, dataset_name="rows.jsonl", prompt_template="alpaca")[0]) == 3
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", ALPACA[:5])
    assert len(load(folder, dataset_name="rows.jsonl", prompt_template="alpaca")[0]) == 5


def test_folder_with_splits(tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl", ALPACA[:6])
    write(folder / "test.jsonl", ALPACA[6:])
    train, evaluation = load(tmp_path, dataset_name="folder", dataset_eval_split="test", prompt_template="alpaca")
    assert (len(train), len(evaluation)) == (6, 4)
    with pytest.raises(RecipeError, match="split 'validation', cannot be loaded"):
        load(tmp_path, dataset_name="folder", dataset_train_split="validation", prompt_template="alpaca")
    (folder / "dataset_infos.json").write_text("{}")  # as in a copy of a repository on the Hub
    assert len(load(tmp_path, dataset_name="folder", prompt_template="alpaca")[0]) == 6
    (folder / "LICENSE.txt").write_text("as is")
    assert len(load(tmp_path, dataset_name="folder", prompt_template="alpaca")[0]) == 6
    assert capsys.readouterr().err.count("LICENSE.txt was not read") == 1
    (folder / "more.csv").write_text("instruction,output\na,b\n")  # datasets would leave it out
    with pytest.raises(RecipeError, match="more.csv was not read: only one kind of file is read from a folder"):
        load(tmp_path, dataset_name="folder", prompt_template="alpaca")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"prompt": "a", "completion": "b"},
        {"text": "a b"},
    ],
    ids=lambda row: "+".join(row),
)
def test_other_rows_pass_through_unchanged(row, tmp_path):
    train, _ = load(tmp_path, dataset_name=write(tmp_path / "rows.jsonl", [row, row]))
    assert train.to_list() == [row, row]


def test_eval_fraction_and_max_rows(tmp_path):
    path = write(tmp_path / "rows.jsonl", ALPACA)
    keys = {"dataset_name": path, "prompt_template": "alpaca"}
    train, evaluation = load(tmp_path, eval_fraction=0.2, **keys)
    assert (len(train), len(evaluation)) == (8, 2)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in evaluation}
    assert load(tmp_path, eval_fraction=0.2, **keys)[1].to_list() == evaluation.to_list()
    assert load(tmp_path, max_rows=3, **keys)[0].to_list() == [alpaca_row(row) for row in ALPACA[:3]]
    with pytest.raises(RecipeError, match="eval_fraction is 0.9, but of 1 rows: test_size=1"):
        load(tmp_path, eval_fraction=0.9, max_rows=1, **keys)


def test_missing_sources(tmp_path):
    for keys, message in (
        ({}, "dataset_name is missing"),
        ({"dataset_name": "nothing.jsonl"}, "dataset_name is 'nothing.jsonl', but that file does not exist"),
        ({"dataset_name": "./nothing"}, "dataset_name is './nothing', but that file does not exist"),
        ({"dataset_name": "nobody/no-such-data"}, "'nobody/no-such-data', split 'train', cannot be loaded"),
    ):
        with pytest.raises(RecipeError, match=message):
            load(tmp_path, **keys)


def test_unreadable_sources(tmp_path):
    (tmp_path / "rows.xml").write_text("hello")
    with pytest.raises(RecipeError, match="expected a file name that ends in one of .json, .jsonl, .ndjson, .parquet"):
        load(tmp_path, dataset_name="rows.xml")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": ')
    with pytest.raises(
        RecipeError, match="cannot be loaded: line 2 is not JSON: Expecting value, column 9: '{\"text\": '"
    ):
        load(tmp_path, dataset_name="broken.jsonl")
    (tmp_path / "list.json").write_text('[{"text": "a"},\n {"text": "b"},\n {"text" "c"}]')
    with pytest.raises(RecipeError, match="cannot be loaded: Expecting ':' delimiter: line 3 column 10"):
        load(tmp_path, dataset_name="list.json")


def test_columns(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(
        RecipeError,
        match="the columns question, answer; the trainer needs one of: messages; .* map them: columns: ",
    ):
        load(tmp_path, dataset_name=path)
    with pytest.raises(RecipeError, match="needs instruction and output"):
        load(tmp_path, dataset_name=path, prompt_template="alpaca")
    with pytest.raises(RecipeError, match="set prompt_template: alpaca"):
        load(tmp_path, dataset_name=write(tmp_path / "alpaca.jsonl", ALPACA))


@pytest.mark.parametrize("value", [["x"], [], 5])
def test_an_alpaca_input_must_be_text(value, tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"instruction": "a", "input": value, "output": "b"}])
    with pytest.raises(RecipeError, match=r"Row 0 of the dataset has input .*; expected text"):
        load(tmp_path, dataset_name=path, prompt_template="alpaca")


def test_rows_that_are_not_text(tmp_path):
    for row, message in (
        ({"instruction": "a", "output": None}, "Row 1 of the dataset has output None; expected text"),
        ({"instruction": " ", "output": "b"}, "Row 1 of the dataset has instruction ' '"),
    ):
        path = write(tmp_path / "rows.jsonl", [{"instruction": "a", "output": "b"}, row])
        with pytest.raises(RecipeError, match=message):
            load(tmp_path, dataset_name=path, prompt_template="alpaca")


QUESTION = {"from": "human", "value": "Hi"}
GOOD, BAD = {"from": "gpt", "value": "Hello"}, {"from": "gpt", "value": "What?"}


def test_sharegpt_rows(tmp_path):
    """A preference, with a system turn or column; extra columns stay. Without a preference: messages."""
    rows = [
        {"conversations": [{"from": "system", "value": "Be kind."}, QUESTION], "chosen": GOOD, "rejected": BAD, "n": 1},
        {"conversations": [QUESTION, GOOD, QUESTION], "chosen": GOOD, "rejected": BAD, "n": 2},
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    train, _ = load(tmp_path, columns=TRAINERS["dpo"].columns, dataset_name=path, prompt_template="sharegpt")
    hi = {"role": "user", "content": "Hi"}
    hello = {"role": "assistant", "content": "Hello"}
    answers = {"chosen": [hello], "rejected": [{"role": "assistant", "content": "What?"}]}
    be_kind = {"role": "system", "content": "Be kind."}
    assert train.to_list() == [
        {"prompt": [be_kind, hi], **answers, "n": 1},
        {"prompt": [hi, hello, hi], **answers, "n": 2},
    ]
    assert sharegpt_row({"conversations": [QUESTION], "system": "Be kind.", "chosen": GOOD, "rejected": BAD}) == {
        "prompt": [be_kind, hi],
        **answers,
    }
    assert sharegpt_row({"conversations": [QUESTION, GOOD]}) == {"messages": [hi, hello]}


def test_rows_that_the_trainer_cannot_use(tmp_path):
    dpo = TRAINERS["dpo"].columns
    path = write(tmp_path / "rows.jsonl", [{"conversations": [QUESTION], "chosen": GOOD, "rejected": BAD}])
    with pytest.raises(RecipeError, match="trainer needs one of: messages.*set prompt_template: sharegpt"):
        load(tmp_path, dataset_name=path)
    path = write(tmp_path / "alpaca.jsonl", ALPACA)
    with pytest.raises(
        RecipeError,
        match="after prompt_template: alpaca, prompt, completion.; the trainer needs one of: chosen and rej",
    ):
        load(tmp_path, columns=dpo, dataset_name=path, prompt_template="alpaca")


def test_preference_quickstart_rows():
    """At least 64 pairs of messages, no question, answer or refusal twice."""
    lines = (shipped("recipes") / "data" / "preference_quickstart.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) >= 64
    for name, role in (("prompt", "user"), ("chosen", "assistant"), ("rejected", "assistant")):
        for row in rows:
            assert [message["role"] for message in row[name]] == [role]
        texts = [row[name][0]["content"] for row in rows]
        assert all(text and text == text.strip() for text in texts)
        assert len(set(texts)) == len(rows)
    assert max(len(row[name][0]["content"].split()) for row in rows for name in row) <= 30


def test_quickstart_rows():
    """At least 220 rows of three strings, none repeated, short enough for the quickstart; a third have an input."""
    lines = (shipped("recipes") / "data" / "alpaca_quickstart.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) >= 220
    assert all(list(row) == ["instruction", "input", "output"] for row in rows)
    assert all(isinstance(text, str) and text == text.strip() for row in rows for text in row.values())
    assert all(row["instruction"] and row["output"] for row in rows)
    assert len({(row["instruction"].lower(), row["input"].lower()) for row in rows}) == len(rows)
    assert len({row["output"].lower() for row in rows}) == len(rows)
    assert 0.25 <= sum(bool(row["input"]) for row in rows) / len(rows) <= 0.4
    assert max(len(row["output"].split()) for row in rows) <= 80
