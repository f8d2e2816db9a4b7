"""Restores values that a file format has changed: messages stored as JSON text, keys that Arrow has filled with nulls,
and labels that a reader has turned into numbers.
"""

import ast
import json
from typing import TYPE_CHECKING, Any

from liger_trainer.errors import RecipeError, short, without_nulls

if TYPE_CHECKING:
    from datasets import Dataset

_LISTS = ("messages", "conversations", "history")
_EITHER = ("prompt", "completion", "chosen", "rejected")  # texts, or lists of messages


def restore_types(rows: "Dataset", has_labels: bool) -> "Dataset":
    """Parse messages from JSON text, remove the nulls that Arrow has added, and make labels true or false.

    With `has_labels`, a column `label` says whether an answer is good. RecipeError if messages are JSON in some rows
    but not in others.
    """
    rows = _without_added_nulls(_messages_from_text(rows))
    return _labels_as_booleans(rows) if has_labels else rows


def _messages_from_text(rows: "Dataset") -> "Dataset":
    """Return the rows with lists of messages parsed from text: CSV holds them as JSON or as Python literals."""
    texts = [name for name in (*_LISTS, *_EITHER) if getattr(rows.features.get(name), "dtype", "") in _TEXT_TYPES]
    names = [name for name in texts if _is_list_of_messages(_first_value(rows, name), name)]
    if not names:
        return rows

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        return {name: _parse_messages(row[name], name, index) for name in names}

    return _map_rows(rows, convert, names, "Reading messages")


_TEXT_TYPES = ("string", "large_string")


def _first_value(rows: "Dataset", name: str) -> str | None:
    """Return the first value of a column that is not empty."""
    return next((row[name] for row in rows.select_columns([name]) if row[name]), None)


def _is_list_of_messages(text: str | None, name: str) -> bool:
    if text is None or not text.lstrip().startswith("["):
        return False
    if name in _LISTS:
        return True
    parsed = _parse_literal(text)
    return isinstance(parsed, list) and bool(parsed) and all(isinstance(x, dict) and "role" in x for x in parsed)


def _parse_literal(text: str) -> Any:
    """Parse JSON or a Python literal. Return None for any other text."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _parse_messages(text: str | None, name: str, index: int) -> Any:
    if not text:
        return None
    parsed = _parse_literal(text)
    if not isinstance(parsed, list):
        raise RecipeError(
            f"Row {index} of the dataset has {name} {short(text)}; expected a JSON list, as in other rows. Correct or "
            "remove it."
        )
    return parsed


def _without_added_nulls(rows: "Dataset") -> "Dataset":
    """Return the rows without nulls inside tool calls, tool schemas and parts of contents.

    An Arrow column has one set of keys, so an argument of one call is null in all other calls.
    """
    names = [name for name in (*_LISTS, *_EITHER, "tools") if _has_nested_keys(rows.features.get(name))]
    if not names:
        return rows

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        return {name: without_nulls(row[name]) for name in names}

    return _map_rows(rows, convert, names, "Leaving out nulls")


def _has_nested_keys(feature: Any) -> bool:
    """Return whether a list of dictionaries has nested dictionaries, and no pictures."""
    keys = getattr(feature, "feature", None)
    if not isinstance(keys, dict) or _contains(keys, lambda kind: type(kind).__name__ in ("Image", "Audio", "Video")):
        return False
    return any(_contains(kind, lambda inner: isinstance(inner, dict)) for kind in keys.values())


def _contains(kind: Any, wanted: Any) -> bool:
    if wanted(kind):
        return True
    inner = list(kind.values()) if isinstance(kind, dict) else [getattr(kind, "feature", None)]
    return any(_contains(one, wanted) for one in inner if one is not None)


def _map_rows(rows: "Dataset", convert: Any, names: list[str], desc: str) -> "Dataset":
    from datasets import Features, Json, List

    features = Features(rows.features | {name: List(Json()) for name in names})
    return rows.map(convert, with_indices=True, features=features, desc=desc)


def _labels_as_booleans(rows: "Dataset") -> "Dataset":
    """Return the rows with labels such as 1.0 as true and false. Readers turn 1 into 1.0 in a column with a gap."""
    from datasets import Features, Value

    feature = rows.features.get("label")
    kind = type(feature).__name__ if getattr(feature, "dtype", "") != "float64" else "float64"
    if kind not in ("float64", "Json"):
        return rows
    for row in rows.select_columns(["label"]):
        if row["label"] is None or isinstance(row["label"], str) or row["label"] not in (0, 1):
            return rows  # `check_rows` reports what is wrong with it
    features = Features(rows.features | {"label": Value("bool")})
    return rows.map(lambda row: {"label": bool(row["label"])}, features=features, desc="Reading labels")
