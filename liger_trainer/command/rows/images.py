"""Pictures of rows: found by their paths, and tried in a batch before training."""

import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liger_trainer.data.formats import has_images
from liger_trainer.errors import RecipeError, refusal, short

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


def find_images(rows: Any, folders: Sequence[Path]) -> Any:
    """The rows with the paths in their columns `images` and `image` as they are found in the first of `folders`.

    Pictures themselves, URLs and base64, which transformers reads too, stay as they are. RecipeError for a row whose
    file is in none of them or is no picture, and for a column `images` without lists.
    """
    kinds = {name: rows.features[name] for name in ("images", "image") if name in rows.features}
    if "images" in kinds and not hasattr(kinds["images"], "feature") and len(rows):
        raise RecipeError(
            f"the column images has {short(rows[0]['images'])}, and expected is a list of pictures in each row. If "
            "each row has one picture, set columns: {image: images}."
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
            raise RecipeError(f"Row {index} of the dataset has the picture {name!r}, a file that is not in {looked}.")
        try:
            Image.open(path).close()  # its header alone
        except UnidentifiedImageError as error:
            raise RecipeError(f"Row {index} of the dataset has the picture {name!r}, a file that is none.") from error
        return str(path)

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        return {
            key: [resolve_path(name, index) for name in row[key]]
            if isinstance(row[key], list)
            else resolve_path(row[key], index)
            for key in named
        }

    return rows.map(convert, with_indices=True, desc="Looking for pictures")


def unread_pictures(rows: Any) -> str | None:
    """Return `columns` for a recipe whose rows have pictures in a column that no trainer reads, or None."""
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
    """Name the first picture in `datasets`, of which some may be None, that cannot be read to its end.

    Return None if all can be read, and for an error that was not raised in reading a picture. Readers name no file,
    and before training only the headers of files are read.
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
                    pictures = one[index][column]  # datasets reads those in Parquet here
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
    """Tell whether Pillow raised `error` or its cause. A worker of a dataloader sends its traceback as text."""
    reader = f"{os.sep}PIL{os.sep}"
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    if any(reader in text for text in (str(error), *files)):
        return True
    before = error.__cause__ or error.__context__
    return before is not None and _is_of_a_picture(before)


def check_first_batch(trainer: Any) -> None:
    """RecipeError if the first rows with pictures make no batch, or `max_length` cuts off what they need.

    TRL runs the processor when a batch is trained on, and drops no row that is cut to its prompt. Packed rows have all
    gone through the processor.
    """
    from liger_trainer.trainers.packed_images import without_limit  # which imports torch

    rows, collate = trainer.train_dataset, trainer.data_collator
    if not has_images(rows) or (unlimited := without_limit(collate)) is collate:
        return
    rows = trainer._remove_unused_columns(rows, "training")  # as its dataloader does
    count = min(len(rows), trainer.args.per_device_train_batch_size)
    whole, cut = (_batch(each, rows, count) for each in (unlimited, collate))
    token = getattr(trainer.model.config, "image_token_id", None)
    most, learned = collate.max_length, cut["labels"] != -100 if "labels" in cut else cut["completion_mask"].bool()
    for row, mask in enumerate(whole["attention_mask"]):
        if most is None or (tokens := int(mask.sum())) <= most:
            continue
        loses = int((whole["input_ids"][row] == token).sum()) > int((cut["input_ids"][row] == token).sum())
        if loses or not learned[row, 1:].any():
            what = "tokens of its pictures" if loses else "all that it would learn"
            raise RecipeError(
                f"max_length is {most}, and one of the first rows has {tokens} tokens with its pictures, so that "
                f"{what} would be cut off. Set max_length: null."
            )


def _batch(collate: Any, rows: Any, count: int) -> Any:
    try:
        return collate([rows[index] for index in range(count)])
    except Exception as error:
        if (broken := broken_picture(error, rows.select(range(count)))) is not None:
            raise RecipeError(broken) from error
        reason = refusal(error)
        if reason is None:
            raise
        raise RecipeError(f"of the first rows with pictures no batch can be made: {reason}") from error
