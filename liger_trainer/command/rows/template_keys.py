"""Finds the parts of rows that a chat template leaves out: keys of messages, whole roles, and tools.

A jinja template silently ignores what it does not name. So rows are rendered with and without each part. Parts that
make no difference are reported before training.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from liger_trainer.command.processes import print_status
from liger_trainer.command.rows.turn_weights import TURN_FLAGS
from liger_trainer.errors import RecipeError, short, without_nulls

if TYPE_CHECKING:
    from datasets import Dataset

_MOST_EXAMPLES = 8  # rows to render for each part: a template may read a part only in some turns
_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected")
_EMPTY: tuple[Any, ...] = (None, False, "", [], {})
Part = tuple[str, str]  # the role of a message and a key of it, or ("", "tools")


def check_template_keys(tokenizer: Any, where: str, rows: "Dataset") -> None:
    """Print which parts of `rows` the chat template of `tokenizer` does not read.

    Args:
        tokenizer: A tokenizer or processor with a chat template.
        where (`str`): The origin of the template, for messages.
        rows (`Dataset`): Rows after a `prompt_template`. Columns of text are not checked.

    Raises:
        RecipeError: Without those parts, every row has an empty answer.
    """
    columns = [name for name in (*_COLUMNS, "tools") if name in rows.column_names]
    examples = _find_examples(rows.select_columns(columns))
    first_row: dict[Part, int] = {}  # of each part that the template does not read
    for part, numbered_rows in examples.items():
        if not _is_read(tokenizer, part, [row for _, row in numbered_rows]):
            first_row[part] = numbered_rows[0][0]
    if not first_row:
        return
    named = [f"{_name(part)} (first in row {number})" for part, number in first_row.items()]
    print_status(
        f"the chat template of {where} does not read {', '.join(named)}, so the model neither sees nor learns it. Set "
        "chat_template_path to a template that reads it, or remove it from the rows."
    )
    _check_answers(where, rows.select_columns(columns), set(first_row))


def _name(part: Part) -> str:
    role, key = part
    return f"{key} of messages of the role {role}" if role else f"the column {key}"


def _conversations(row: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield the conversations of a row that a trainer renders, without the keys that Arrow has filled with nulls."""
    turns = {name: without_nulls(row[name]) for name in _COLUMNS if name in row and _is_messages(row[name])}
    prompt = turns.pop("prompt", [])
    if not turns and prompt:
        yield prompt
    for answer in turns.values():
        yield prompt + answer


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, dict) and "role" in turn for turn in value)


def _parts_of(row: dict[str, Any]) -> Iterator[Part]:
    for conversation in _conversations(row):
        for turn in conversation:
            yield from ((turn["role"], key) for key in _content_keys(turn))
    if row.get("tools") not in (None, "", "[]", []):
        yield "", "tools"


def _content_keys(turn: dict[str, Any]) -> list[str]:
    """Return the keys of a message that hold something for the chat template."""
    return [key for key, value in turn.items() if key not in ("role", *TURN_FLAGS) and value not in _EMPTY]


def _find_examples(rows: "Dataset") -> dict[Part, list[tuple[int, dict[str, Any]]]]:
    """Return, for each part, the first rows that have it, with their numbers."""
    examples_of: dict[Part, list[tuple[int, dict[str, Any]]]] = {}
    for index, row in enumerate(rows):
        for part in dict.fromkeys(_parts_of(row)):
            examples = examples_of.setdefault(part, [])
            if len(examples) < _MOST_EXAMPLES:
                examples.append((index, row))
    return examples_of


def _is_read(tokenizer: Any, part: Part, examples: list[dict[str, Any]]) -> bool:
    """Return whether a row is rendered differently without `part`. Also True if no row can be rendered."""
    rendered = False
    for row in examples:
        tools = row.get("tools")
        fewer_tools = None if part == ("", "tools") else tools
        for conversation in _conversations(row):
            # Templates of image models may read only lists of parts, and others only text.
            for form in (conversation, _in_parts(conversation)):
                with_part = _render(tokenizer, form, tools)
                if with_part is None:
                    continue
                rendered = True
                if with_part != _render(tokenizer, _without(form, {part}), fewer_tools):
                    return True
    return not rendered  # the trainer says why a template refuses the rows


def _in_parts(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    texts = (turn.get("content") for turn in conversation)
    return [
        turn | ({"content": [{"type": "text", "text": text}]} if isinstance(text, str) else {})
        for turn, text in zip(conversation, texts, strict=True)
    ]


def _without(conversation: list[dict[str, Any]], parts: set[Part]) -> list[dict[str, Any]]:
    """Return the conversation without `parts`. Contents become empty instead of missing: templates expect one."""
    messages = []
    for turn in conversation:
        message = {key: value for key, value in turn.items() if (turn["role"], key) not in parts}
        if "content" in turn and "content" not in message:
            message["content"] = "" if isinstance(turn["content"], str) else []
        messages.append(message)
    return messages


def _render(tokenizer: Any, conversation: list[dict[str, Any]], tools: Any) -> str | None:
    """Return the text of a conversation, or None if the template fails on it."""
    from jinja2 import TemplateError

    read = json.loads(tools) if isinstance(tools, str) and tools else tools
    try:
        return tokenizer.apply_chat_template(conversation, tools=read or None, tokenize=False)
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError):
        return None


def _check_answers(where: str, rows: "Dataset", unread: set[Part]) -> None:
    """Print how many rows have an empty answer without the parts `unread`. RecipeError if all rows do."""
    emptied: list[int] = []
    count = 0
    example: Any = None
    for index, row in enumerate(rows):
        count += 1
        for conversation in _conversations(row):
            lost = next((turn for turn in conversation if _becomes_empty(turn, unread)), None)
            if lost is not None:
                emptied.append(index)
                example = lost if example is None else example
                break
    if not emptied:
        return
    message = f"{short(example)} in row {emptied[0]} of the dataset is an empty answer to the chat template of {where}"
    if len(emptied) == count:
        raise RecipeError(
            f"{message}, as in every row. Set chat_template_path to a template that reads it, such as qwen."
        )
    print_status(f"{message}, as in {len(emptied)} of {count} rows, which teaches the model to answer nothing.")


def _becomes_empty(turn: dict[str, Any], unread: set[Part]) -> bool:
    """Return whether a message of the assistant has content, but none without the parts `unread`."""
    if turn["role"] != "assistant":
        return False
    keys = _content_keys(turn)
    return bool(keys) and all(("assistant", key) in unread for key in keys)
