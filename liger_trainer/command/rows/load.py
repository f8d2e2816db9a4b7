"""Loads the rows of a recipe, for training and for evaluation, in the form that TRL's trainers take."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from liger_trainer.command.recipe.keys import RecipeArguments
from liger_trainer.command.rows.columns import Columns, prepare_rows, rename_columns, text_columns
from liger_trainer.command.rows.files import FILE_BUILDERS, broken_json, builder_of, read_rows
from liger_trainer.command.rows.image_places import place_images
from liger_trainer.command.rows.images import find_images
from liger_trainer.command.rows.mixture import with_shared_columns
from liger_trainer.command.rows.question_answer import as_chat
from liger_trainer.command.rows.values import restore_types
from liger_trainer.errors import RecipeError
from liger_trainer.paths import find_beside

if TYPE_CHECKING:
    from datasets import Dataset


def load_rows(args: RecipeArguments, folder: Path, columns: Columns, seed: int) -> "tuple[Dataset, Dataset | None]":
    """Return the training rows of a recipe, and its evaluation rows or None. RecipeError if they cannot be used.

    Relative names are also looked up in `folder`, the recipe's. After the template, rows need all columns of at least
    one set in `columns`. `seed` decides which rows are drawn or held out.
    """
    names = [args.dataset_name] if isinstance(args.dataset_name, str) else args.dataset_name or []
    if args.dataset_config is not None and names and all(os.path.isfile(find_beside(n, folder) or "") for n in names):
        raise RecipeError(f"dataset_config is {args.dataset_config!r}, which has no effect on a file. Remove it.")
    train = _all_rows_of(args, "dataset_name", args.dataset_train_split, folder, columns, seed, args.max_rows)
    if args.eval_dataset_name is not None:
        return train, _all_rows_of(args, "eval_dataset_name", "train", folder, columns)
    if args.dataset_eval_split is not None:
        return train, _all_rows_of(args, "dataset_name", args.dataset_eval_split, folder, columns)
    if args.eval_fraction is None:
        return train, None
    try:
        parts = train.train_test_split(test_size=max(1, round(args.eval_fraction * len(train))), seed=seed)
    except ValueError as error:
        raise RecipeError(f"eval_fraction is {args.eval_fraction}, but of {len(train)} rows: {error}") from error
    return parts["train"], parts["test"]


def _all_rows_of(
    args: RecipeArguments,
    key: str,
    split: str,
    folder: Path,
    columns: Columns,
    seed: int | None = None,
    max_rows: int | None = None,
) -> "Dataset":
    """Return the rows of all names in `key`, drawn by `dataset_weights` if there is a `seed`."""
    from datasets import concatenate_datasets, interleave_datasets

    names = getattr(args, key)
    names = names if names and isinstance(names, list) else [names or None]
    assert not isinstance(args.columns, str)  # `RecipeArguments` has parsed it
    mappings = args.columns if isinstance(args.columns, list) else [args.columns or {}] * len(names)
    if len(mappings) != len(names):
        raise RecipeError(f"columns lists {len(mappings)} mappings, and {key} has {len(names)} names.")
    parts = [
        _rows_of(args, key, name, mapping, folder, split, columns, max_rows)
        for name, mapping in zip(names, mappings, strict=True)
    ]
    parts = with_shared_columns(key, names, parts, columns)
    weights = None if seed is None else args.dataset_weights
    try:
        if weights is not None:
            shares = [weight / sum(weights) for weight in weights]
            rows = interleave_datasets(parts, shares, seed, stopping_strategy=args.dataset_stopping_strategy)
        else:
            rows = concatenate_datasets(parts) if len(parts) > 1 else parts[0]
    except (ValueError, TypeError, OSError) as error:
        advice = "Write each column in the same form in all of them."
        raise RecipeError(f"{key} {names}: their rows cannot be joined: {error} {advice}") from error
    return rows if max_rows is None else rows.select(range(min(max_rows, len(rows))))


def _rows_of(
    args: RecipeArguments,
    key: str,
    name: str | None,
    mapping: dict[str, str],
    folder: Path,
    split: str,
    columns: Columns,
    max_rows: int | None,
) -> "Dataset":
    """Return the rows of one name in `key`, after the template and the checks."""
    if not name:
        raise RecipeError(
            f"{key} is missing; set it to a file ({', '.join(FILE_BUILDERS)}), a folder, or a Hub dataset."
        )
    path = find_beside(name, folder)
    is_path = builder_of(name) is not None or name.startswith((".", "~", os.sep)) or name.count("/") > 1
    if path is None and (is_path or key == "eval_dataset_name"):
        hint = " To use a split of a Hub dataset, set dataset_eval_split." if key == "eval_dataset_name" else ""
        raise RecipeError(f"{key} is {name!r}, but that file does not exist here or in {folder.absolute()}.{hint}")
    from datasets.exceptions import DatasetGenerationError

    try:
        rows = read_rows(str(path or name), args.dataset_config, split, text_columns(columns, mapping))
    except (OSError, ValueError, DatasetGenerationError) as error:  # its cause says what is wrong with a file
        reason = broken_json(path) or _in_words(error, args, split) or " ".join(str(error.__cause__ or error).split())
        if path is None:
            reason = f"{reason.rstrip('.')}. No file or folder has this name here or in {folder.absolute()}."
        raise RecipeError(f"{key} {name!r}, split {split!r}, cannot be loaded: {reason}") from error
    if len(rows) == 0:
        raise RecipeError(f"{key} {name!r}, split {split!r}, has no rows.")
    if max_rows is not None:
        rows = rows.select(range(min(max_rows, len(rows))))
    try:
        rows = restore_types(rename_columns(rows, mapping), has_labels=any("label" in needed for needed in columns))
        rows, mapped = as_chat(rows, mapping, columns)
        rows = prepare_rows(rows, args.prompt_template, columns, mapped, args.system_prompt)
        return place_images(find_images(rows, [Path(), folder, *([] if path is None else [Path(path).parent])]))
    except RecipeError as error:
        of_split = "" if split == "train" else f", split {split!r}"
        raise RecipeError(f"{key} {name!r}{of_split}: {error}") from error


def _in_words(error: Exception, args: RecipeArguments, split: str) -> str | None:
    """Return what is wrong with a file or a split and what to do, where the library's message does not say it."""
    cause = error.__cause__ or error
    if isinstance(cause, UnicodeDecodeError):
        return f"it is not in UTF-8 ({cause}). Save it in UTF-8."
    if "corresponds to no data" in str(error) or "No columns to parse" in str(cause):
        return "it has no rows."
    if str(error).startswith("Unknown split"):
        key = "dataset_eval_split" if split == args.dataset_eval_split else "dataset_train_split"
        advice = " To hold out rows of it, set eval_fraction: 0.1 instead." if key == "dataset_eval_split" else ""
        return f"{' '.join(str(error).split())} Correct {key}.{advice}"
    return None
