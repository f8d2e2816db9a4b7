"""Brings the rows of several data sets to the same columns, so that `datasets` can join or interleave them."""

from typing import TYPE_CHECKING

from liger_trainer.command.rows.columns import ALSO_READ, Columns
from liger_trainer.errors import RecipeError

if TYPE_CHECKING:
    from datasets import Dataset


def with_shared_columns(key: str, names: list[str], parts: "list[Dataset]", columns: Columns) -> "list[Dataset]":
    """Return the parts with the columns that all of them have. RecipeError if training may read another column."""
    if len(parts) > 1:
        parts = [_with_plain_strings(part) for part in parts]
    shared = set.intersection(*(set(part.column_names) for part in parts))
    read = {*ALSO_READ, *(column for needed in columns for column in needed)}
    # Token ids come with columns of masks and labels, and reward functions may read any column.
    exact = columns == (("prompt",),) or "input_ids" in shared or not any(set(needed) <= shared for needed in columns)
    if not exact:
        shared = {name for name in shared if name in read or _is_alike(parts, name)}
        shared |= {"tools"}  # datasets fills in nulls, which mean no tools
    for name, part in zip(names, parts, strict=True):
        # datasets would silently fill a missing column with nulls
        more = set(part.column_names) - shared
        if more and (exact or more & read):
            other, has = next(
                (n, p.column_names) for n, p in zip(names, parts, strict=True) if not more <= {*p.column_names}
            )
            raise RecipeError(
                f"{key} {name!r} has the columns {part.column_names}, but {other!r} has {has}. Give them the same "
                f"names with columns, or remove {', '.join(sorted(more))} from {name!r}."
            )
    selected = []
    for part in parts:
        columns_of_part = [column for column in part.column_names if column in shared]
        selected.append(part.select_columns(columns_of_part))
    return _with_json_columns(selected)


def _is_alike(parts: "list[Dataset]", column: str) -> bool:
    """Return whether a column has the same type in all parts."""
    return all(part.features[column] == parts[0].features[column] for part in parts)


def _with_plain_strings(rows: "Dataset") -> "Dataset":
    """Return the rows with `string` instead of pandas' `large_string`, which `datasets` does not join with `string`."""
    from datasets import Features, Value

    large = [name for name, kind in rows.features.items() if getattr(kind, "dtype", None) == "large_string"]
    return rows.cast(Features(rows.features | dict.fromkeys(large, Value("string")))) if large else rows


def _with_json_columns(parts: "list[Dataset]") -> "list[Dataset]":
    """Return the parts with messages and tools as Json if their keys differ between parts."""
    from datasets import Features, Json, List

    for name in {name for part in parts for name in part.column_names}:
        kinds = [part.features.get(name) for part in parts]
        lists = all(isinstance(kind, List) and isinstance(kind.feature, (dict, Json)) for kind in kinds if kind)
        if lists and any(kind not in (None, other) for kind in kinds for other in kinds if other):
            for at, part in enumerate(parts):
                if name in part.features:  # a cast would turn nested Json, such as parameters of tools, into text
                    features = Features(part.features | {name: List(Json())})
                    parts[at] = part.map(
                        lambda row, name=name: {name: row[name]}, remove_columns=[name], features=features
                    )
    return parts
