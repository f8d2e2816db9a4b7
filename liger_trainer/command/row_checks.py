"""Checks of every row before a trainer gets it, for what would give a traceback in TRL, or would go unnoticed there."""

from typing import Any

import pyarrow.compute as pc

from liger_trainer.errors import RecipeError, short

TEXT, MESSAGES, LABEL, TOKENS = (
    "text", "a list of messages, each with role and content", "true or false, without quotes (or 1 and 0)",
    "a list of token ids",
)  # fmt: skip
_KINDS = {"messages": (MESSAGES,), "label": (LABEL,), "input_ids": (TOKENS,)}
_EITHER = ("prompt", "completion", "chosen", "rejected")


def check_rows(rows: Any, needed: tuple[str, ...]) -> None:
    """Check that every row has what a trainer needs.

    Args:
        rows (`datasets.Dataset`): The rows after the template has been applied.
        needed (`tuple[str, ...]`): The columns that the trainer reads. All of them exist.

    Raises:
        RecipeError: A row is wrong. The message names the first such row, the field, its value, and what to do.
    """
    if "input_ids" in needed:
        _check_tokens(rows)
        return
    if "chosen" in needed and "prompt" in rows.column_names:
        needed = ("prompt", *needed)
    kinds: dict[str, str] = {}
    index = 0
    for batch in rows.select_columns(list(needed)).iter(1000):
        for values in zip(*(batch[column] for column in needed), strict=True):
            for column, value in zip(needed, values, strict=True):
                _check_value(index, column, value, kinds)
            if needed[:2] == ("chosen", "rejected"):
                _check_pair(index, dict(zip(needed, values, strict=True)), kinds["chosen"])
            index += 1
    if type(rows.features.get("label")).__name__ == "Json" and "label" in needed:
        raise RecipeError(f"In some rows of the dataset, label is text; expected {LABEL}, in every row.")
    if len({kinds[column] for column in needed if column in _EITHER}) > 1:
        raise RecipeError(
            f"{'; '.join(f'{column} is {kind}' for column, kind in kinds.items() if column in _EITHER)}. Write all of "
            "them as text, or all as lists of messages."
        )


def _check_value(index: int, column: str, value: Any, kinds: dict[str, str]) -> None:
    """RecipeError if the value is of no kind that its column may have, or of another one than in row 0."""
    kind = next((each for each in _wanted(column) if _fits(value, each)), None)
    if kind is None or kind != kinds.setdefault(column, kind):
        raise _wrong(index, column, value, (kinds[column],) if column in kinds else _wanted(column))


def _wanted(column: str) -> tuple[str, ...]:
    return _KINDS.get(column) or ((TEXT, MESSAGES) if column in _EITHER else (TEXT,))


def _fits(value: Any, kind: str) -> bool:
    if kind == TEXT:
        return isinstance(value, str)
    if kind == LABEL:
        return isinstance(value, int) and value in (0, 1)
    # The content of a message is text or a list of parts; tool calls, for example, may take its place.
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), (str, list, type(None)))
            and any(part is not None for name, part in message.items() if name != "role")
            for message in value
        )
    )


def _check_tokens(rows: Any) -> None:
    """RecipeError if a row of `input_ids` is no list of integers, or is empty."""
    feature = getattr(rows.features["input_ids"], "feature", None)
    if not getattr(feature, "dtype", "").startswith(("int", "uint")):
        raise _wrong(0, "input_ids", rows[0]["input_ids"], (TOKENS,))
    start = 0
    for table in rows.select_columns(["input_ids"]).with_format("arrow").iter(10_000):
        lengths = pc.fill_null(pc.list_value_length(table.column(0)), 0)
        if (bad := pc.index(lengths, 0).as_py()) >= 0:
            raise _wrong(start + bad, "input_ids", rows[start + bad]["input_ids"], (TOKENS,))
        start += len(table)


def _wrong(index: int, column: str, value: Any, wanted: tuple[str, ...]) -> RecipeError:
    turn = next(iter(value), None) if isinstance(value, list) else value
    sharegpt = isinstance(turn, dict) and turn.get("from") is not None and "value" in turn
    mend = "It has turns with from and value: set prompt_template: sharegpt." if sharegpt else "Correct or remove it."
    return RecipeError(
        f"Row {index} of the dataset has {column} {short(value)}; expected {', or '.join(wanted)}, as in every row. "
        f"{mend}"
    )


def _check_pair(index: int, pair: dict[str, Any], kind: str) -> None:
    """RecipeError unless chosen and rejected have a prompt in common, which TRL finds there, and an answer after it."""
    for name, value in pair.items():
        if len(value) < (1 if kind == TEXT else 2):
            raise RecipeError(
                f"Row {index} of the dataset has {name} {short(value)}; expected the prompt and an answer in it, or a "
                "column prompt."
            )
    if kind == MESSAGES and len({str(value[0].get("content")) for value in pair.values()}) > 1:
        raise RecipeError(
            f"In row {index} of the dataset, chosen and rejected begin with different messages; expected the same "
            "prompt in both, or a column prompt."
        )
