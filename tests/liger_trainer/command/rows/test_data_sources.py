"""Rows from several files, and evaluation rows from their own file."""

import json

import pytest
from PIL import Image
from recipe_fixtures import command, write_model, write_recipe, write_rows

from liger_trainer.command.recipe.read import TRAINERS, RecipeArguments
from liger_trainer.command.rows.load import load_rows
from liger_trainer.data.formats import alpaca_row
from liger_trainer.errors import RecipeError

COLUMNS = TRAINERS["sft"].columns


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.name


def load(folder, **keys):
    return load_rows(RecipeArguments(**keys), folder, COLUMNS, 0)


def test_several_files_are_joined_in_order(tmp_path):
    first = [{"text": f"a{i}"} for i in range(3)]
    second = [{"text": f"b{i}"} for i in range(2)]
    names = [write(tmp_path / "a.jsonl", first), write(tmp_path / "b.jsonl", second)]
    assert load(tmp_path, dataset_name=names)[0].to_list() == first + second
    assert load(tmp_path, dataset_name=names, max_rows=4)[0].to_list() == first + second[:1]
    assert load(tmp_path, dataset_name=names[:1])[0].to_list() == first
    train, held_out = load(tmp_path, dataset_name=names, eval_fraction=0.4)
    assert (len(train), len(held_out)) == (3, 2)


def test_rows_that_are_there_twice_are_not_held_out(tmp_path):
    """Otherwise the same row would be trained on and evaluated."""
    names = []
    for name in "ab":
        rows = [{"text": f"{name}{i}"} for i in range(40)]
        names.append(write(tmp_path / f"{name}.jsonl", rows))
    keys = {"dataset_name": names, "dataset_weights": [9, 1], "eval_fraction": 0.25}
    with pytest.raises(RecipeError, match="dataset_stopping_strategy is 'all_exhausted', which draws rows again"):
        load(tmp_path, **keys, dataset_stopping_strategy="all_exhausted")
    with pytest.raises(RecipeError, match="dataset_name lists 'a.jsonl' more than once"):
        load(tmp_path, dataset_name=[*names, names[0]], eval_fraction=0.25)
    for strategy in ("first_exhausted", "all_exhausted_without_replacement"):
        train, held_out = load(tmp_path, **keys, dataset_stopping_strategy=strategy)
        assert not {*train["text"]} & {*held_out["text"]}


def test_a_configuration_of_a_file(tmp_path):
    name = write(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(RecipeError, match="dataset_config is 'main', which has no effect on a file. Remove it."):
        load(tmp_path, dataset_name=name, dataset_config="main")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", [{"text": "b"}])  # a README.md in this folder could name configurations
    rows = load(tmp_path, dataset_name=[name, str(tmp_path / "folder")], dataset_config="default")[0]
    assert rows.to_list() == [{"text": "a"}, {"text": "b"}]


def test_a_column_that_no_trainer_reads_is_left_out_of_a_mixture(tmp_path):
    names = [write(tmp_path / "a.jsonl", [{"text": "a", "id": 1}]), write(tmp_path / "b.jsonl", [{"text": "b"}])]
    names.append(write(tmp_path / "c.jsonl", [{"source": "c", "text": "c"}]))
    assert load(tmp_path, dataset_name=names)[0].to_list() == [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    mixed = load(tmp_path, dataset_name=names[:2], dataset_weights=[1, 1])[0]
    assert mixed.column_names == ["text"]
    assert load(tmp_path, dataset_name=names[0])[0].to_list() == [{"text": "a", "id": 1}]
    names[1] = write(tmp_path / "d.jsonl", [{"text": "d", "id": "d1"}])  # another type
    assert load(tmp_path, dataset_name=names[:2])[0].to_list() == [{"text": "a"}, {"text": "d"}]


def test_conversations_with_and_without_tools(tmp_path):
    """Turns, tools and their parameters reach the trainer as written, whichever file has more keys."""

    def tool(name, **properties):
        function = {"name": name, "description": "d", "parameters": {"type": "object", "properties": properties}}
        return {"type": "function", "function": function}

    user = {"role": "user", "content": "w4"}
    answer = {"role": "assistant", "content": "w5"}
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    called = [
        user,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        answer,
    ]
    rows = [
        {"messages": called, "tools": [tool("f", a={"type": "integer"})]},
        {"messages": called, "tools": [tool("g", b={"type": "string"})]},
        {"messages": [user | {"name": "n"}, answer], "tools": [tool("h", c={"type": "number"})]},
        {"messages": [user, answer]},
    ]
    names = [write(tmp_path / f"{k}.jsonl", part) for k, part in enumerate((rows[:2], rows[2:3], rows[3:]))]
    for order in names, names[::-1]:
        found = load(tmp_path, dataset_name=order)[0].to_list()
        wanted = rows[:2] + rows[2:3] + [rows[3] | {"tools": None}]
        assert found == (wanted if order is names else wanted[3:] + wanted[2:3] + wanted[:2])


def test_conversations_of_a_template_with_and_without_calls(tmp_path):
    turns = [{"from": "human", "value": "w4"}, {"from": "gpt", "value": "w5"}]
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'}
    rows = [{"conversations": [turns[0], call, {"from": "observation", "value": "3"}, turns[1]]}]
    names = [write(tmp_path / "a.jsonl", [{"conversations": turns}]), write(tmp_path / "b.jsonl", rows)]
    plain, calls = load(tmp_path, dataset_name=names, prompt_template="sharegpt")[0]["messages"]
    assert plain == [{"role": "user", "content": "w4"}, {"role": "assistant", "content": "w5"}]
    assert calls[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]


@pytest.mark.parametrize("column", ["images", "image"])
def test_pictures_are_found_next_to_the_rows(column, tmp_path, monkeypatch):
    (tmp_path / "data" / "photos").mkdir(parents=True)
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / "data" / "photos" / name)
    monkeypatch.chdir(tmp_path / "data" / "photos")

    def rows(*names):
        shown = [{"text": "a", column: [name] if column == "images" else name} for name in names]
        name = f"data/{write(tmp_path / 'data' / 'rows.jsonl', shown)}"
        return [row[column] for row in load(tmp_path, dataset_name=name)[0]]

    found = rows("photos/a.png", "b.png", "https://c.d/e.png", "iVBORw0KGgo")
    expected = [str(tmp_path / "data" / "photos" / "a.png"), "b.png", "https://c.d/e.png", "iVBORw0KGgo"]
    assert found == ([[name] for name in expected] if column == "images" else expected)
    with pytest.raises(RecipeError, match="Row 1 of the dataset: the picture 'no.png' is not in "):
        rows("photos/a.png", "no.png")


@pytest.mark.parametrize(
    "trainer, row, more",
    [
        ("sft", {"text": "a"}, {"images": ["https://a.b/c.png"]}),  # it would be trained without its picture
        ("sft", {"text": "a"}, {"messages": [{"role": "user", "content": "a"}]}),
        ("sft", {"input_ids": [1]}, {"labels": [1]}),
        ("grpo", {"prompt": "a"}, {"solution": "a"}),
        ("distillation", {"prompt": "a"}, {"source": "a"}),
    ],
)
def test_a_column_that_may_be_read_is_not_left_out(trainer, row, more, tmp_path):
    names = [write(tmp_path / "a.jsonl", [row]), write(tmp_path / "b.jsonl", [row | more])]
    (name,) = more
    with pytest.raises(RecipeError, match=f"Give them the same names with columns, or remove {name} from 'b.jsonl'."):
        load_rows(RecipeArguments(dataset_name=names), tmp_path, TRAINERS[trainer].columns, 0)


def test_files_of_other_columns(tmp_path):
    texts = write(tmp_path / "a.jsonl", [{"text": "a", "id": 1}])
    pairs = write(tmp_path / "b.jsonl", [{"prompt": "a", "completion": "b"}])
    with pytest.raises(RecipeError, match=r"'a.jsonl' has the columns \['text', 'id'\], but 'b.jsonl' has \['pro"):
        load(tmp_path, dataset_name=[texts, pairs])
    message = {"role": "user", "content": "a"}
    lists = write(tmp_path / "c.jsonl", [{"prompt": [message], "completion": [message]}])
    with pytest.raises(
        RecipeError,
        match=r"\['b.jsonl', 'c.jsonl'\]: their rows cannot be joined: .* Write each column in the same form",
    ):
        load(tmp_path, dataset_name=[pairs, lists])


def test_the_template_joins_files_of_other_columns(tmp_path):
    """A file with `input` and one without become the same columns."""
    rows = {"instruction": "a", "output": "b"}, {"instruction": "a", "input": "c", "output": "b"}
    names = [write(tmp_path / f"{i}.jsonl", [row]) for i, row in enumerate(rows)]
    assert load(tmp_path, dataset_name=names, prompt_template="alpaca")[0].to_list() == [
        alpaca_row(row) for row in rows
    ]


def test_errors_name_the_file(tmp_path):
    good = write(tmp_path / "a.jsonl", [{"text": "a"}])
    bad = write(tmp_path / "b.jsonl", [{"text": 5}])
    for keys, message in (
        ({"dataset_name": [good, bad]}, "dataset_name 'b.jsonl': Row 0 of the dataset has text 5"),
        ({"dataset_name": [good, "no.jsonl"]}, "dataset_name is 'no.jsonl', but that file does not exist"),
        ({"dataset_name": []}, "dataset_name is missing"),
        (
            {"dataset_name": good, "eval_dataset_name": bad},
            "eval_dataset_name 'b.jsonl': Row 0 of the dataset has text",
        ),
        (
            {"dataset_name": good, "eval_dataset_name": "some/hub"},
            "To use a split of a Hub dataset, set dataset_eval_split",
        ),
    ):
        with pytest.raises(RecipeError, match=message):
            load(tmp_path, **keys)


def test_recipe_with_several_files_and_an_evaluation_file(tmp_path, capsys):
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", 4)
    write_rows(tmp_path / "more.jsonl", 6)
    write_rows(tmp_path / "eval.jsonl", 3)
    path = write_recipe(
        tmp_path,
        dataset_name=["rows.jsonl", "more.jsonl"],
        eval_dataset_name="eval.jsonl",
        eval_strategy="epoch",
        max_steps=None,
        num_train_epochs=1,
    )
    code, _, err = command(capsys, "train", path)
    assert code == 0, err
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 5 and any("eval_loss" in entry for entry in state["log_history"])
    code, _, err = command(
        capsys, "train", path, "--dataset_name", "rows.jsonl", "--eval_strategy", "no", "--eval_dataset_name", "a", "b"
    )
    assert code == 2 and "eval_dataset_name is ['a', 'b'], which has no effect without eval_strategy" in err
