"""Rows with pictures in a recipe: each fault is a one-line error with the remedy before training; packed rows."""

import io
import json
import re

import pytest
import torch
from datasets import Dataset, Features, Image, List
from image_models import image_model, noise_image, processor_of
from recipe_fixtures import command, write_recipe
from transformers.image_utils import load_image

from liger_trainer.command.rows.images import broken_picture

MODEL = "idefics3"  # its processor does not handle videos
IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny image model with its processor, a picture, and a file that is not a picture."""
    found = tmp_path_factory.mktemp("pictures")
    source = torch.Generator().manual_seed(0)
    image_model(MODEL).save_pretrained(found / "model")
    try:
        processor = processor_of(MODEL)
    except ImportError as error:  # its processor needs torchvision in transformers 5.17
        pytest.skip(str(error).strip().splitlines()[0])
    processor.save_pretrained(found / "model")
    noise_image(40, 60, source).save(found / "a.png")
    (found / "text.png").write_text("a text")
    return found


def row(images=("a.png",), content="w3 w4", column="images"):
    turns = {"prompt": [{"role": "user", "content": content}], "completion": [{"role": "assistant", "content": "w5"}]}
    return turns | {column: images}


def train(folder, capsys, rows, tmp_path, **keys):
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    keys = {"prompt_template": None, "max_length": 1024, "max_steps": 1, "output_dir": str(tmp_path / "out")} | keys
    return command(capsys, "train", write_recipe(folder, **keys))


PAIR = {"prompt": row()["prompt"], "images": ["a.png"], "chosen": row()["completion"], "rejected": row()["prompt"]}
BAD = {
    "another column": (
        [row(column="picture")],
        {},
        "pictures are only read from images or image. Set columns: {images: picture}",
    ),
    "a column with one picture": ([row("a.png", column="photo")], {}, "Set columns: {image: photo}"),
    "no list": ([row("a.png")], {}, "images has 'a.png'; expected a list .* set columns: {image: images}"),
    "no picture": ([row(), row(["text.png"])], {}, "'text.png' is not a readable image"),
    "more places than pictures": (
        [row(content=[IMAGE, IMAGE, {"type": "text", "text": "w3"}])],
        {},
        r"Row 0 of the dataset has places for pictures in prompt: 2 \(.*\), and pictures that go there: 1\.",
    ),
    "tokens of pictures cut": ([row()], {"max_length": 3}, "is 3, but .* tokens of its pictures would be cut off"),
    "the answer cut": (
        [row()],
        {"max_length": 33},
        "max_length is 33, but .* all that it would learn would be cut off",
    ),
    "answers of a pair cut": (
        [PAIR],
        {"trainer": "dpo", "max_length": 10},
        "max_length is 10, but .* Set max_length: null",
    ),
    "a trainer without images": (
        [{"prompt": "w3", "chosen": "w4", "rejected": "w5", "images": ["a.png"]}],
        {"trainer": "orpo"},
        "the rows have pictures, which LigerORPOTrainer does not read. Take one of sft, dpo, kto",
    ),
    "the word set": ([row()], {"router_aux_loss_coef": 0.1}, "yaml: `router_aux_loss_coef` is set to 0.1"),
    "packing of longer rows": (
        [row()],
        {"packing": True, "max_length": 8},
        "max_length is 8, but 1 of 1 rows have more tokens with their images, .*Set max_length to 34",
    ),
}


@pytest.mark.parametrize("rows, keys, said", BAD.values(), ids=BAD)
def test_what_is_refused(rows, keys, said, folder, tmp_path, capsys):
    code, _, err = train(folder, capsys, rows, tmp_path, **keys)
    assert code == 2, err
    assert re.search(said, err.strip().splitlines()[-1])


@pytest.mark.parametrize("kind", ["file", "Parquet", "packed"])
def test_a_picture_that_is_broken_after_its_header_is_named(kind, folder, tmp_path, capsys):
    """Image readers do not name the file. The first batch's rows are read before training, and are whole here."""
    whole, count = (folder / "a.png").read_bytes(), 6
    (folder / "half.png").write_bytes(whole[: len(whole) // 2])
    rows = [row(["half.png" if index == 3 else "a.png"]) for index in range(count)]
    keys = {"packing": True, "max_length": 70} if kind == "packed" else {}
    if kind == "Parquet":
        for one in rows:
            one["images"] = [{"bytes": (folder / one["images"][0]).read_bytes(), "path": None}]
        features = Features({**Dataset.from_list(rows).features, "images": List(Image())})
        Dataset.from_list(rows, features=features).to_parquet(folder / "rows.parquet")
        keys["dataset_name"] = "rows.parquet"
        rows = [row()]
    code, _, err = train(folder, capsys, rows, tmp_path, max_steps=count, per_device_train_batch_size=1, **keys)
    said = err.strip().splitlines()[-1]
    assert "Row 3 of the dataset has" in said and "cannot be read: image file is truncated" in said, err
    assert kind == "Parquet" or "half.png" in said
    assert code == (2 if kind == "packed" else 1)
    assert kind == "packed" or "No checkpoint was saved" in said


def test_a_marker_in_the_second_turn_is_the_picture_of_that_turn(folder, tmp_path, capsys):
    """The batch has as many image tokens as with hand-written parts, after the words of the first answer."""
    words = [("user", "w3"), ("assistant", "w4"), ("user", "<image> w5"), ("assistant", "w6")]
    turns = [{"role": role, "content": content} for role, content in words]
    parts = [[{"type": "text", "text": content}] for _, content in words]
    parts[2] = [IMAGE, {"type": "text", "text": " w5"}]
    by_hand = [{"role": role, "content": part} for (role, _), part in zip(words, parts, strict=True)]
    shown = []
    for number, messages in enumerate((turns, by_hand)):
        rows = [{"messages": messages, "images": ["a.png"]}]
        code, out, err = train(
            folder, capsys, rows, tmp_path, output_dir=str(tmp_path / str(number)), save_strategy="no"
        )
        assert code == 0, err
        code, out, err = command(
            capsys, "train", folder / "recipe.yaml", "--preview", "--output_dir", tmp_path / f"shown{number}"
        )
        assert code == 0, err
        shown.append(out.partition("Row 0")[2])
    assert shown[0] == shown[1]
    assert re.search(r"w3.* w4 .*<image> .* w5 w6", shown[0])


def test_another_error_is_not_laid_on_a_broken_picture(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    rows = Dataset.from_dict({"images": [[str(tmp_path / "broken.png")]]})
    try:
        load_image(str(tmp_path / "broken.png"))
    except (OSError, ValueError) as error:
        assert "Row 0 of the dataset has the picture" in broken_picture(error, rows)
    assert broken_picture(OSError("No space left on device"), rows) is None


def test_chat_refuses_a_file_that_is_not_a_picture(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("w3"))
    code, _, err = command(capsys, "chat", folder / "model", "--images", folder / "text.png")
    assert code == 2 and "--images names" in err and "text.png" in err.strip().splitlines()[-1], err


def test_packed_rows_are_counted(folder, tmp_path, capsys):
    code, out, err = train(
        folder, capsys, [row(), row(["a.png", "a.png"]), row([])], tmp_path, packing=True, max_length=70
    )
    assert code == 0, err
    assert "3 used of 3" in out
