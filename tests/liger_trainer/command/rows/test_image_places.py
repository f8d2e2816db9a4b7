"""`<image>` in rows with pictures becomes its own part where it stands, or an error that names row and column."""

import json
from types import SimpleNamespace

import pytest
from datasets import Dataset
from PIL import Image

from liger_trainer.command.recipe.read import TRAINERS, RecipeArguments
from liger_trainer.command.rows.image_places import check_image_tokens
from liger_trainer.command.rows.load import load_rows
from liger_trainer.errors import RecipeError

PLACE = {"type": "image"}


def text(words):
    return {"type": "text", "text": words}


def user(content):
    return {"role": "user", "content": content}


def answer(content):
    return {"role": "assistant", "content": content}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load rows as a recipe does, from a folder with the picture a.png."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")

    def loaded(rows, trainer="sft", **keys):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        args = RecipeArguments(dataset_name="rows.jsonl", trainer=trainer, **keys)
        return load_rows(args, tmp_path, TRAINERS[trainer].columns, 0)[0]

    return loaded


def test_markers_become_parts_in_their_turn(load):
    rows = load(
        [
            {"messages": [user("One?"), answer("a"), user("<image>\nTwo?"), answer("b")], "images": ["a.png"]},
            {"messages": [user("<image> or <image>?"), answer("c")], "images": ["a.png", "a.png"]},
            {"messages": [user("None?"), answer("d")], "images": []},
            {"messages": [user("Before the turn"), answer("e")], "images": ["a.png"]},
        ]
    )
    assert rows["messages"][0] == [
        user([text("One?")]),
        answer([text("a")]),
        user([PLACE, text("\nTwo?")]),
        answer([text("b")]),
    ]
    assert rows["messages"][1][0] == user([PLACE, text(" or "), PLACE, text("?")])
    assert rows["messages"][2][0] == user([text("None?")])
    assert rows["messages"][3][0] == user([PLACE, text("Before the turn")])


def test_llava_preferences_and_completions(load):
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat"}]
    llava = load([{"id": "1", "image": "a.png", "conversations": turns}], prompt_template="sharegpt")
    assert llava[0]["messages"] == [user([PLACE, text("\nWhat?")]), answer([text("A cat")])]
    row = {"prompt": [user("<image>?")], "completion": [answer("a")], "images": ["a.png"]}
    assert load([row])[0]["prompt"] == [user([PLACE, text("?")])]
    pair = {"chosen": [user("<image>?"), answer("a")], "rejected": [user("<image>?"), answer("b")], "image": "a.png"}
    made = load([pair], trainer="dpo")[0]
    assert made["chosen"][0] == made["rejected"][0] == user([PLACE, text("?")])


def test_messages_without_a_marker_stay_as_they_are(load):
    messages = [user("What?"), answer("A cat")]
    assert load([{"messages": messages, "images": ["a.png"]}])[0]["messages"] == messages
    assert load([{"messages": [user("The tag <image>?"), answer("a")]}])[0]["messages"][0]["content"][0] == "T"


ONE = {"messages": [user("<image>?"), answer("a")], "images": ["a.png"]}
REFUSED = {
    "more places": (ONE | {"messages": [user("<image><image>?"), answer("a")]}, "messages: 2 .* go there: 1"),
    "fewer places": (ONE | {"images": ["a.png", "a.png"]}, "messages: 1 .* go there: 2"),
    "no picture": (ONE | {"images": []}, "messages: 1 .* go there: 0"),
    "parts": (ONE | {"messages": [user([PLACE, PLACE, text("?")]), answer([text("a")])]}, "messages: 2 .* there: 1"),
    "a tool": (
        ONE | {"messages": [user("Which?"), {"role": "tool", "content": "<image>"}, answer("a")]},
        "<image> in a message of the role tool in messages.*Move it",
    ),
    "an answer": (
        {"prompt": [user("?")], "completion": [answer("<image>")], "images": ["a.png"]},
        "completion: 1 .* go there: 0",
    ),
    "a video": (
        {"messages": [user("<video>?"), answer("a")], "videos": ["a.mp4"]},
        "<video> in its text and a column video",
    ),
}


@pytest.mark.parametrize("row, said", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(row, said, load):
    fine = {name: value for name, value in ONE.items() if name in row}
    fine = fine if set(fine) == set(row) and isinstance(row["messages"][0]["content"], str) else None
    number = 0 if fine is None else 1
    with pytest.raises(RecipeError, match=f"rows.jsonl.*Row {number} of the dataset has .*{said}"):
        load([row] if fine is None else [fine, row])


def test_a_marker_that_the_model_reads_as_text(load):
    rows = Dataset.from_list([{"prompt": "<image>?", "completion": "a", "images": ["a.png"]}])
    check_image_tokens(rows, SimpleNamespace(image_token="<image>"))
    check_image_tokens(rows, SimpleNamespace())  # a tokenizer
    twice = Dataset.from_list(
        [{"prompt": f"{m}?", "completion": "a", "images": ["a"]} for m in ("<image>", "<image>" * 2)]
    )
    with pytest.raises(
        RecipeError, match="Row 1 of the dataset has <image> 2 times in .*, and pictures: 1. Write it once"
    ):
        check_image_tokens(twice, SimpleNamespace(image_token="<image>"))
    with pytest.raises(RecipeError, match=r"Row 0 .* <image> in prompt '<image>\?'.*or write <\|image_pad\|>"):
        check_image_tokens(rows, SimpleNamespace(image_token="<|image_pad|>"))
    rows = Dataset.from_list([{"messages": [user("<|image_pad|>?"), answer("a")], "images": ["a.png"]}])
    with pytest.raises(RecipeError, match=r"Row 0 .* <\|image_pad\|> in messages .*Write <image> instead"):
        check_image_tokens(rows, SimpleNamespace(image_token="<|image_pad|>"))
