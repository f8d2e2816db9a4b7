"""Rows as users' files hold them: words that readers convert, Arrow's nulls, other separators, rows under a key."""

import json

import pandas
import pytest

from liger_trainer.command.recipe.read import TRAINERS, RecipeArguments
from liger_trainer.command.rows.load import load_rows
from liger_trainer.data.formats import alpaca_row
from liger_trainer.errors import RecipeError

USER, ANSWER = {"role": "user", "content": "w4"}, {"role": "assistant", "content": "w5"}
TALK = {"messages": [USER, ANSWER]}
WORDS = ["NA", "None", "null", "06", "2.5", "1e3", "True", "2024-05-01", "2024-05-01T10:00:00"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def load(folder, name, text=None, trainer="sft", **keys):
    if text is not None:
        (folder / name).write_text(text)
    args = RecipeArguments(dataset_name=name, trainer=trainer, **keys)
    return load_rows(args, folder, TRAINERS[trainer].columns, 0)[0].to_list()


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("word", [*WORDS, None], ids=str)
def test_words_stay_as_they_are_written(word, tmp_path):
    rows = [{"prompt": "q", "completion": word or each} for each in (WORDS if word is None else "ab")]
    frame = pandas.DataFrame(rows)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    frame.rename(columns={"completion": "answer"}).to_csv(tmp_path / "named.csv", index=False)
    (tmp_path / "folder").mkdir()
    frame.to_csv(tmp_path / "folder" / "train.csv", index=False)
    assert load(tmp_path, "rows.csv") == rows
    assert load(tmp_path, "named.csv", columns={"completion": "answer"}) == rows
    assert load(tmp_path, "folder") == rows
    assert load(tmp_path, "rows.jsonl", lines(rows)) == rows
    assert load(tmp_path, "rows.json", json.dumps(rows)) == rows
    assert load(tmp_path, "rows.json", json.dumps({"data": rows}, indent=1)) == rows


def test_dates_in_messages_and_words_in_other_columns(tmp_path):
    dated = {"messages": [USER | {"content": "2024-05-01"}, ANSWER | {"content": "2024-05-02"}]}
    assert load(tmp_path, "rows.jsonl", lines([dated])) == [dated]
    row = {"instruction": "When?", "input": "NA", "output": "06"}
    pandas.DataFrame([row, row | {"input": ""}]).to_csv(tmp_path / "rows.csv", index=False)
    expected = [alpaca_row(row), alpaca_row(row | {"input": ""})]
    assert load(tmp_path, "rows.csv", prompt_template="alpaca") == expected
    found = load(tmp_path, "rows.csv", "prompt,solution,n\nq,06,1\nr,2.50,NA\n", "grpo")
    assert found == [{"prompt": "q", "solution": "06", "n": 1.0}, {"prompt": "r", "solution": "2.50", "n": None}]
    with pytest.raises(RecipeError, match="Row 1 of the dataset has completion None; expected text"):
        load(tmp_path, "rows.csv", "prompt,completion\nq,NA\nr,\n")


ROW = {"prompt": "q", "completion": "a, b"}
NAMED = {
    "rows.ndjson": lines([ROW]),
    "rows.JSONL": lines([ROW]),
    "rows.CSV": 'prompt,completion\nq,"a, b"\n',
    "rows.tsv": "prompt\tcompletion\nq\ta, b\n",
    "semicolon.csv": "prompt;completion\nq;a, b\n",
    "marked.csv": "\ufeffprompt;completion\nq;a, b\n",
    "tab.csv": "prompt\tcompletion\nq\ta, b\n",
    "key.json": json.dumps({"version": "1", "data": [ROW]}),
    "broad.json": json.dumps({"rows": [ROW]}, indent=2),
}


@pytest.mark.parametrize("name", NAMED)
def test_names_separators_and_keys(name, tmp_path, capsys):
    assert load(tmp_path, name, NAMED[name]) == [ROW]
    told = f"liger-trainer: {name} is one JSON object; its key"
    assert (told in capsys.readouterr().err) == name.endswith(".json")


@pytest.mark.parametrize("row", [TALK, TALK | {"tools": [{"type": "function"}]}], ids=["a talk", "with tools"])
def test_a_single_row_is_not_taken_for_a_key_of_rows(row, tmp_path):
    assert load(tmp_path, "rows.json", json.dumps(row)) == [row]


def test_messages_as_text(tmp_path):
    turns = [{"from": "human", "value": "w4"}, {"from": "gpt", "value": "w5"}]
    for form in (json.dumps, str):
        pandas.DataFrame({"messages": [form(TALK["messages"])] * 2}).to_csv(tmp_path / "rows.csv", index=False)
        assert load(tmp_path, "rows.csv") == [TALK] * 2
        pandas.DataFrame([{"prompt": form([USER]), "completion": form([ANSWER])}]).to_csv(
            tmp_path / "rows.csv", index=False
        )
        assert load(tmp_path, "rows.csv") == [{"prompt": [USER], "completion": [ANSWER]}]
        pandas.DataFrame({"conversations": [form(turns)]}).to_csv(tmp_path / "rows.csv", index=False)
        assert load(tmp_path, "rows.csv", prompt_template="sharegpt") == [TALK]
    text = [{"prompt": "[1, 2]", "completion": '[{"a": 1}]'}]
    assert load(tmp_path, "rows.jsonl", lines(text)) == text
    with pytest.raises(RecipeError, match=r"Row 1 of the dataset has messages '\[oh'; expected a JSON list"):
        load(tmp_path, "rows.jsonl", lines([{"messages": json.dumps([USER, ANSWER])}, {"messages": "[oh"}]))


def test_arguments_that_arrow_has_filled_with_nulls(tmp_path):
    def row(argument):
        function = {"name": "f", "arguments": {argument: "w6"}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        schema = {"type": "object", "properties": {argument: {"type": "string"}}}
        return {"messages": [USER, call], "tools": [{"type": "function", "function": {"parameters": schema}}]}

    rows = [row("city"), row("unit")]
    pandas.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    assert load(tmp_path, "rows.parquet") == load(tmp_path, "rows.jsonl", lines(rows)) == rows


def test_labels(tmp_path):
    csv = "prompt,completion,label\nq,a,{}\nr,b,{}\n"
    for yes, no in (("1.0", "0.0"), ("1", "0"), ("true", "FALSE")):
        found = load(tmp_path, "rows.csv", csv.format(yes, no), "kto")
        assert [row["label"] for row in found] == [True, False]
    for labels in ((1.0, 0.0), (True, 0)):
        rows = [{"prompt": "q", "completion": "a", "label": label} for label in labels]
        assert [row["label"] for row in load(tmp_path, "rows.jsonl", lines(rows), "kto")] == [True, False]
    for label in (0.5, None):
        rows = [{"prompt": "q", "completion": "a", "label": label} for label in (1.0, label)]
        with pytest.raises(RecipeError, match=f"Row 1 of the dataset has label {label}; expected true or false"):
            load(tmp_path, "rows.jsonl", lines(rows), "kto")
