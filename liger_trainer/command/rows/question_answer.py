"""Turns columns of text that are mapped to `question` and `answer` into the turns of a chat."""

from typing import TYPE_CHECKING, Any

from liger_trainer.command.rows.convert import convert_rows
from liger_trainer.errors import RecipeError, short

if TYPE_CHECKING:
    from datasets import Dataset

# For each column of text: the column that it becomes, and its role
_TURNS = {
    "question": ("prompt", "user"),
    "answer": ("completion", "assistant"),
    "chosen": ("chosen", "assistant"),
    "rejected": ("rejected", "assistant"),
}
QUESTION_ANSWER = ("question", "answer")


def as_chat(
    rows: "Dataset", mapping: dict[str, str], columns: tuple[tuple[str, ...], ...]
) -> tuple["Dataset", set[str]]:
    """Return the rows with chat turns instead of texts, and the names that `mapping` sets afterwards.

    Args:
        rows (`Dataset`): Rows with the names of `mapping`.
        mapping (`dict[str, str]`): The key `columns` of the recipe. Without `question` in it, rows stay as they are.
        columns (`tuple[tuple[str, ...], ...]`): The sets of columns that the trainer takes. If it takes no completion,
            as GRPO does, `answer` is left to the reward functions.

    Raises:
        RecipeError: The mapping has `question` and a column that it becomes, or no answer for it, or a row's value is
            not a text.
    """
    if "question" not in mapping:
        return rows, set(mapping)
    doubled = [name for name in ("prompt", "completion", "messages") if name in mapping]
    if doubled:
        raise RecipeError(f"columns is {mapping}, which has question and {doubled[0]}. Keep one form of them.")
    is_pair = {"chosen", "rejected"} <= set(rows.column_names)
    if "answer" not in mapping and ("prompt",) not in columns and not is_pair:
        raise RecipeError(
            f"columns is {mapping}, which has question and no answer. The data has the columns "
            f"{', '.join(_names_in_data(rows, mapping))}: columns: {{question: ..., answer: ...}}."
        )
    texts = ["question"]
    if "answer" in mapping and any("completion" in needed for needed in columns):
        texts.append("answer")
    texts += [name for name in ("chosen", "rejected") if name in rows.column_names]

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        converted = {}
        for name in texts:
            column, role = _TURNS[name]
            if not isinstance(row[name], str):
                raise RecipeError(
                    f"Row {index} of the dataset has {name} {short(row[name])}; expected text. Correct or remove it."
                )
            converted[column] = [{"role": role, "content": row[name]}]
        return converted

    replaced = {*texts, "prompt", "completion", "messages"}
    named = {_TURNS[name][0] if name in texts else name for name in mapping}
    return convert_rows(rows, convert, replaced, "Making chats of questions and answers"), named


def _names_in_data(rows: "Dataset", mapping: dict[str, str]) -> list[str]:
    """Return the columns of the data before `mapping` renamed them."""
    return [mapping.get(name, name) for name in rows.column_names]
