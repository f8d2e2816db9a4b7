"""Misspelt keys are told at once, before the ten seconds that the imports of TRL and transformers take.

The names of all fields are read from the source files of the config classes, as text. A name that stands in none of
them is no key of any recipe. What stands in one may still not be a key of this recipe: the parser, which knows the
classes, says that later.
"""

import importlib.util
import re
from pathlib import Path

from liger_trainer.errors import RecipeError

_SOURCES = {
    "liger_trainer": ("trainers/*.py", "medusa/config.py", "command/recipe.py"),
    "trl": ("trainer/*_config.py", "experimental/*/*_config.py", "scripts/utils.py"),
    "transformers": ("training_args.py",),
}
_FIELD = re.compile(r"^    (\w+)\s*:", re.MULTILINE)
_WORDS = {"help", "h"}  # options that are no fields


def known_names() -> set[str]:
    """Whatever is written like a field in the classes that keys come from; empty where a source is not to be read."""
    names = set()
    for package, patterns in _SOURCES.items():
        spec = importlib.util.find_spec(package)  # finds a package without importing it
        files = [path for folder in spec.submodule_search_locations for p in patterns for path in Path(folder).glob(p)]
        if not files:
            return set()
        for path in files:
            names.update(_FIELD.findall(path.read_text(encoding="utf-8")))
    return names


def refuse_unknown(path: Path, values: dict, overrides: list[str], nearest) -> None:
    """RecipeError for the first key of the file or option of the command line that no config class can have.

    Args:
        path (`Path`): The recipe's file, for the message.
        values (`dict`): What it holds.
        overrides (`list[str]`): Words of the command line after RECIPE.
        nearest: `nearest(key, known, form)` of the parser: the hint at a similar name.
    """
    known = known_names()
    if not known:
        return
    for key, value in values.items():
        if key not in known and not isinstance(value, dict):  # a dict may be a section, which the parser explains
            near = nearest(key, known) or " `liger-trainer train RECIPE --help` lists all keys."
            raise RecipeError(f"{path}: {key!r} (with value {value!r}) is not a key of a recipe.{near}")
    for word in overrides:
        key = word[2:].partition("=")[0].replace("-", "_")
        if not word.startswith("--") or not key or {key, key.removeprefix("no_")} & (known | _WORDS):
            continue
        near = nearest(key, known, "Did you mean --{}?") or " `liger-trainer train RECIPE --help` lists all options."
        raise RecipeError(f"--{key} is not an option.{near}")
