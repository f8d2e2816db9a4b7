"""Reads the names of all recipe keys, by topic, from source files: importing the configs takes ten seconds.

A config is a dataclass: its fields are the annotated names of its class and of its base classes. If a class cannot be
read this way, `--help` imports the configs instead.
"""

import ast
import importlib.util
from pathlib import Path
from typing import NamedTuple

from liger_trainer.command.recipe.trainers import TrainerEntry

TOPICS = {
    "recipe": "rows, rewards, and what this command does",
    "model": "the model, its adapter and its quantisation",
    "ours": "kernels, memory, fp8, speculative heads",
    "trainer": "the trainer's loss and data",
    "training": "steps, optimizer, precision, evaluation, saving, logging",
}
# Where a package keeps its configs
_FILES = {
    "liger_trainer": ("*.py",),
    "trl": ("*config*.py",),
    "transformers": ("training_args.py",),
}


class _Source(NamedTuple):
    """A class in the sources of `package`."""

    package: str
    bases: tuple[str, ...]
    fields: tuple[str, ...]  # without those that `__init__` does not take
    annotated: tuple[str, ...]


def topic_of(module: str) -> str:
    """Return the topic of keys that a class of `module` introduces."""
    return {"transformers": "training", "liger_trainer": "ours"}.get(module.partition(".")[0], "trainer")


def names_by_topic(entry: TrainerEntry) -> dict[str, list[str]] | None:
    """Return the names of the keys of `entry` by topic, in the order of the fields.

    None if a class is not in the sources, for example because a release has moved it.
    """
    listed: dict[str, list[str]] = {topic: [] for topic in TOPICS}
    for name, topic in (("RecipeArguments", "recipe"), (entry.config, None), ("ModelConfig", "model")):
        order = _resolution_order(name)
        if order is None:
            return None
        owners: dict[str, str] = {}
        fields: list[str] = []
        for source in reversed(order):  # from the class that all others extend
            for field in source.annotated:
                owners.setdefault(field, source.package)
            fields += [field for field in source.fields if field not in fields]
        for field in fields:
            listed[topic or topic_of(owners[field])].append(field)
    return listed


def _resolution_order(name: str) -> list[_Source] | None:
    """Return a class and its base classes, subclasses first; None if one is not found."""
    source = _find(name)
    if source is None:
        return None
    order = [source]
    for base in source.bases:
        others = _resolution_order(base)
        if others is None:
            return None
        order = [one for one in order if one not in others] + others
    return order


def _find(name: str) -> _Source | None:
    for package, patterns in _FILES.items():
        folder = _folder_of(package)
        if folder is None:
            continue
        for pattern in patterns:
            files = folder.rglob(pattern) if "*" in pattern else folder.glob(pattern)
            for path in files:
                text = path.read_text(encoding="utf-8")
                named = f"class {name}(" in text or f"class {name}:" in text
                source = _read(ast.parse(text), name, package) if named else None
                if source is not None:
                    return source
    return None


def _folder_of(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)  # does not import a top-level package
    locations = None if spec is None else spec.submodule_search_locations
    return Path(locations[0]) if locations else None


def _read(tree: ast.Module, name: str, package: str) -> _Source | None:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            annotated = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            named = [each for each in annotated if isinstance(each.target, ast.Name)]
            named = [each for each in named if "ClassVar" not in ast.unparse(each.annotation)]
            return _Source(
                package,
                tuple(ast.unparse(base) for base in node.bases if ast.unparse(base) not in _WITHOUT_FIELDS),
                tuple(ast.unparse(each.target) for each in named if _is_taken(each.value)),
                tuple(ast.unparse(each.target) for each in named),
            )
    return None


_WITHOUT_FIELDS = ("object", "StockArguments")  # the second is a name for type checkers


def _is_taken(value: ast.expr | None) -> bool:
    """Return whether `__init__` takes a field with this default."""
    options = value.keywords if isinstance(value, ast.Call) else []
    return not any(option.arg == "init" and ast.unparse(option.value) == "False" for option in options)
