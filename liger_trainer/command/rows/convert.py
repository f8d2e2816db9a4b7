"""Applies a function to each row, where messages may have keys that other messages lack."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from liger_trainer.errors import RecipeError

if TYPE_CHECKING:
    from datasets import Dataset


def convert_rows(
    rows: "Dataset", convert: Callable[[dict, int], dict], replaced: Iterable[str], desc: str
) -> "Dataset":
    """Return the rows with the columns `replaced` exchanged for those that `convert(row, index)` returns."""
    from datasets import Features, Json, List

    removed = [column for column in rows.column_names if column in set(replaced)]
    options: dict[str, Any] = {"with_indices": True, "remove_columns": removed, "desc": desc}
    try:
        return rows.map(convert, **options)
    except RecipeError:
        raise
    except (
        ValueError,
        TypeError,
    ):  # a later message has a key that the first rows lack; datasets infers types from those
        remaining = {name: feature for name, feature in rows.features.items() if name not in removed}
        converted = {name: List(Json()) for name in convert(rows[0], 0)}
        return rows.map(convert, features=Features(remaining | converted), **options)
