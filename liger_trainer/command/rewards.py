"""Reward functions that a recipe names: of `liger_trainer.rewards`, or any function by its dotted path."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from liger_trainer.errors import RecipeError
from liger_trainer.rewards import REWARDS

# What TRL passes to every reward function, in addition to the columns of the rows.
_ALWAYS_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_GIVEN = {*_ALWAYS_GIVEN, "environments"}


def find_reward(name: str, folder: Path | None = None) -> Callable:
    """The function that `name` means: a key of `REWARDS`, or a dotted path such as `my_rewards.brief`.

    A dotted path imports its module, which runs the module's code. Besides installed modules, those in `folder` and in
    the working directory are found, even if the command is a script, for which Python looks into the script's folder
    only. Both folders stay at the end of `sys.path`, for what the function itself imports.

    Args:
        name (`str`): A name, or the dotted path of a function or of an object that can be called.
        folder (`Path`, *optional*): The folder of the recipe.

    Raises:
        RecipeError: There is no such function. The message says what has failed and lists the known names.
    """
    if name in REWARDS:
        return REWARDS[name]
    module, _, attribute = name.rpartition(".")
    reason = "a function of your own is named by its dotted path, such as my_module.my_reward"
    if module:
        for path in (folder, Path.cwd()):
            if path is not None and str(path.resolve()) not in sys.path:
                sys.path.append(str(path.resolve()))
        try:
            holder = importlib.import_module(module)
        except Exception as error:  # the code of a user's module may raise anything
            reason = f"importing {module} failed with {type(error).__name__}: {error}{_place(error)}"
            raise _unknown(name, reason) from error
        if not hasattr(holder, attribute):
            reason = f"{module} ({getattr(holder, '__file__', 'built in')}) has no attribute {attribute!r}"
        elif inspect.isclass(found := getattr(holder, attribute)) or inspect.isbuiltin(found) or not callable(found):
            reason = f"it is of the type {type(found).__name__}; name a function, or an object that can be called"
        else:
            return found
    raise _unknown(name, reason)


def _unknown(name: str, reason: str) -> RecipeError:
    return RecipeError(f"reward_funcs has {name!r}: {reason}. Known by name: {', '.join(REWARDS)}.")


def _place(error: Exception) -> str:
    """The file and line in a user's module where its import has failed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    frames = [frame for frame in frames if frame.filename not in (__file__, importlib.__file__)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def check_columns(reward: Callable, columns: list[str]) -> None:
    """RecipeError if `reward` needs an argument that neither TRL nor the rows' `columns` provide, or refuses one."""
    name = getattr(reward, "__name__", type(reward).__name__)
    parameters = inspect.signature(reward).parameters
    for parameter in parameters.values():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if named and parameter.default is parameter.empty and parameter.name not in _GIVEN | set(columns):
            raise RecipeError(
                f"reward_funcs has {name!r}, which reads the column {parameter.name!r}, but the rows have only "
                f"{', '.join(columns)}. Add that column, or choose another function."
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    passed = (*_ALWAYS_GIVEN, *(column for column in columns if column not in ("prompt", "completion")))
    if refused := [argument for argument in dict.fromkeys(passed) if argument not in parameters]:
        raise RecipeError(
            f"reward_funcs has {name!r}, which does not take everything that TRL passes by keyword: it would refuse "
            f"{', '.join(refused)}. Add **columns as its last argument."
        )
