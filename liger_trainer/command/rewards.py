"""Reward functions that a recipe names: of `liger_trainer.rewards`, or any function by its dotted path."""

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from liger_trainer.errors import RecipeError
from liger_trainer.rewards import REWARDS


def find_reward(name: str, folder: Path | None = None) -> Callable:
    """The function that `name` means: a key of `REWARDS`, or a dotted path such as `my_rewards.brief`.

    A dotted path imports its module, which runs the module's code; an error there is raised as it is. Besides installed
    modules, those in `folder` and in the working directory are found, even if the command is a script, for which Python
    looks into the script's folder only. Both folders stay at the end of `sys.path`, for what the function imports.

    Args:
        name (`str`): A name, or the dotted path of a function or of an object that can be called.
        folder (`Path`, *optional*): The folder of the recipe.

    Raises:
        RecipeError: There is no such function.
    """
    if name in REWARDS:
        return REWARDS[name]
    module, _, attribute = name.rpartition(".")
    found = None
    if module:
        for path in (folder, Path.cwd()):
            if path is not None and str(path.resolve()) not in sys.path:
                sys.path.append(str(path.resolve()))
        try:
            found = getattr(importlib.import_module(module), attribute, None)
        except ModuleNotFoundError as error:
            if error.name != module.partition(".")[0]:
                raise
    if inspect.isclass(found) or not callable(found):
        raise RecipeError(
            f"reward_funcs has {name!r}, which is no function. Expected one of {', '.join(REWARDS)}, or the "
            "dotted path of a function, such as my_module.my_reward."
        )
    return found
