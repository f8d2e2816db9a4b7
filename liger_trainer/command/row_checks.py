"""Checks of every row before a trainer gets it, for what would give a traceback in TRL, or would go unnoticed there.

The checks work on columns of Arrow tables. Only a column with values of several kinds, which datasets keeps as JSON, is
read row by row.
"""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from liger_trainer.errors import RecipeError, short

TEXT, MESSAGES, LABEL, TOKENS = "text", "messages", "label", "tokens"
_DESCRIBED = {
    TEXT: "text",
    MESSAGES: "a list of messages, each with role and content",
    LABEL: "true or false, without quotes (or 1 and 0)",
    TOKENS: "a list of token ids",
}
_NAMED = {TEXT: "text", MESSAGES: "a list of messages", LABEL: "a truth value", TOKENS: "a list of token ids"}
_KINDS = {"messages": (MESSAGES,), "label": (LABEL,), "input_ids": (TOKENS,)}
_FORMS = (("messages",), ("prompt", "completion"), ("text",))  # a row has the columns of one of these forms
_EITHER = ("prompt", "completion", "chosen", "rejected")
_BATCH = 100_000  # rows


def check_rows(rows, needed: tuple[str, ...]) -> None:
    """Check that every row has what a trainer needs.

    Args:
        rows (`datasets.Dataset`): The rows after the template has been applied.
        needed (`tuple[str, ...]`): The columns that the trainer reads. All of them exist.

    Raises:
        RecipeError: A row is wrong. The message names the first such row, the field, its value, and what to do.
    """
    if "chosen" in needed and "prompt" in rows.column_names:
        needed = ("prompt", *needed)
    kinds = {column: _check_column(rows, column) for column in needed}
    either = {column: kind for column, kind in kinds.items() if column in _EITHER}
    if len(set(either.values())) > 1:
        first, kind = next(iter(either.items()))
        other, other_kind = next((name, found) for name, found in either.items() if found != kind)
        raise RecipeError(
            f"{first} is {_NAMED[kind]}, but {other} is {_NAMED[other_kind]} in its rows. Write all of "
            f"{', '.join(either)} as text, or all of them as lists of messages."
        )
    if "chosen" in needed and "prompt" not in needed:
        _check_prompt_within(rows, kinds["chosen"])


def _check_column(rows, column: str) -> str:
    """The kind that all values of `column` have: TEXT, MESSAGES, LABEL or TOKENS."""
    wanted = _KINDS.get(column) or ((TEXT, MESSAGES) if column in _EITHER else (TEXT,))
    if _is_json(rows.features[column]):
        return _check_mixed(rows, column, wanted)
    kind: str | None = None
    start = 0
    for table in rows.select_columns([column]).with_format("arrow").iter(_BATCH):
        values = table.column(0).combine_chunks()
        values = values.chunk(0) if isinstance(values, pa.ChunkedArray) else values
        kind, bad = _kind_and_first_bad(values, wanted)
        if bad is not None:
            raise _wrong(rows, column, start + bad, wanted)
        start += len(values)
    assert kind is not None, "rows are never empty here"
    return kind


def _kind_and_first_bad(values: pa.Array, wanted: tuple[str, ...]) -> tuple[str | None, int | None]:
    """The kind of `values`, None if it is none of `wanted`, and the index of the first value that is wrong, if any."""
    of_type = values.type
    if TEXT in wanted and (pa.types.is_string(of_type) or pa.types.is_large_string(of_type)):
        return TEXT, _first(pc.is_null(values))
    if LABEL in wanted and pa.types.is_boolean(of_type):
        return LABEL, _first(pc.is_null(values))
    if LABEL in wanted and pa.types.is_integer(of_type):  # 0 and 1 are truth values everywhere in TRL
        return LABEL, _first(pc.invert(pc.is_in(values, pa.array([0, 1], of_type))))
    if _is_list(of_type) and (MESSAGES in wanted or TOKENS in wanted):
        empty = pc.fill_null(pc.equal(pc.list_value_length(values), 0), True)
        if (bad := _first(empty)) is not None:
            return None, bad
        if TOKENS in wanted:
            return TOKENS, None if pa.types.is_integer(of_type.value_type) else 0
        if not pa.types.is_struct(of_type.value_type):
            return None, 0
        bad = _first_bad_message(values.flatten())
        return MESSAGES, None if bad is None else pc.list_parent_indices(values)[bad].as_py()
    return None, _first(pc.is_valid(values)) or 0


def _first_bad_message(messages: pa.StructArray) -> int | None:
    """The index of the first message that lacks a role, or has neither content nor anything in its place.

    Content is text or a list of parts; tool calls, for example, may take its place.
    """
    fields = {field.name: pc.struct_field(messages, field.name) for field in messages.type}
    if not {"role", "content"} <= fields.keys() or not pa.types.is_string(fields["role"].type):
        return 0
    of_type = fields["content"].type
    if not (pa.types.is_string(of_type) or pa.types.is_large_string(of_type) or _is_list(of_type)):
        if not pa.types.is_null(of_type):
            return _first(pc.is_valid(fields["content"])) or 0
    without_role, empty = pc.is_null(fields.pop("role")), pc.is_null(messages)
    without_content: Any = None
    for values in fields.values():
        missing = pc.is_null(values)
        without_content = missing if without_content is None else pc.and_(without_content, missing)
    return _first(pc.or_(pc.or_(without_role, empty), without_content))


def _check_mixed(rows, column: str, wanted: tuple[str, ...]) -> str:
    """The kind of a column that datasets keeps as JSON because its values, or parts of them, are of several types."""
    kind: str | None = None
    start = 0
    for batch in rows.select_columns([column]).iter(1000):
        for index, value in enumerate(batch[column], start):
            found = next((one for one in wanted if _fits(value, one)), None)
            if found is None:
                raise _wrong(rows, column, index, wanted)
            if kind is not None and found != kind:
                raise RecipeError(
                    f"Row {index} of the dataset has {column} {short(value)}, {_NAMED[found]}, but row 0 has "
                    f"{_NAMED[kind]}, and every row needs the same. Correct or remove the row."
                )
            kind = found
        start += len(batch[column])
    if kind == LABEL:
        raise RecipeError(
            f"In some rows of the dataset, {column} is text or a number, and in others true or false; expected "
            f"{_DESCRIBED[LABEL]}, in every row. Correct those rows."
        )
    assert kind is not None, "rows are never empty here"
    return kind


def _fits(value, kind: str) -> bool:
    if kind == TEXT:
        return isinstance(value, str)
    if kind == LABEL:
        return isinstance(value, bool)
    if not isinstance(value, list) or not value:
        return False
    if kind == TOKENS:
        return all(isinstance(token, int) for token in value)
    return all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), (str, list, type(None)))
        and any(part is not None for name, part in message.items() if name != "role")
        for message in value
    )


def _wrong(rows, column: str, index: int, wanted: tuple[str, ...]) -> RecipeError:
    value = rows[index][column]
    expected = ", or ".join(_DESCRIBED[kind] for kind in wanted)
    message = f"Row {index} of the dataset has {column} {short(value)}; expected {expected}."
    turn = next(iter(value), None) if isinstance(value, list) else value
    if isinstance(turn, dict) and turn.get("from") is not None and "value" in turn:
        mend = (
            "Set prompt_template: sharegpt."
            if column == "messages" or "conversations" in rows.column_names
            else "Set prompt_template: sharegpt, and name the column of the turns conversations."
        )
        return RecipeError(f"{message} It has turns with from and value. {mend}")
    mine = next((form for form in _FORMS if column in form), None)
    others = [form[0] for form in _FORMS if mine is not None and form != mine and form[0] in rows.column_names]
    if value is None and others:
        return RecipeError(
            f"{message} The rows have {others[0]} too, but every row needs the same columns. Correct or remove the row."
        )
    return RecipeError(f"{message} Correct or remove the row.")


def _check_prompt_within(rows, kind: str) -> None:
    """Check that chosen and rejected have a prompt in common, and an answer after it.

    If there is no column prompt, TRL takes the beginning that both have in common for the prompt.
    """
    start = 0
    least = 1 if kind == TEXT else 2
    for table in rows.select_columns(["chosen", "rejected"]).with_format("arrow").iter(_BATCH):
        columns = [table.column(i).combine_chunks() for i in (0, 1)]
        for name, values in zip(("chosen", "rejected"), columns, strict=True):
            lengths = (pc.utf8_length if kind == TEXT else pc.list_value_length)(values)
            if (bad := _first(pc.less(lengths, least))) is not None:
                raise RecipeError(
                    f"Row {start + bad} of the dataset has {name} {short(rows[start + bad][name])}, and there is no "
                    "column prompt; expected both the prompt and an answer in it. Add a column prompt."
                )
        if kind == MESSAGES and all(pa.types.is_struct(values.type.value_type) for values in columns):
            firsts = [_first_contents(values) for values in columns]
            texts = all(pa.types.is_string(contents.type) for contents in firsts)
            if texts and (bad := _first(pc.not_equal(*firsts))) is not None:
                raise RecipeError(
                    f"In row {start + bad} of the dataset, chosen and rejected begin with different messages, and "
                    "there is no column prompt; expected the same prompt in both. Add a column prompt."
                )
        start += len(table)


def _first_contents(conversations: pa.Array) -> pa.Array:
    """The content of the first message of each conversation, none of which is empty."""
    ends = pc.cumulative_sum(pc.list_value_length(conversations))
    starts = pc.subtract(ends, pc.list_value_length(conversations))
    return pc.struct_field(conversations.flatten(), "content").take(starts)


def _is_list(of_type: pa.DataType) -> bool:
    return pa.types.is_list(of_type) or pa.types.is_large_list(of_type)


def _is_json(feature) -> bool:
    """Whether datasets keeps the values, the messages or their content as JSON, which its later releases do."""
    message = getattr(feature, "feature", None)
    content = message.get("content") if isinstance(message, dict) else None
    return "Json" in {type(part).__name__ for part in (feature, message, content)}


def _first(mask: pa.BooleanArray) -> int | None:
    """The index of the first true value; None if there is none."""
    index = pc.index(mask, True).as_py()
    return None if index < 0 else index
