"""Converts rows of Alpaca, ShareGPT and conversations to rows for TRL, and recognizes rows with pictures."""

import json
from typing import Any

from liger_trainer.errors import RecipeError, short


def has_images(rows: Any) -> bool:
    """Return whether a dataset has pictures in a column that trainers read. `rows` may be None."""
    return not {"image", "images"}.isdisjoint(getattr(rows, "column_names", None) or ())


def first_conversation(rows: Any) -> list[dict[str, Any]] | None:
    """Return the messages of the first row of a `datasets.Dataset`; None without messages, and for other datasets."""
    known = getattr(rows, "column_names", None)
    names = [name for name in ("messages", "prompt", "chosen") if name in known] if isinstance(known, list) else []
    if not names or not hasattr(rows, "select_columns") or not hasattr(rows, "__len__") or not len(rows):
        return None
    values = rows.select_columns(names)[0].values()
    return next((value for value in values if _is_conversation(value)), None)


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


# The template of the Alpaca data (github.com/tatsu-lab/stanford_alpaca). The response starts on its own line, so no
# token spans the end of the prompt.
_ALPACA_SYSTEM = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)
_ALPACA_SYSTEM_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
ALPACA_COLUMNS = ("instruction", "input", "output", "system", "history")


def alpaca_row(row: dict, index: int = 0) -> dict[str, str]:
    """Return an Alpaca row as `{"prompt", "completion"}`. TRL adds the end-of-text token.

    Args:
        row (`dict`): Has `instruction` and `output`. Optional: `input`; `system`, which replaces the template's first
            sentences; and `history`, earlier pairs of instruction and output, which become part of the prompt.
        index (`int`): The row's number, for error messages.

    Raises:
        RecipeError: A column has another form, or `instruction` is empty.
    """
    for key in ("instruction", "input", "output", "system"):
        value = row.get(key)
        if key in ("input", "system") and value is None:
            continue
        if not isinstance(value, str) or (key == "instruction" and not value.strip()):
            raise RecipeError(
                f"Row {index} of the dataset has {key} {short(value)}; expected text. Correct or remove the row."
            )
    default = _ALPACA_SYSTEM_WITH_INPUT if row.get("input") else _ALPACA_SYSTEM
    parts = [row.get("system") or default]
    for instruction, output in alpaca_history(row.get("history"), index):
        parts.append(f"### Instruction:\n{instruction}\n\n### Response:\n{output}")
    parts.append(f"### Instruction:\n{row['instruction']}")
    if row.get("input"):
        parts.append(f"### Input:\n{row['input']}")
    parts.append("### Response:\n")
    return {"prompt": "\n\n".join(parts), "completion": row["output"]}


def alpaca_history(history: Any, index: int) -> list[list[str]]:
    """Return the column `history` of an Alpaca row: earlier turns, each an instruction and its output."""
    turns = [] if history is None else history
    pairs = isinstance(turns, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in turns)
    if not pairs or not all(isinstance(text, str) for turn in turns for text in turn):
        raise RecipeError(
            f"Row {index} of the dataset has history {short(history)}; expected a list of pairs of texts, such as "
            '[["One?", "unus"]]. Correct or remove it.'
        )
    return turns


_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}


def sharegpt_row(row: dict, index: int = 0) -> dict[str, list[dict[str, str]]]:
    """Return a ShareGPT row as messages of `role` and `content`.

    Args:
        row (`dict`): Has `conversations`, a list of turns `{"from", "value"}`. Optional: `chosen` and `rejected`, one
            turn each, which answer the conversation; and `system`, a text that goes before the first turn.
        index (`int`): The row's number, for error messages.

    Returns:
        `dict`: `prompt`, `chosen` and `rejected`; or only `messages`, for a row without a preference.

    Raises:
        RecipeError: A turn has another form, is empty or out of place, or one of the two answers is missing.
    """
    messages = sharegpt_messages(row, index)
    last, preference = messages[-1]["role"], {name: row.get(name) for name in ("chosen", "rejected")}
    if not any(preference.values()):
        if last != "assistant":
            raise RecipeError(
                f"Row {index} of the dataset ends with a turn of {last!r}, so there is nothing to learn from it. End "
                "it with a turn from 'gpt', or add chosen and rejected."
            )
        return {"messages": messages}
    if last not in ("user", "tool"):
        raise RecipeError(
            f"Row {index} of the dataset has chosen and rejected answers to a turn of {last!r}; expected the last of "
            "the conversations to be from 'human' or 'observation'."
        )
    answers = {name: [_sharegpt_message(turn, name, index)] for name, turn in preference.items()}
    for name, (message,) in answers.items():
        if message["role"] != "assistant":
            raise RecipeError(f"Row {index} of the dataset has {name} from {row[name]['from']!r}; expected 'gpt'.")
    return {"prompt": messages, **answers}


def sharegpt_messages(row: dict, index: int) -> list[dict[str, Any]]:
    """Return the `conversations` of a ShareGPT row as messages, after its `system` text if it has one."""
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise RecipeError(f"Row {index} of the dataset has conversations {short(turns)}; expected a list of turns.")
    messages = [_sharegpt_message(turn, f"conversations[{i}]", index) for i, turn in enumerate(turns)]
    return with_system(row.get("system"), messages, index)


def with_system(
    system: str | None, messages: list[dict[str, Any]], index: int, where: str = "in the column system"
) -> list[dict[str, Any]]:
    """Return the messages with the system prompt `system` before them, unless it is empty or there already.

    Raises:
        RecipeError: The first message is another system prompt. The error names the row's number `index`, and `where`
            for the origin of `system`.
    """
    first = messages[0] if messages else {}
    if not system or not isinstance(first, dict):
        return messages
    if first.get("role") != "system":
        return [{"role": "system", "content": system}, *messages]
    if first.get("content") != system:
        raise RecipeError(
            f"Row {index} of the dataset has two system prompts: {short(system)} {where}, and "
            f"{short(first.get('content'))} in the first message. Keep one of them."
        )
    return messages


def _sharegpt_message(turn: Any, where: str, index: int) -> dict[str, Any]:
    """Return a ShareGPT turn `{"from", "value"}` as a message; a `function_call` becomes `tool_calls`.

    A RecipeError names the turn by `where` and `index`.
    """
    if not isinstance(turn, dict) or turn.get("from") not in _ROLES or not isinstance(turn.get("value"), str):
        other_form = isinstance(turn, dict) and turn.get("role") is not None
        advice = "Correct or remove the row."
        if other_form:
            advice = "For role and content, name the column messages, and unset prompt_template."
        raise RecipeError(
            f"Row {index} of the dataset has {where} {short(turn)}; expected from, one of {', '.join(_ROLES)}, and "
            f"value, a text. {advice}"
        )
    if not turn["value"].strip():
        raise RecipeError(f"Row {index} of the dataset has an empty text in {where}. Correct or remove the row.")
    others = {key: value for key, value in turn.items() if key not in ("from", "value") and value is not None}
    message = {**others, "role": _ROLES[turn["from"]], "content": turn["value"]}
    if turn["from"] != "function_call":
        return message
    return message | {"content": "", "tool_calls": _tool_calls(turn["value"], where, index)}


def _tool_calls(text: str, where: str, index: int) -> list[dict[str, Any]]:
    """Return the calls in a `function_call` turn, which is JSON of a name and arguments, or a list of them."""
    try:
        calls = json.loads(text)
        calls = calls if isinstance(calls, list) else [calls]
        for call in calls:
            if isinstance(call["arguments"], str):
                call["arguments"] = json.loads(call["arguments"])
        if not all(isinstance(call["name"], str) and isinstance(call["arguments"], dict) for call in calls):
            raise TypeError
    except (ValueError, TypeError, KeyError) as error:
        raise RecipeError(
            f"Row {index} of the dataset has the function_call {short(text)} in {where}; expected JSON such as "
            '{"name": "look_up", "arguments": {"word": "blue"}}, or a list of that. Correct or remove the row.'
        ) from error
    functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    return [{"type": "function", "function": function} for function in functions]


def last_turn_row(row: dict, index: int = 0) -> dict[str, list[dict[str, str]]]:
    """Split `messages` into `completion`, the last turn (the assistant's), and `prompt`, the turns before it.

    Raises:
        RecipeError: `messages` is not a list of two or more turns of `role` and `content`, or its last turn is not the
            assistant's.
    """
    messages = row["messages"]
    # `check_rows` checks the content later: a turn may have tool calls instead.
    well_formed = isinstance(messages, list) and all(isinstance(turn, dict) and turn.get("role") for turn in messages)
    if not well_formed or len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise RecipeError(
            f"Row {index} of the dataset has messages {short(messages)}; expected two or more turns of role and "
            "content, the last one of the assistant. Correct or remove the row."
        )
    return {"prompt": messages[:-1], "completion": messages[-1:]}
