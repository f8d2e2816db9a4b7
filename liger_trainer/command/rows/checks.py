"""Rejects rows that no trainer can use, or that would silently teach something else."""

import difflib
import functools
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from liger_trainer.command.processes import print_status
from liger_trainer.command.rows.turn_weights import TURN_FLAGS
from liger_trainer.errors import RecipeError, short

if TYPE_CHECKING:
    from datasets import Dataset

# The kinds of values that a column may hold, as errors name them
TEXT = "text"
MESSAGES = "a list of messages, each with role and content"
LABEL = "true or false, without quotes (or 1 and 0)"
TOKENS = "a list of token ids"
_KINDS = {"messages": (MESSAGES,), "label": (LABEL,), "input_ids": (TOKENS,)}
_EITHER = ("prompt", "completion", "chosen", "rejected")


def check_rows(rows: "Dataset", needed: tuple[str, ...]) -> None:
    """RecipeError for the first row with an invalid value in one of the columns `needed`. All of them exist."""
    if "input_ids" in needed:
        _check_tokens(rows)
        return
    if "chosen" in needed and "prompt" in rows.column_names:
        needed = ("prompt", *needed)
    kinds: dict[str, str] = {}
    index = same = silent = 0
    answer = next((name for name in ("completion", "chosen", "messages") if name in needed), "")
    for batch in rows.select_columns(list(needed)).iter(1000):
        for values in zip(*(batch[column] for column in needed), strict=True):
            for column, value in zip(needed, values, strict=True):
                wanted = _KINDS.get(column) or ((TEXT, MESSAGES) if column in _EITHER else (TEXT,))
                wanted = (kinds[column],) if column in kinds else wanted  # the same kind as in the rows before
                kind = next((kind for kind in wanted if _is_kind(value, kind)), None)
                if kind is None:
                    raise _wrong_value(index, column, value, wanted)
                kinds[column] = kind
                if kind == MESSAGES:
                    _check_roles(index, column, value)
            row = dict(zip(needed, values, strict=True))
            if needed[:2] == ("chosen", "rejected"):
                _check_pair(index, row, kinds["chosen"])
            index, same = index + 1, same + ("chosen" in row and row["chosen"] == row["rejected"])
            silent += bool(answer and row.get("label", True) and _is_empty_answer(row[answer]))
    if type(rows.features.get("label")).__name__ == "Json" and "label" in needed:
        raise RecipeError(f"In some rows of the dataset, label is text; expected {LABEL}, in every row.")
    if len({kinds[column] for column in needed if column in _EITHER}) > 1:
        kinds_found = "; ".join(f"{column} is {kind}" for column, kind in kinds.items() if column in _EITHER)
        raise RecipeError(f"{kinds_found}. Write all of them as text, or all as lists of messages.")
    if 0 < same == index:
        raise RecipeError("chosen and rejected are the same in every row, so there is nothing to learn.")
    if 0 < silent == index:
        raise RecipeError(f"{answer} has an empty answer in every row, so there is nothing to learn.")
    if silent:
        print_status(
            f"{silent} of {index} rows have an empty answer in {answer}, which teaches the model to answer nothing."
        )


def _is_empty_answer(value: Any) -> bool:
    """Return whether a text, or everything that the assistant says in a list of messages, is empty."""
    turns = value if isinstance(value, list) else [{"role": "assistant", "content": value}]
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    texts = [part for turn in answers for name, part in turn.items() if name not in ("role", *TURN_FLAGS)]
    return bool(texts) and not any(part.strip() if isinstance(part, str) else part for part in texts)


def _is_kind(value: Any, kind: str) -> bool:
    if kind == TEXT:
        return isinstance(value, str)
    if kind == LABEL:
        return isinstance(value, (int, float)) and value in (0, 1)
    # The content of a message is text or a list of parts. It may be missing, for example next to tool calls.
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    if not isinstance(value.get("content"), (str, list, type(None))):
        return False
    return any(part is not None for name, part in value.items() if name != "role")


def _check_tokens(rows: "Dataset") -> None:
    """RecipeError if a row of `input_ids` is empty or not a list of integers."""
    feature = getattr(rows.features["input_ids"], "feature", None)
    if not getattr(feature, "dtype", "").startswith(("int", "uint")):
        raise _wrong_value(0, "input_ids", rows[0]["input_ids"], (TOKENS,))
    column = rows.select_columns(["input_ids"]).with_format("arrow")[:].column(0)
    bad = pc.index(pc.fill_null(pc.list_value_length(column), 0), 0).as_py()
    if bad >= 0:
        raise _wrong_value(bad, "input_ids", rows[bad]["input_ids"], (TOKENS,))


def _wrong_value(index: int, column: str, value: Any, wanted: tuple[str, ...]) -> RecipeError:
    turn = next(iter(value), None) if isinstance(value, list) else value
    sharegpt = isinstance(turn, dict) and turn.get("from") is not None and "value" in turn
    advice = "It has turns with from and value: set prompt_template: sharegpt." if sharegpt else "Correct or remove it."
    return RecipeError(
        f"Row {index} of the dataset has {column} {short(value)}; expected {', or '.join(wanted)}, as in every row. "
        f"{advice}"
    )


def _check_roles(index: int, column: str, messages: list[dict[str, Any]]) -> None:
    """RecipeError for a role that is clearly a misspelling. Most templates would render it as it is."""
    for message in messages:
        intended = _intended_role(message["role"])
        if intended is not None:
            raise RecipeError(
                f"Row {index} of the dataset has {column} with the role {message['role']!r}; expected {intended!r}."
            )


@functools.cache
def _intended_role(role: str) -> str | None:
    known = ("system", "user", "assistant")
    if role in (*known, "tool"):
        return None
    if any(letter.isdigit() for letter in role):  # such as user_1, one of several users
        return None
    near = difflib.get_close_matches(role.strip().lower(), known, n=1, cutoff=0.8)
    return {"human": "user", "gpt": "assistant"}.get(role) or next(iter(near), None)


def _check_pair(index: int, pair: dict[str, Any], kind: str) -> None:
    """RecipeError unless chosen and rejected begin with the same prompt, which TRL extracts, and go on with an answer.

    Only for pairs without a column prompt.
    """
    for name, value in pair.items():
        if len(value) < (1 if kind == TEXT else 2):
            raise RecipeError(
                f"Row {index} of the dataset has {name} {short(value)}, without a prompt. Add a column prompt."
            )
    if kind == MESSAGES and len({str(value[0].get("content")) for value in pair.values()}) > 1:
        raise RecipeError(
            f"Row {index} of the dataset: chosen and rejected start with different prompts. Add a column prompt."
        )
