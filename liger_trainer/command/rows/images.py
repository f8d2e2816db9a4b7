"""Finds the pictures of rows by their paths, and tries a batch of them before training."""

import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from liger_trainer.data.formats import has_images
from liger_trainer.errors import RecipeError, refusal, short

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


class BatchArguments(Protocol):
    """The trainer arguments that the first batch depends on."""

    per_device_train_batch_size: int


class ImageTrainer(Protocol):
    """The trainer attributes that make its first batch. None is written."""

    args: BatchArguments
    model: "nn.Module"
    train_dataset: Any
    data_collator: Any

    def _remove_unused_columns(self, dataset: Any, description: str) -> Any:
        """Return `dataset` without the columns that the model does not take."""


def find_images(rows: "Dataset", folders: Sequence[Path]) -> "Dataset":
    """Resolve the paths in the columns `images` and `image`, relative to the first of `folders` that has the file.

    Decoded pictures, URLs and base64 stay as they are; transformers reads those itself. RecipeError for a file that is
    missing or not a picture, and for a column `images` without lists.
    """
    kinds = {name: rows.features[name] for name in ("images", "image") if name in rows.features}
    if "images" in kinds and not hasattr(kinds["images"], "feature") and len(rows):
        raise RecipeError(
            f"the column images has {short(rows[0]['images'])}; expected a list of pictures in each row. If each row "
            "has one picture, set columns: {image: images}."
        )
    named = [name for name, kind in kinds.items() if getattr(getattr(kind, "feature", kind), "dtype", "") == "string"]
    if not named:
        return rows
    from PIL import Image, UnidentifiedImageError

    def resolve_path(name: str | None, index: int) -> str | None:
        if name is None or name.startswith(("http://", "https://", "data:")) or "." not in name:  # base64 has no dot
            return name
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is None:
            looked = ", ".join(dict.fromkeys(str(folder.absolute()) for folder in folders))
            raise RecipeError(
                f"Row {index} of the dataset: the picture {name!r} is not in {looked}. Correct the path, or remove the "
                "row."
            )
        try:
            Image.open(path).close()  # reads only the header
        except UnidentifiedImageError as error:
            raise RecipeError(
                f"Row {index} of the dataset: {name!r} is not a readable image. Replace it, or remove the row."
            ) from error
        return str(path)

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        resolved: dict[str, Any] = {}
        for key in named:
            if isinstance(row[key], list):
                resolved[key] = [resolve_path(name, index) for name in row[key]]
            else:
                resolved[key] = resolve_path(row[key], index)
        return resolved

    return rows.map(convert, with_indices=True, desc="Looking for pictures")


def unread_pictures(rows: "Dataset") -> str | None:
    """Return the `columns` setting for rows with pictures in a column that no trainer reads, or None."""
    if has_images(rows):
        return None
    first = rows[0]
    for name, kind in rows.features.items():
        value = first[name]
        one = value[0] if isinstance(value, list) and value else value
        is_path = isinstance(one, str) and one.lower().endswith(_SUFFIXES) and " " not in one
        if is_path or type(getattr(kind, "feature", kind)).__name__ == "Image":
            return f"columns: {{{'images' if isinstance(value, list) else 'image'}: {name}}}"
    return None


def broken_picture(error: Exception, *datasets: Any) -> str | None:
    """Return a sentence about the first picture in `datasets` (None is skipped) that cannot be read completely.

    None if all can be read, or if `error` was not raised while reading a picture. The readers' own errors do not name
    the file, and before training only the headers of files are read.
    """
    if not isinstance(error, (OSError, ValueError, SyntaxError)) or not _is_of_a_picture(error):
        return None
    from transformers.image_utils import load_image

    for rows in datasets:
        for column in {"images", "image"}.intersection(getattr(rows, "column_names", ())):
            one = rows.select_columns([column])
            for index in range(len(one)):
                pictures: Any = []
                try:
                    pictures = one[index][column]  # datasets decodes pictures in Parquet here
                    pictures = pictures if isinstance(pictures, list) else [pictures]
                    while pictures:
                        if pictures[0] is not None:
                            load_image(pictures[0])
                        del pictures[0]
                except (OSError, ValueError, SyntaxError) as reason:
                    name = f"the picture {short(pictures[0])}, which" if pictures else "a picture that"
                    return (
                        f"Row {index} of the dataset has {name} cannot be read: {' '.join(str(reason).split())}. "
                        "Replace it, or remove the row."
                    )
    return None


def _is_of_a_picture(error: BaseException) -> bool:
    """Return whether Pillow raised `error` or its cause. A worker of a dataloader sends its traceback as text."""
    reader = f"{os.sep}PIL{os.sep}"
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    if any(reader in text for text in (str(error), *files)):
        return True
    before = error.__cause__ or error.__context__
    return before is not None and _is_of_a_picture(before)


def check_first_batch(trainer: ImageTrainer) -> None:
    """RecipeError if no batch can be made of the first rows with pictures, or `max_length` cuts off what they need.

    TRL runs the processor only when a batch is trained on, and keeps rows that are cut down to their prompt. Packed
    rows have all gone through the processor already.
    """
    from liger_trainer.trainers.packed_images import without_limit  # here, because it imports torch

    rows, collate = trainer.train_dataset, trainer.data_collator
    if not has_images(rows):
        return
    unlimited = without_limit(collate)
    if unlimited is collate:
        return
    rows = trainer._remove_unused_columns(rows, "training")  # as its dataloader does
    count = min(len(rows), trainer.args.per_device_train_batch_size)
    whole, cut = (_batch(each, rows, count) for each in (unlimited, collate))
    token = getattr(trainer.model.config, "image_token_id", None)
    most, learned = collate.max_length, cut["labels"] != -100 if "labels" in cut else cut["completion_mask"].bool()
    for row, mask in enumerate(whole["attention_mask"]):
        tokens = int(mask.sum())
        if most is None or tokens <= most:
            continue
        loses = int((whole["input_ids"][row] == token).sum()) > int((cut["input_ids"][row] == token).sum())
        if loses or not learned[row, 1:].any():
            what = "tokens of its pictures" if loses else "all that it would learn"
            raise RecipeError(
                f"max_length is {most}, but one of the first rows has {tokens} tokens with its pictures, so {what} "
                "would be cut off. Set max_length: null."
            )


def _batch(collate: Any, rows: "Dataset", count: int) -> Any:
    try:
        return collate([rows[index] for index in range(count)])
    except Exception as error:
        broken = broken_picture(error, rows.select(range(count)))
        if broken is not None:
            raise RecipeError(broken) from error
        reason = refusal(error)
        if reason is None:
            raise
        raise RecipeError(f"no batch can be made of the first rows with pictures: {reason}") from error
