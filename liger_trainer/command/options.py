"""Options that are taken out of a command line before the rest of it goes to TRL's parser."""

import argparse
from collections.abc import Sequence
from typing import Any

from liger_trainer.errors import RecipeError


def take_options(words: Sequence[str], *names: str) -> tuple[dict[str, str], list[str]]:
    """The given values of the options `names`, "" for one without a value, and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, nargs="?", const="", default=argparse.SUPPRESS)
    given, rest = parser.parse_known_args(list(words))
    return vars(given), rest


def positive(option: str, text: str, kind: type) -> Any:
    """The value of an option as an int or a float above 0. RecipeError if it is none."""
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise RecipeError(f"{option} is {text!r}; expected {'a whole' if kind is int else 'a'} number above 0.")
    return value
