"""Checks of every row before a trainer gets it, for what would give a traceback in TRL, or would go unnoticed there."""

from typing import Any

import pyarrow.compute as pc

from liger_trainer.errors import RecipeError, short

TEXT, MESSAGES, LABEL, TOKENS = "text", "a list of messages", "a truth value", "a list of token ids"
_DESCRIBED = {
    MESSAGES: "a list of messages, each with role and content",
    LABEL: "true or false, without quotes (or 1 and 0)",
}
_KINDS = {"messages": (MESSAGES,), "label": (LABEL,), "input_ids": (TOKENS,)}
_FORMS = (("messages",), ("prompt", "completion"), ("text",))  # a row has the columns of one of these forms
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
                _check_value(rows, index, column, value, kinds)
            index += 1
        if "chosen" in needed and "prompt" not in needed:
            _check_prompt_within(batch, index - len(batch["chosen"]), kinds["chosen"])
    if type(rows.features.get("label")).__name__ == "Json" and "label" in needed:
        raise RecipeError(
            "In some rows of the dataset, label is text or a number, and in others true or false; expected "
            f"{_DESCRIBED[LABEL]}, in every row. Correct those rows."
        )
    either = {column: kind for column, kind in kinds.items() if column in _EITHER}
    for column, kind in either.items():
        if kind != (first := next(iter(either.values()))):
            raise RecipeError(
                f"{next(iter(either))} is {first}, but {column} is {kind} in its rows. Write all of "
                f"{', '.join(either)} as text, or all of them as lists of messages."
            )


def _check_value(rows: Any, index: int, column: str, value: Any, kinds: dict[str, str]) -> None:
    """RecipeError if the value is of no kind that its column may have, or of another one than in row 0."""
    wanted = _wanted(column)
    kind = next((each for each in wanted if _fits(value, each)), None)
    if kind is None:
        raise _wrong(rows, index, column, value)
    if kind != kinds.setdefault(column, kind):
        raise RecipeError(
            f"Row {index} of the dataset has {column} {short(value)}, {kind}, but row 0 has {kinds[column]}, and every "
            "row needs the same. Correct or remove the row."
        )


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
        raise _wrong(rows, 0, "input_ids", rows[0]["input_ids"])
    start = 0
    for table in rows.select_columns(["input_ids"]).with_format("arrow").iter(10_000):
        lengths = pc.fill_null(pc.list_value_length(table.column(0)), 0)
        if (bad := pc.index(lengths, 0).as_py()) >= 0:
            raise _wrong(rows, start + bad, "input_ids", rows[start + bad]["input_ids"])
        start += len(table)


def _wrong(rows: Any, index: int, column: str, value: Any) -> RecipeError:
    expected = ", or ".join(_DESCRIBED.get(kind, kind) for kind in _wanted(column))
    message = f"Row {index} of the dataset has {column} {short(value)}; expected {expected}."
    turn = next(iter(value), None) if isinstance(value, list) else value
    if isinstance(turn, dict) and turn.get("from") is not None and "value" in turn:
        named = column == "messages" or "conversations" in rows.column_names
        mend = "" if named else ", and name the column of the turns conversations"
        return RecipeError(f"{message} It has turns with from and value. Set prompt_template: sharegpt{mend}.")
    mine = next((form for form in _FORMS if column in form), None)
    others = [form[0] for form in _FORMS if mine is not None and form != mine and form[0] in rows.column_names]
    if value is None and others:
        message += f" The rows have {others[0]} too, but every row needs the same columns."
    return RecipeError(f"{message} Correct or remove the row.")


def _check_prompt_within(batch: dict[str, list], start: int, kind: str) -> None:
    """Check that chosen and rejected have a prompt in common, and an answer after it.

    If there is no column prompt, TRL takes the beginning that both have in common for the prompt.
    """
    for index, pair in enumerate(zip(batch["chosen"], batch["rejected"], strict=True), start):
        for name, value in zip(("chosen", "rejected"), pair, strict=True):
            if len(value) < (1 if kind == TEXT else 2):
                raise RecipeError(
                    f"Row {index} of the dataset has {name} {short(value)}, and there is no column prompt; expected "
                    "both the prompt and an answer in it. Add a column prompt."
                )
        if kind == MESSAGES and pair[0][0].get("content") != pair[1][0].get("content"):
            raise RecipeError(
                f"In row {index} of the dataset, chosen and rejected begin with different messages, and there is no "
                "column prompt; expected the same prompt in both. Add a column prompt."
            )
