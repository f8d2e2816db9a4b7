"""Messages that say whether they are learned: `weight` (OpenAI) and `train` (Axolotl), which no trainer reads.

A recipe decides by keys of its own what is learned. So such a word is taken where the recipe does what it says, and
refused elsewhere.
"""

from typing import Any

from liger_trainer.errors import RecipeError, short

_COLUMNS = ("messages", "completion", "chosen", "rejected")
_OF_PARTS = ("train_detail", "training_detail")  # which parts of a message are learned, as Axolotl has it
TURN_FLAGS = ("weight", "train", *_OF_PARTS)  # keys of a message that are no part of what it says


def check_turn_weights(rows: Any, answers_alone: bool) -> None:
    """RecipeError for a message that would be learned although it says otherwise, or the other way round.

    Args:
        rows (`Dataset`): Rows after a `prompt_template`.
        answers_alone (`bool`): Whether only messages of the assistant are learned, as with `assistant_only_loss`.
    """
    columns = [name for name in _COLUMNS if name in rows.column_names and _is_messages(rows[0][name])]
    for index, row in enumerate(rows.select_columns(columns) if columns else ()):
        for name in columns:
            turns = list(enumerate(row[name] or ()))
            # Conversations of a preference begin with the prompt, which is not learned.
            for number, turn in turns[-1:] if name in ("chosen", "rejected") else turns:
                _check_turn(f"Row {index} of the dataset has {name}[{number}]", turn, name, answers_alone)


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _check_turn(where: str, turn: dict[str, Any], column: str, answers_alone: bool) -> None:
    for key in _OF_PARTS:
        if turn.get(key):
            raise RecipeError(
                f"{where} with {key} {short(turn[key])}, and trainers learn whole messages. Remove {key}, or write "
                "what is not to be learned into the prompt."
            )
    for key in ("weight", "train"):
        value = turn.get(key)
        if value is None:
            continue
        if value not in (0, 1):  # also false and true
            raise RecipeError(f"{where} with {key} {short(value)}; expected 0 or 1, or false or true. Remove it.")
        # In columns of answers, an assistant's is learned in any case, and what others say in between is as well.
        learned = turn.get("role") == "assistant" or not (column == "messages" and answers_alone)
        if bool(value) == learned:
            continue
        said = f"{where} with {key} {short(value)} and the role {turn.get('role')!r}, which would"
        if value:
            raise RecipeError(f"{said} not be learned, because of assistant_only_loss. Remove {key} or that option.")
        if turn.get("role") != "assistant":
            raise RecipeError(
                f"{said} be learned. Set assistant_only_loss: true to learn answers alone, or prompt_template: "
                "last_turn to learn the last one."
            )
        if column != "messages":
            raise RecipeError(f"{said} be learned. Remove the row, or {key}.")
        raise RecipeError(
            f"{said} be learned. Where only the last answer of each row is to be learned, set prompt_template: "
            f"last_turn. Otherwise split the row into one for each answer to be learned, or remove {key}."
        )
