"""Makes the column `system`, or one system prompt for all rows, the first message of each conversation."""

from typing import TYPE_CHECKING, Any

from liger_trainer.command.processes import print_status
from liger_trainer.command.rows.convert import convert_rows
from liger_trainer.data.formats import with_system
from liger_trainer.errors import RecipeError, short

if TYPE_CHECKING:
    from datasets import Dataset


def place_system_prompts(rows: "Dataset", needed: tuple[str, ...], system_prompt: str | None = None) -> "Dataset":
    """Return the rows with `system_prompt`, or the column `system`, as the first message.

    Args:
        rows (`Dataset`): Rows after a `prompt_template`. Without a system prompt they stay as they are.
        needed (`tuple[str, ...]`): The columns that the trainer reads.
        system_prompt (`str`, *optional*): The system prompt for all rows, from the recipe.

    Raises:
        RecipeError: A row's `system` is not text, a row already has another system prompt, or `system_prompt` is set
            for rows without messages.
    """
    if system_prompt is not None:
        return _place_one_for_all(rows, needed, system_prompt)
    others = [name for name in ("system_prompt", "system_message") if name in rows.column_names]
    if "system" not in rows.column_names:
        if others:
            print_status(
                f"the column {others[0]} is not read. To put it before the messages of each row, set columns: "
                f"{{system: {others[0]}}}."
            )
        return rows
    names = _opening_columns(rows, needed)
    if not isinstance(rows[0][names[0]], list) or "input_ids" in needed:
        print_status(
            f"the column system is not read, because {names[0]} is not a list of messages. Write the rows as messages "
            "of role and content, or put the system prompt into the text."
        )
        return rows

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        system = row["system"]
        if system is not None and not isinstance(system, str):
            raise RecipeError(f"Row {index} of the dataset has system {short(system)}; expected text, or nothing.")
        return {name: with_system(system, row[name], index) for name in names}

    removed = () if needed == ("prompt",) else ("system",)  # kept for reward functions, which may read any column
    return convert_rows(rows, convert, (*names, *removed), "Placing system prompts")


def _place_one_for_all(rows: "Dataset", needed: tuple[str, ...], system_prompt: str) -> "Dataset":
    names = _opening_columns(rows, needed)
    if "input_ids" in needed or not isinstance(rows[0][names[0]], list):
        raise RecipeError(
            f"system_prompt is {short(system_prompt)}, but {names[0]} is not a list of messages. Write the rows as "
            "messages of role and content, or map their columns with columns: {question: ..., answer: ...}."
        )
    if "system" in rows.column_names:
        raise RecipeError(
            f"system_prompt is {short(system_prompt)}, but the rows also have a column system. Keep one of them."
        )

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        return {name: with_system(system_prompt, row[name], index, "in system_prompt") for name in names}

    return convert_rows(rows, convert, names, "Placing the system prompt")


def _opening_columns(rows: "Dataset", needed: tuple[str, ...]) -> list[str]:
    """Return the columns that a conversation begins with."""
    return ["prompt"] if "prompt" in rows.column_names else [name for name in needed if name != "completion"]
