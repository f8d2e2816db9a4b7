"""Misspelt keys are refused at once, before the ten seconds that importing TRL and transformers takes.

The names of all fields are read from the source files of the config classes, as text. A name that is in none of them
cannot be a key of any recipe. A name that is in one of them may still not be a key of this recipe; the parser, which
knows the classes, says so later.
"""

import importlib.util
import re
from pathlib import Path
from typing import Any

from liger_trainer.command.unknown_keys import nearest
from liger_trainer.errors import RecipeError

_SOURCES = {
    "liger_trainer": ("trainers/*.py", "medusa/config.py", "command/recipe_keys.py"),
    "trl": ("trainer/*_config.py", "experimental/*/*_config.py", "scripts/utils.py"),
    "transformers": ("training_args.py",),
}
_FIELD = re.compile(r"^    (\w+)\s*:", re.MULTILINE)
_WORDS = {"help", "h"}  # options that are no fields


def known_names() -> set[str]:
    """All names that are written like a field in the classes of keys; empty if a package's source cannot be read."""
    names: set[str] = set()
    for package, patterns in _SOURCES.items():
        spec = importlib.util.find_spec(package)  # finds a package without importing it
        folders = spec.submodule_search_locations if spec is not None else None
        files = [path for folder in folders or () for pattern in patterns for path in Path(folder).glob(pattern)]
        if not files:
            return set()
        for path in files:
            names.update(_FIELD.findall(path.read_text(encoding="utf-8")))
    return names


def refuse_unknown(path: Path, values: dict[str, Any], words: list[str]) -> None:
    """RecipeError for the first key of the file or option of the command line that no config class can have.

    Args:
        path (`Path`): The recipe's file, for the message.
        values (`dict`): What the file holds.
        words (`list[str]`): The words of the command line after RECIPE.
    """
    known = known_names()
    if not known:
        return
    for key, value in values.items():
        if key not in known and not isinstance(value, dict):  # a mapping may be a section, which the parser explains
            near = nearest(key, known) or " `liger-trainer train RECIPE --help` lists all keys."
            raise RecipeError(f"{path}: {key!r} (with value {value!r}) is not a key of a recipe.{near}")
    for word in words:
        key = word[2:].partition("=")[0].replace("-", "_")
        if not word.startswith("--") or not key or {key, key.removeprefix("no_")} & (known | _WORDS):
            continue
        near = nearest(key, known, "Did you mean --{}?") or " `liger-trainer train RECIPE --help` lists all options."
        raise RecipeError(f"--{key} is not an option.{near}")
