"""Wraps reward functions, so that an error or a wrong result names the function as the recipe does."""

import functools
import inspect
import traceback
from collections.abc import Callable
from typing import Any

from liger_trainer.errors import RewardError, short


def checked_reward(name: str, reward: Callable) -> Callable:
    """Wrap `reward` so that its exceptions and its wrong return values name it as the recipe does.

    The wrapper raises RewardError if the function raises, or returns anything but one number (or None) a completion.
    """

    def check(rewards: Any, completions: Any) -> Any:
        count = len(completions)
        expected = f"return a list of {count} numbers, one for each completion (None for a row it does not score)."
        try:
            values = list(rewards)
        except TypeError:
            raise RewardError(f"reward_funcs has {name!r}, which returned {short(rewards)}; {expected}") from None
        if len(values) != count:
            raise RewardError(f"reward_funcs has {name!r}, which returned {len(values)} values; {expected}")
        for value in values:
            if value is not None and not _is_number(value):
                raise RewardError(f"reward_funcs has {name!r}, which returned {short(value)} among them; {expected}")
        return values

    def fault_of(error: Exception) -> RewardError:
        frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the wrapper's
        code = getattr(reward, "__code__", None)
        own_frames = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
        where = f" in line {own_frames[-1].lineno} of {own_frames[-1].filename}" if own_frames else ""
        reason = " ".join(str(error).split())
        return RewardError(f"reward_funcs has {name!r}, which raised {type(error).__name__}{where}: {reason}")

    if inspect.iscoroutinefunction(reward):  # TRL awaits such a function, so the wrapper has to be one too

        async def call_async(prompts: Any, completions: Any, **columns: Any) -> Any:
            try:
                rewards = await reward(prompts=prompts, completions=completions, **columns)
            except Exception as error:
                raise fault_of(error) from error
            return check(rewards, completions)

        return _named_like(reward, call_async)

    def call(prompts: Any, completions: Any, **columns: Any) -> Any:
        try:
            rewards = reward(prompts=prompts, completions=completions, **columns)
        except Exception as error:
            raise fault_of(error) from error
        return check(rewards, completions)

    return _named_like(reward, call)


def _named_like(reward: Callable, wrapper: Callable) -> Callable:
    """Return `wrapper` with the name of `reward`, which TRL logs. A callable object without a name gets its class's."""
    functools.update_wrapper(wrapper, reward)
    if not hasattr(reward, "__name__"):
        wrapper.__name__ = type(reward).__name__
    return wrapper


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
