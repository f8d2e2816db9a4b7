"""A column `system` of rows of messages, which becomes the first message of each conversation."""

from typing import Any

from liger_trainer.command.processes import say
from liger_trainer.command.rows.convert import convert_rows
from liger_trainer.data.formats import with_system
from liger_trainer.errors import RecipeError, short


def place_system_prompts(rows: Any, needed: tuple[str, ...]) -> Any:
    """The rows with the column `system` as a message before the others. Rows without that column stay as they are.

    Args:
        rows (`Dataset`): Rows after a `prompt_template`.
        needed (`tuple[str, ...]`): The columns that the trainer reads of them.

    Raises:
        RecipeError: A row has a `system` that is no text, or another system prompt in its messages.
    """
    others = [name for name in ("system_prompt", "system_message") if name in rows.column_names]
    if "system" not in rows.column_names:
        if others:
            say(
                f"the column {others[0]} is not read. To put it before the messages of each row, set columns: "
                f"{{system: {others[0]}}}."
            )
        return rows
    names = ["prompt"] if "prompt" in rows.column_names else [name for name in needed if name != "completion"]
    if not isinstance(rows[0][names[0]], list) or "input_ids" in needed:
        say(
            f"the column system is not read, because {names[0]} is no list of messages. Write the rows as messages of "
            "role and content, or put the system prompt into the text."
        )
        return rows

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        system = row["system"]
        if system is not None and not isinstance(system, str):
            raise RecipeError(f"Row {index} of the dataset has system {short(system)}; expected text, or nothing.")
        return {name: with_system(system, row[name], index) for name in names}

    removed = () if needed == ("prompt",) else ("system",)  # rewards read any column
    return convert_rows(rows, convert, (*names, *removed), "Placing system prompts")
