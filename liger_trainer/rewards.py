"""Reward functions by name, for recipes: those of `REWARDS`, or any function by its dotted path.

A reward function is TRL's: called with `prompts`, `completions` (a list of texts, or of lists of messages), and each
column of the rows, a list each, by keyword, it returns one number per completion, or None to leave one out.
"""

import importlib
import inspect
from collections.abc import Callable

from liger_trainer.recipe import RecipeError

# What TRL passes beside the columns of the rows.
_GIVEN = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}


def boxed_answer(completions: list, solution: list[str], **columns) -> list[float]:
    """1.0 for a completion whose last `\\boxed{...}` holds the row's `solution`, else 0.0.

    Compared as text: spaces, dollar signs and a `\\boxed{}` around the solution do not count, another way to write the
    same number does.

    Args:
        completions (`list`): Texts, or lists of messages, of which the last counts.
        solution (`list[str]`): The right answer to each.
    """
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    given = [_bare(_last_boxed(text)) for text in texts]
    wanted = [_bare(_last_boxed(answer) or answer) for answer in solution]
    return [float(answer is not None and answer == right) for answer, right in zip(given, wanted, strict=True)]


def _last_boxed(text: str) -> str | None:
    """What stands between the braces of the last `\\boxed{`, braces within it included; None without a whole one."""
    start, mark = text.rfind("\\boxed{"), len("\\boxed{")
    if start < 0:
        return None
    depth = 1
    for end in range(start + mark, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + mark : end]
    return None


def _bare(answer: str | None) -> str | None:
    return None if answer is None else "".join(answer.replace("$", "").split())


REWARDS: dict[str, Callable] = {"boxed_answer": boxed_answer}


def find_reward(name: str) -> Callable:
    """The function that `name` means: a key of `REWARDS`, or a dotted path such as `my_package.rewards.length`.

    Raises:
        RecipeError: There is no such function; the message lists the names and says what failed.
    """
    if name in REWARDS:
        return REWARDS[name]
    module, _, attribute = name.rpartition(".")
    reason = "a function of your own is named by its dotted path, such as my_module.my_reward"
    if module:
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            reason = str(error)
        else:
            if callable(found):
                return found
            reason = f"it is a {type(found).__name__}, not a function"
    raise RecipeError(f"reward_funcs has {name!r}: {reason}. Known by name: {', '.join(REWARDS)}.")


def check_columns(reward: Callable, columns: list[str]) -> None:
    """RecipeError where `reward` needs an argument that neither TRL nor the rows' `columns` give it."""
    for parameter in inspect.signature(reward).parameters.values():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if named and parameter.default is parameter.empty and parameter.name not in _GIVEN | set(columns):
            raise RecipeError(
                f"reward_funcs has {reward.__name__!r}, which reads the column {parameter.name!r}, and the rows have "
                f"{', '.join(columns)}. Add that column, or choose another function."
            )
