"""Removes the prompt from answers that begin with it: trainers put the prompt before the answer themselves."""

from typing import TYPE_CHECKING, Any

from liger_trainer.command.processes import print_status
from liger_trainer.command.rows.convert import convert_rows
from liger_trainer.errors import without_nulls

if TYPE_CHECKING:
    from datasets import Dataset

_ANSWERS = ("completion", "chosen", "rejected")
_LONG = 20  # characters of a prompt that no answer begins with by chance
_MANY = 4  # rows that do not all begin with short prompts by chance


def without_repeated_prompts(rows: "Dataset", needed: tuple[str, ...]) -> "Dataset":
    """Remove the prompt from answers that are messages, and print a line about texts that repeat it.

    A text is not changed: whether a space or a newline belongs between prompt and answer is unknown.
    """
    names = [name for name in _ANSWERS if name in needed]
    if "prompt" not in rows.column_names or not names:
        return rows
    of_messages = False
    for name in names:
        pairs = rows.select_columns(["prompt", name])
        repeated = [index for index, row in enumerate(pairs) if _repeats(row["prompt"], row[name])]
        if not repeated and len(rows) >= _MANY and all(_repeats(row["prompt"], row[name], 1) for row in pairs):
            repeated = list(range(len(rows)))
        if not repeated:
            continue
        message = f"{name} begins with the prompt in {len(repeated)} of {len(rows)} rows, first in row {repeated[0]}"
        if isinstance(rows[repeated[0]]["prompt"], list):
            of_messages = True
            print_status(f"{message}, and is read without it.")
        else:
            print_status(f"{message}, so the model reads it twice. Remove it from {name}, or from prompt.")
    if not of_messages:
        return rows

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        count = len(row["prompt"])
        return {name: row[name][count:] if _repeats(row["prompt"], row[name]) else row[name] for name in names}

    return convert_rows(rows, convert, names, "Leaving out repeated prompts")


def _repeats(prompt: Any, answer: Any, least: int = _LONG) -> bool:
    if isinstance(prompt, str) and isinstance(answer, str):
        return len(prompt.strip()) >= least and answer.startswith(prompt)
    if not isinstance(prompt, list) or not isinstance(answer, list) or not 0 < len(prompt) < len(answer):
        return False
    return without_nulls(answer[: len(prompt)]) == without_nulls(prompt)
