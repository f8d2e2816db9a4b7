"""Adds the commands that take a recipe, and parses the options that are not keys of a recipe."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from liger_trainer.errors import RecipeError


def add_recipe_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], usage: str, about: str, description: str
) -> None:
    """Add a command `name RECIPE --key value ...` to the subparsers of `liger-trainer`."""
    description += " Any key of a recipe can be given as an option, which beats the file."
    parser = commands.add_parser(name, help=about, usage=usage, description=description, allow_abbrev=False)
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or a name that `liger-trainer recipes` lists")
    options = parser.add_argument(
        "options", nargs=argparse.REMAINDER, metavar="--key value", help="options, after RECIPE"
    )
    options.required = False  # otherwise the error about a missing RECIPE would also ask for options
    parser.set_defaults(run=run)


def take_options(argv: Sequence[str], *names: str) -> tuple[dict[str, str], list[str]]:
    """Return the values of the options `names` that are in `argv` ("" for one without a value), and the rest."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, nargs="?", const="", default=argparse.SUPPRESS)
    given, rest = parser.parse_known_args(list(argv))
    return vars(given), rest


def parse_switch(option: str, text: str) -> bool:
    """Return whether an option is on: it has no value, or true. RecipeError for another value than true and false."""
    if text.lower() not in ("", "true", "false"):
        raise RecipeError(f"{option} is {text!r}; expected nothing after it, or true or false.")
    return text.lower() != "false"


def parse_positive(option: str, text: str, kind: type) -> Any:
    """Return `text` as a number of type `kind`. RecipeError unless it is above 0 and finite."""
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise RecipeError(f"{option} is {text!r}; expected {'a whole' if kind is int else 'a'} number above 0.")
    return value
