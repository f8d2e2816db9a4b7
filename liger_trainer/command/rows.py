"""The rows of a recipe, from a file, a folder or the Hub, in the form that TRL's trainers take."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from liger_trainer.command.recipe_keys import RecipeArguments
from liger_trainer.command.row_checks import check_rows
from liger_trainer.errors import RecipeError
from liger_trainer.paths import find_beside
from liger_trainer.templates import alpaca_row, last_turn_row, sharegpt_row

_FILE_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


class _Template(NamedTuple):
    """A `prompt_template`: `convert(row, index)` makes new columns of `needed` ones and `optional` ones that are there.

    `replaced` are the columns that are removed then; None means all of them.
    """

    convert: Callable[[dict, int], dict]
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    replaced: tuple[str, ...] | None = None


_TEMPLATES = {
    "alpaca": _Template(alpaca_row, ("instruction", "output"), ("input",)),
    "sharegpt": _Template(
        sharegpt_row, ("conversations",), ("chosen", "rejected", "system"),
        ("conversations", "chosen", "rejected", "system"),
    ),
    "last_turn": _Template(last_turn_row, ("messages",), ("label",), ("messages",)),
}  # fmt: skip


def load_rows(args: RecipeArguments, folder: Path, columns: tuple[tuple[str, ...], ...], seed: int):
    """The training rows and the evaluation rows of a recipe.

    Args:
        args (`RecipeArguments`): The recipe's own keys.
        folder (`Path`): The recipe's folder, in which a relative `dataset_name` is looked up too.
        columns: Sets of columns. After the template has been applied, rows need all columns of at least one set.
        seed (`int`): The seed with which `eval_fraction` draws the rows that it holds out.

    Returns:
        `tuple[Dataset, Dataset | None]`: The second is None if the recipe names no rows to evaluate on.

    Raises:
        RecipeError: The data is missing, unreadable or empty, a split or column is missing, or a row is malformed.
    """
    named = [args.dataset_name] if isinstance(args.dataset_name, str) else args.dataset_name or []
    found = [find_beside(name, folder) for name in named]
    if args.dataset_config is not None and found and all(path is not None and path.is_file() for path in found):
        raise RecipeError(f"dataset_config is {args.dataset_config!r}, which has no effect on a file. Remove it.")
    train = _all_rows_of(args, "dataset_name", args.dataset_train_split, folder, columns, args.max_rows)
    if args.eval_dataset_name is not None:
        return train, _all_rows_of(args, "eval_dataset_name", "train", folder, columns)
    if args.dataset_eval_split is not None:
        return train, _all_rows_of(args, "dataset_name", args.dataset_eval_split, folder, columns)
    if args.eval_fraction is None:
        return train, None
    held_out = max(1, round(args.eval_fraction * len(train)))
    if held_out == len(train):
        raise RecipeError(
            f"eval_fraction is {args.eval_fraction}, which leaves none of the {len(train)} rows to train on. Set a "
            "smaller one, or give more rows."
        )
    parts = train.train_test_split(test_size=held_out, seed=seed)
    return parts["train"], parts["test"]


def _all_rows_of(args: RecipeArguments, key: str, split: str, folder: Path, columns, max_rows: int | None = None):
    """The rows of all names in `key`."""
    names = getattr(args, key)
    names = names if names and isinstance(names, list) else [names or None]
    rows = _joined(key, names, [_rows_of(args, key, name, folder, split, columns, max_rows) for name in names])
    return rows if max_rows is None else rows.select(range(min(max_rows, len(rows))))


def _rows_of(args: RecipeArguments, key: str, name: str | None, folder: Path, split: str, columns, max_rows):
    """The rows of one name in `key`, after the template has been applied and the rows have been checked."""
    if not name:
        raise RecipeError(f"{key} is missing; set it to a .json, .jsonl, .parquet or .csv file, or to a Hub dataset.")
    rows = _load(args, key, name, _source(key, name, folder), split)
    if max_rows is not None:
        rows = rows.select(range(min(max_rows, len(rows))))
    try:
        return _prepare(rows, args.prompt_template, columns)
    except RecipeError as error:
        of_split = "" if split == "train" else f", split {split!r}"
        raise RecipeError(f"{key} {name!r}{of_split}: {error}") from error


def _joined(key: str, names: list[str], parts: list):
    """The rows of several files as one dataset."""
    from datasets import concatenate_datasets

    for name, part in zip(names, parts, strict=True):
        # datasets itself would fill a column that is missing with nulls
        if set(part.column_names) != set(parts[0].column_names):
            raise RecipeError(
                f"{key} {names[0]!r} has the columns {', '.join(sorted(parts[0].column_names))}, and {name!r} has "
                f"{', '.join(sorted(part.column_names))}, once the template is applied. Give all files the same "
                "columns."
            )
    try:
        return concatenate_datasets(parts) if len(parts) > 1 else parts[0]
    except (ValueError, TypeError, OSError) as error:
        raise RecipeError(f"{key} {names}: their rows cannot be joined: {error}") from error


def _source(key: str, name: str, folder: Path) -> str:
    """The path of a file or folder that exists, or else `name` itself if it may be a dataset on the Hub."""
    if (path := find_beside(name, folder)) is not None:
        return str(path)
    if (
        key == "eval_dataset_name"
        or Path(name).suffix in _FILE_BUILDERS
        or name.startswith((".", "~", os.sep))
        or name.count("/") > 1
    ):
        hint = " To use a split of a Hub dataset, set dataset_eval_split." if key == "eval_dataset_name" else ""
        raise RecipeError(
            f"{key} is {name!r}, and there is no such file, neither in the working directory nor in "
            f"{folder.absolute()}.{hint}"
        )
    return name


def _load(args: RecipeArguments, key: str, name: str, source: str, split: str):
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    empty = RecipeError(f"{key} {name!r}, split {split!r}, has no rows.")
    try:
        if os.path.isfile(source):
            builder = _FILE_BUILDERS.get(Path(source).suffix)
            if builder is None:
                raise RecipeError(
                    f"{key} is {name!r}; expected a file whose name ends in one of {', '.join(_FILE_BUILDERS)}."
                )
            if os.path.getsize(source) == 0:  # each reader fails on an empty file in its own way
                raise empty
            rows = load_dataset(builder, data_files=source, split=split)
            if builder == "json":  # its reader takes any bytes for text
                rows.data.validate(full=True)
        else:
            rows = load_dataset(source, args.dataset_config, split=split)
    except RecipeError:
        raise
    except (OSError, ValueError, DatasetGenerationError) as error:
        if "corresponds to no data" in str(error):  # what datasets says of a split that exists and has no rows
            raise empty from error
        # datasets says what is wrong with a file in the cause; the message itself is only "an error occurred".
        line = _broken_line(source) if source.endswith((".json", ".jsonl")) and os.path.isfile(source) else None
        reason = line or " ".join(str(error.__cause__ or error).split())
        raise RecipeError(f"{key} {name!r}, split {split!r}, cannot be loaded: {reason}") from error
    if len(rows) == 0:
        raise empty
    return rows


def _broken_line(path: str) -> str | None:
    """Which line of a file is no JSON, and why; None if all of them are, or if they are no text."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    whole = text.lstrip().startswith("[")
    for number, part in enumerate([text] if whole else text.splitlines(), 1):
        try:
            json.loads(part or "null")
        except json.JSONDecodeError as error:
            return f"line {error.lineno if whole else number} is not valid JSON: {error.msg}"
    return None


def _prepare(rows, name: str, columns: tuple[tuple[str, ...], ...]):
    """The rows after the template `name` has been applied. RecipeError if the trainer cannot use them."""
    listed = ", ".join(rows.column_names)
    if name != "none":
        template = _TEMPLATES[name]
        if name == "sharegpt" and "conversations" not in rows.column_names and "messages" in rows.column_names:
            rows = rows.rename_column("messages", "conversations")
        if missing := [column for column in template.needed if column not in rows.column_names]:
            raise RecipeError(
                f"it has the columns {listed}; prompt_template: {name} needs {' and '.join(template.needed)} "
                f"({', '.join(template.optional)} optional), and {' and '.join(missing)} is missing."
            )
        replaced = [column for column in rows.column_names if column in (template.replaced or rows.column_names)]
        rows = rows.map(
            template.convert, with_indices=True, remove_columns=replaced, desc=f"Applying the template {name}"
        )
    have = set(rows.column_names)
    needed = next((needed for needed in columns if set(needed) <= have), None)
    if needed is None:
        needs = "; ".join(" and ".join(needed) for needed in columns)
        hints = [
            f" Its rows look like those of {other!r}: set prompt_template: {other}."
            for other, template in _TEMPLATES.items()
            if name == "none" and set(template.needed) <= have
        ]
        made = "" if name == "none" else f", of which prompt_template: {name} makes {', '.join(rows.column_names)}"
        raise RecipeError(f"it has the columns {listed}{made}; the trainer needs one of: {needs}.{''.join(hints)}")
    rows = _without_other_prompt(rows, needed)
    check_rows(rows, needed)
    return rows


def _without_other_prompt(rows, needed: tuple[str, ...]):
    """The rows without a column prompt that has another purpose, because TRL would use it.

    Beside `messages` or `text`, TRL would want a completion as well. Beside `chosen` and `rejected` that are whole
    conversations, a text in the column prompt repeats what they begin with.
    """
    if "prompt" not in rows.column_names or "prompt" in needed:
        return rows
    if "chosen" not in needed:
        return rows.remove_columns("prompt")
    text = getattr(rows.features["prompt"], "dtype", None) == "string"
    first = rows[0]["chosen"]
    return rows.remove_columns("prompt") if text and isinstance(first, list) and len(first) > 1 else rows
