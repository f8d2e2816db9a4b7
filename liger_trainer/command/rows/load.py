"""The rows of a recipe, from a file, a folder or the Hub, in the form that TRL's trainers take."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from liger_trainer.command.processes import say
from liger_trainer.command.recipe.keys import RecipeArguments
from liger_trainer.command.recipe.parser import nearest
from liger_trainer.command.rows.checks import check_rows
from liger_trainer.command.rows.images import find_images
from liger_trainer.data.formats import alpaca_row, last_turn_row, sharegpt_row
from liger_trainer.errors import RecipeError, short
from liger_trainer.paths import find_beside

_FILE_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
# What trainers read besides the columns that they need
_READ = ("prompt", "image", "images", "tools", "chat_template_kwargs", "ref_chosen_logps", "ref_rejected_logps")


class _Template(NamedTuple):
    """A `prompt_template`: `convert(row, index)` makes new columns of `needed` ones, and of others that it knows.

    `replaced` are the columns that are removed then; None means all of them.
    """

    convert: Callable[[dict, int], dict]
    needed: tuple[str, ...]
    replaced: tuple[str, ...] | None = None


_TEMPLATES = {
    "alpaca": _Template(alpaca_row, ("instruction", "output")),
    "sharegpt": _Template(sharegpt_row, ("conversations",), ("conversations", "chosen", "rejected", "system")),
    "last_turn": _Template(last_turn_row, ("messages",), ("messages",)),
}


def columns_of(recipe: Any) -> tuple[tuple[str, ...], ...]:
    """The sets of columns that the recipe's trainer takes, under the name that the recipe gives the text."""
    text = getattr(recipe.training, "dataset_text_field", "text")
    return tuple(tuple(text if name == "text" else name for name in needed) for needed in recipe.entry.columns)


def load_rows(args: RecipeArguments, folder: Path, columns: tuple[tuple[str, ...], ...], seed: int):
    """The training rows of a recipe, and its evaluation rows or None. RecipeError if they cannot be used.

    `folder` is the recipe's, in which relative names are looked up too. Once the template is applied, rows need all
    columns of at least one set in `columns`. `seed` decides which rows are drawn or held out.
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
        raise RecipeError(f"eval_fraction is {args.eval_fraction}, of {len(train)} rows: {error}") from error
    return parts["train"], parts["test"]


def _all_rows_of(args: RecipeArguments, key: str, split: str, folder: Path, columns, seed=None, max_rows=None):
    """The rows of all names in `key`, drawn by `dataset_weights` if there is a `seed`."""
    from datasets import concatenate_datasets, interleave_datasets

    names = getattr(args, key)
    names = names if names and isinstance(names, list) else [names or None]
    mappings = args.columns if isinstance(args.columns, list) else [args.columns or {}] * len(names)
    if len(mappings) != len(names):
        raise RecipeError(f"columns lists {len(mappings)} mappings, and {key} has {len(names)} names.")
    parts = [
        _rows_of(args, key, name, mapping, folder, split, columns, max_rows)
        for name, mapping in zip(names, mappings, strict=True)
    ]
    parts = _with_shared_columns(key, names, parts, columns)
    weights = None if seed is None else args.dataset_weights
    try:
        if weights is not None:
            shares = [weight / sum(weights) for weight in weights]
            rows = interleave_datasets(parts, shares, seed, stopping_strategy=args.dataset_stopping_strategy)
        else:
            rows = concatenate_datasets(parts) if len(parts) > 1 else parts[0]
    except (ValueError, TypeError, OSError) as error:
        mend = "Write each column in the same form in all of them."
        raise RecipeError(f"{key} {names}: their rows cannot be joined: {error} {mend}") from error
    return rows if max_rows is None else rows.select(range(min(max_rows, len(rows))))


def _with_one_kind_of_text(rows):
    """The rows with `string` in place of `large_string`, which pandas writes and `datasets` does not join with it."""
    from datasets import Features, Value

    large = [name for name, kind in rows.features.items() if getattr(kind, "dtype", None) == "large_string"]
    return rows.cast(Features(rows.features | dict.fromkeys(large, Value("string")))) if large else rows


def _with_shared_columns(key: str, names, parts, columns: tuple[tuple[str, ...], ...]):
    """The parts with the columns that all of them have. RecipeError if another one may be read in training."""
    if len(parts) > 1:
        parts = [_with_one_kind_of_text(part) for part in parts]
    shared = set.intersection(*(set(part.column_names) for part in parts))
    read = {*_READ, *(column for needed in columns for column in needed)}
    # Token ids come with columns of masks and labels, and rewards of what is written for a prompt read any column.
    exact = columns == (("prompt",),) or "input_ids" in shared or not any(set(needed) <= shared for needed in columns)
    if not exact:
        shared -= {name for name in shared - read if any(p.features[name] != parts[0].features[name] for p in parts)}
        shared |= {"tools"}  # where datasets fills in nulls, which mean none
    for name, part in zip(names, parts, strict=True):
        # datasets itself would fill a column that is missing with nulls
        if (more := set(part.column_names) - shared) and (exact or more & read):
            other, has = next(
                (n, p.column_names) for n, p in zip(names, parts, strict=True) if not more <= {*p.column_names}
            )
            raise RecipeError(
                f"{key} {name!r} has the columns {part.column_names}, and {other!r} {has}. Name the same ones in "
                f"columns, or remove {', '.join(sorted(more))} from {name!r}."
            )
    parts = [part.select_columns([column for column in part.column_names if column in shared]) for part in parts]
    return _with_keys_of_their_own(parts)


def _with_keys_of_their_own(parts):
    """The parts with messages and tools as JSON where their keys are not those of another part."""
    from datasets import Features, Json, List

    for name in {name for part in parts for name in part.column_names}:
        kinds = [part.features.get(name) for part in parts]
        lists = all(isinstance(kind, List) and isinstance(kind.feature, (dict, Json)) for kind in kinds if kind)
        if lists and any(kind not in (None, found) for kind in kinds for found in kinds if found):
            for at, part in enumerate(parts):
                if name in part.features:  # a cast would write the JSON in it, such as parameters of tools, as text
                    made = Features(part.features | {name: List(Json())})
                    parts[at] = part.map(lambda row, name=name: {name: row[name]}, remove_columns=[name], features=made)
    return parts


def _rows_of(args: RecipeArguments, key: str, name: str | None, mapping, folder: Path, split: str, columns, max_rows):
    """The rows of one name in `key`, after the template has been applied and the rows have been checked."""
    if not name:
        raise RecipeError(
            f"{key} is missing; set it to a file ({', '.join(_FILE_BUILDERS)}), a folder, or a Hub dataset."
        )
    path = find_beside(name, folder)
    is_path = Path(name).suffix in _FILE_BUILDERS or name.startswith((".", "~", os.sep)) or name.count("/") > 1
    if path is None and (is_path or key == "eval_dataset_name"):
        hint = " To use a split of a Hub dataset, set dataset_eval_split." if key == "eval_dataset_name" else ""
        raise RecipeError(f"{key} is {name!r}, and there is no such file, here nor in {folder.absolute()}.{hint}")
    from datasets.exceptions import DatasetGenerationError

    try:
        rows = _load(str(path or name), args.dataset_config, split)
    except (OSError, ValueError, DatasetGenerationError) as error:  # of which the cause says what is wrong with a file
        reason = _broken_json(path) or " ".join(str(error.__cause__ or error).split())
        if path is None:
            reason = f"{reason.rstrip('.')}. No file or folder has this name, here nor in {folder.absolute()}."
        raise RecipeError(f"{key} {name!r}, split {split!r}, cannot be loaded: {reason}") from error
    if len(rows) == 0:
        raise RecipeError(f"{key} {name!r}, split {split!r}, has no rows.")
    if max_rows is not None:
        rows = rows.select(range(min(max_rows, len(rows))))
    try:
        rows = _prepare(_renamed(rows, mapping), args.prompt_template, columns, set(mapping))
        return find_images(rows, [Path(), folder, *([] if path is None else [Path(path).parent])])
    except RecipeError as error:
        of_split = "" if split == "train" else f", split {split!r}"
        raise RecipeError(f"{key} {name!r}{of_split}: {error}") from error


def _load(source: str, config: str | None, split: str):
    """The rows of a file, a folder or a data set of the Hub."""
    from datasets import Dataset, load_dataset
    from datasets.exceptions import DatasetGenerationError

    if not os.path.isfile(source):
        rows = load_dataset(source, config, split=split)
        _check_kinds(Path(source), rows.info.builder_name)
        return rows
    size, builder = os.path.getsize(source), _FILE_BUILDERS.get(Path(source).suffix)
    if builder is None:
        raise RecipeError(f"expected a file whose name ends in one of {', '.join(_FILE_BUILDERS)}.")
    if size == 0:  # each reader fails on an empty file in its own way
        return Dataset.from_dict({})
    try:
        rows = load_dataset(builder, data_files=source, split=split)
    except DatasetGenerationError:
        if builder != "json" or size <= 10 << 20:
            raise
        # Later rows may have other keys than the first 10 MB.
        rows = load_dataset(builder, data_files=source, split=split, chunksize=size)
    if builder == "json":  # its reader takes any bytes for text
        rows.data.validate(full=True)
    elif builder == "text":
        rows = rows.filter(lambda row: row["text"].strip(), desc="Leaving out empty lines")
    return rows


def _check_kinds(folder: Path, builder: str) -> None:
    """RecipeError if a folder has files of other kinds than the one that `datasets` has read from it."""
    if builder not in _FILE_BUILDERS.values():  # of pictures, of which metadata.jsonl tells more
        return
    about = ("dataset_infos.json", "dataset_dict.json", "state.json")
    unread = [path for path in sorted(folder.rglob("*")) if _FILE_BUILDERS.get(path.suffix, builder) != builder]
    if rows := [path for path in unread if path.suffix not in (".txt", ".json")]:
        raise RecipeError(f"{rows[0]} is of another kind than the files that were read. List the files by name.")
    if left := [path for path in unread if path.name not in about]:  # licences, or what describes the rows
        say(f"{left[0]} is of another kind than the files that were read, and is left out, as are all such files.")


def _broken_json(path: str | os.PathLike | None) -> str | None:
    """Say where a JSON file is broken, because its reader counts bytes, or rows from 0. None for any other file."""
    if path is None or not os.path.isfile(path) or Path(path).suffix not in (".json", ".jsonl"):
        return None
    with open(path, "rb") as file:
        first = file.readline().strip()
        whole = first[:1] == b"[" or first == b"{"  # a value over several lines
        file.seek(0)
        for number, part in enumerate([file.read()] if whole else file, 1):
            try:
                if part.strip():
                    json.loads(part.decode("utf-8-sig").rstrip())
            except ValueError as error:
                if whole:
                    return f"{error}."
                what = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                return f"line {number} is no JSON: {what}: {short(part.decode(errors='replace'))}"
    return None


def _renamed(rows, mapping: dict[str, str]):
    """The rows with the columns of the data, the values of `mapping`, under the names that are its keys."""
    if missing := [name for name in mapping.values() if name not in rows.column_names]:
        near = nearest(missing[0], rows.column_names)
        raise RecipeError(f"it has the columns {', '.join(rows.column_names)}, and columns names {missing[0]!r}.{near}")
    replaced = [name for name in mapping if name in rows.column_names and name not in mapping.values()]
    return rows.remove_columns(replaced).rename_columns({old: new for new, old in mapping.items()}) if mapping else rows


def _prepare(rows, name: str, columns: tuple[tuple[str, ...], ...], mapped: set[str]):
    """The rows after the template `name` has been applied, without columns that compete with those in `mapped`."""
    listed = ", ".join(rows.column_names)
    if name != "none":
        template = _TEMPLATES[name]
        if name == "sharegpt" and "conversations" not in rows.column_names and "messages" in rows.column_names:
            rows = rows.rename_column("messages", "conversations")
        if not set(template.needed) <= set(rows.column_names):
            needs = " and ".join(template.needed)
            raise RecipeError(f"it has the columns {listed}; prompt_template: {name} needs {needs}.")
        rows = _applied(rows, template, f"Applying the template {name}")
    have = set(rows.column_names)
    fitting = [needed for needed in columns if set(needed) <= have]
    needed = next((needed for needed in fitting if mapped & set(needed)), fitting[0] if fitting else None)
    if needed is None:
        needs = "; ".join(" and ".join(needed) for needed in columns)
        hints = "".join(
            f" Its rows look like those of {other!r}: set prompt_template: {other}."
            for other, template in _TEMPLATES.items()
            if name == "none" and set(template.needed) <= have
        )
        read = {*_READ, *(column for each in columns for column in each)}
        if name == "none" and (unknown := sorted(mapped - read)):
            hints = f" columns sets {unknown[0]!r}.{nearest(unknown[0], sorted(read))}"
        elif name == "none" and not hints and not mapped:
            hints = " If they have other names there, say which, as in columns: {prompt: question, completion: answer}."
        made = "" if name == "none" else f", of which prompt_template: {name} makes {', '.join(rows.column_names)}"
        raise RecipeError(f"it has the columns {listed}{made}; the trainer needs one of: {needs}.{hints}")
    if mapped & set(needed):
        others = have & {column for other in columns for column in other} - {*needed, *mapped, "prompt"}
        rows = rows.remove_columns(sorted(others))
    elif "completion" in needed and "input_ids" not in have:
        # TRL would put the end of the row to a text that it does not train on, and not to the completion
        rows = rows.remove_columns([each[0] for each in fitting if len(each) == 1 and each[0] not in needed])
    rows = _without_other_prompt(rows, needed)
    if getattr(rows.features.get("tools"), "dtype", None) == "string":  # JSON for TRL, which takes no empty text
        rows = rows.map(_with_tools, with_indices=True, desc="Reading the tools")
    check_rows(rows, needed)
    return rows


def _with_tools(row: dict[str, Any], index: int) -> dict[str, str]:
    tools = (row["tools"] or "").strip() or "[]"
    try:
        json.loads(tools)
    except ValueError as error:
        raise RecipeError(
            f"Row {index} of the dataset has tools {short(tools)}, which is no JSON: {error}. Correct or remove it."
        ) from error
    return {"tools": tools}


def _applied(rows, template: _Template, desc: str):
    """The rows after `template.convert`, whose messages may have keys of their own, such as `tool_calls`."""
    from datasets import Features, Json, List

    replaced = [column for column in rows.column_names if column in (template.replaced or rows.column_names)]
    options = {"with_indices": True, "remove_columns": replaced, "desc": desc}
    try:
        return rows.map(template.convert, **options)
    except RecipeError:
        raise
    except (ValueError, TypeError):  # no message has such a key in the first rows, by which datasets goes
        kept = {name: feature for name, feature in rows.features.items() if name not in replaced}
        made = {name: List(Json()) for name in template.convert(rows[0], 0)}
        return rows.map(template.convert, features=Features(kept | made), **options)


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
