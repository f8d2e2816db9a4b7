"""Checks the keys that say whether a message is learned: `weight` (OpenAI) and `train` (Axolotl).

No trainer reads them. If only some messages of a conversation are learned (`assistant_only_loss`, `train_on`), the
marks in the chat template follow them. Otherwise they are only accepted if the recipe does what they say.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from liger_trainer.errors import RecipeError, short

if TYPE_CHECKING:
    from datasets import Dataset

_COLUMNS = ("messages", "completion", "chosen", "rejected")
_PART_KEYS = ("train_detail", "training_detail")  # Axolotl's keys for learning parts of a message
_TURN_KEYS = ("train", "weight")  # the first one decides, as in the marked template
TURN_FLAGS = (*_TURN_KEYS, *_PART_KEYS)  # keys of a message that are not content


def is_learned(turn: dict[str, Any], roles: Sequence[str]) -> bool:
    """Return whether a message is learned: its own flag decides, or else whether its role is in `roles`."""
    flags = [turn[key] for key in _TURN_KEYS if turn.get(key) is not None]
    return bool(flags[0]) if flags else turn.get("role") in roles


def has_turn_weights(rows: "Dataset | None") -> bool:
    """Return whether a message of `rows` has a `weight` or `train`. `rows` may be None."""
    if rows is None:
        return False
    columns = _columns_of_messages(rows)
    for row in rows.select_columns(columns) if columns else ():
        for turns in row.values():
            if any(turn.get(key) is not None for turn in turns or () for key in _TURN_KEYS):
                return True
    return False


def check_turn_weights(rows: "Dataset", answers_alone: bool, roles: Sequence[str] = ("assistant",)) -> None:
    """RecipeError for a message that would be learned although it says otherwise, or the other way round.

    Args:
        rows (`Dataset`): Rows after a `prompt_template`.
        answers_alone (`bool`): `assistant_only_loss`: only messages of `roles`, or with a flag, are learned.
        roles (`Sequence[str]`): The roles that are learned in that case.
    """
    columns = _columns_of_messages(rows)
    for index, row in enumerate(rows.select_columns(columns) if columns else ()):
        for name in columns:
            turns = list(enumerate(row[name] or ()))
            follows = answers_alone and name in ("messages", "completion")
            # Conversations of a preference begin with the prompt, which is not learned.
            for number, turn in turns[-1:] if name in ("chosen", "rejected") else turns:
                _check_turn(f"Row {index} of the dataset has {name}[{number}]", turn, name, follows)
            if follows and not any(is_learned(turn, roles) for _, turn in turns):
                _raise_nothing_learned(f"row {index} of the dataset", name, [turn for _, turn in turns], roles)


def _raise_nothing_learned(where: str, name: str, turns: list[dict[str, Any]], roles: Sequence[str]) -> None:
    """RecipeError that says why none of the `turns` in the column `name` is learned."""
    message = f"Only messages of the role {' or '.join(roles)} are learned, but {where}"
    present = list(dict.fromkeys(str(turn.get("role")) for turn in turns))
    if set(present).intersection(roles):
        raise RecipeError(f"{message} has none in {name} but some with weight 0 or train false. Remove the row.")
    raise RecipeError(
        f"{message} has none in {name}. Its roles are {', '.join(present)}. Remove the row, or name other roles in "
        "train_on."
    )


def _columns_of_messages(rows: "Dataset") -> list[str]:
    names = getattr(rows, "column_names", ())
    return [name for name in _COLUMNS if name in names and _is_messages(rows[0][name])]


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _check_turn(where: str, turn: dict[str, Any], column: str, follows: bool) -> None:
    """RecipeError for a flag that training would ignore. `follows`: training follows `weight` and `train`."""
    for key in _PART_KEYS:
        if turn.get(key):
            raise RecipeError(
                f"{where} with {key} {short(turn[key])}, but trainers learn whole messages. Remove {key}, or move the "
                "text that should not be learned into the prompt."
            )
    for key in _TURN_KEYS:
        value = turn.get(key)
        if value is None:
            continue
        if value not in (0, 1):  # also false and true
            raise RecipeError(f"{where} with {key} {short(value)}; expected 0 or 1, or false or true. Remove it.")
        if follows or value:
            continue
        message = f"{where} with {key} {short(value)} and the role {turn.get('role')!r}, but it would be learned"
        if column in ("chosen", "rejected"):
            raise RecipeError(f"{message}. Remove the row, or {key}.")
        raise RecipeError(
            f"{message}. Set train_on: [assistant] to follow {key}, or prompt_template: last_turn to learn only the "
            "last message."
        )
