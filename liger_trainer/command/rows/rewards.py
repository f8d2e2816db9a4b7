"""Finds the reward functions that a recipe names, and checks them against the columns of its rows."""

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from liger_trainer.data.rewards import REWARDS
from liger_trainer.errors import RecipeError


def find_reward(name: str, folder: Path | None = None) -> Callable:
    """Return the function that `name` means: a key of `REWARDS`, or a dotted path such as `my_rewards.brief`.

    A dotted path imports its module, which runs its code. Modules are also looked up in `folder` (the recipe's) and in
    the working directory. Both stay at the end of `sys.path`, because the function may import from there later.
    """
    if name in REWARDS:
        return REWARDS[name]
    module, _, attribute = name.rpartition(".")
    function, why = None, ""
    if module:
        for path in (folder, Path.cwd()):
            if path is not None and str(path.resolve()) not in sys.path:
                sys.path.append(str(path.resolve()))
        try:
            function = getattr(importlib.import_module(module), attribute, None)
            why = f" {module} has no function {attribute}." if function is None else ""
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise
            why = f" Neither the folder of the recipe nor the working directory has a module {error.name}."
    if ".py:" in name:
        why = f" Write {Path(name.partition('.py:')[0]).name}.{name.partition('.py:')[2]}, as Python imports it."
    if inspect.isclass(function) or not callable(function):
        raise RecipeError(
            f"reward_funcs has {name!r}; expected {', '.join(REWARDS)} or the dotted path of a function.{why}"
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function without a signature, such as one in C
        return function
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise RecipeError(
            f"reward_funcs has {name!r}, which only takes {', '.join(p.name for p in parameters)}. TRL passes further "
            "arguments by keyword: end its parameters with **columns."
        )
    return function


def check_columns_of(name: str, reward: Callable, columns: list[str]) -> None:
    """RecipeError if a reward function needs a column that the rows do not have. It would only fail in training."""
    from_trl = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError):  # a function without a signature, such as one in C
        return
    needed = [p.name for p in parameters if p.default is p.empty and not p.kind.name.startswith("VAR_")]
    missing = [column for column in needed if column not in from_trl.union(columns)]
    if missing:
        raise RecipeError(
            f"reward_funcs has {name!r}, which needs the column {missing[0]}, but the rows have {', '.join(columns)}. "
            f"Map a column to it, such as columns: {{{missing[0]}: answer}}, or add it."
        )
