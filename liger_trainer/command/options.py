"""Commands that take a recipe, and the options of their own, which the rest of the line does not know."""

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
    options.required = False  # otherwise argparse would ask for them too where RECIPE is missing
    parser.set_defaults(run=run)


def take_options(argv: Sequence[str], *names: str) -> tuple[dict[str, str], list[str]]:
    """The given values of the options `names`, "" for one without a value, and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, nargs="?", const="", default=argparse.SUPPRESS)
    given, rest = parser.parse_known_args(list(argv))
    return vars(given), rest


def parse_positive(option: str, text: str, kind: type) -> Any:
    """Return the value of an option as an int or a float. RecipeError unless it is a number above 0."""
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise RecipeError(f"{option} is {text!r}; expected {'a whole' if kind is int else 'a'} number above 0.")
    return value
