"""The values of a recipe: YAML is read and written in such a way that both mean the same, and types are checked."""

import re
import typing
from pathlib import Path
from typing import Any

import yaml

from liger_trainer.errors import RecipeError

SWITCHES_AND_TEXTS = ("resume_from_checkpoint", "activation_checkpointing")
"""Keys that are strings for the parser, which may be true and false as well."""


class _Loader(yaml.SafeLoader):
    """Reads YAML in which a repeated key is an error and `2e-5` is a number, as in YAML 1.2 (in 1.1 it is a string)."""

    def construct_mapping(self, node, deep=False):
        seen: list[Any] = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise RecipeError(f"line {key_node.start_mark.line + 1}: the key {key!r} is there twice; keep one.")
            seen.append(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back: a string such as '2e-5' gets its quotes."""

    def ignore_aliases(self, data):
        return True  # a list that two keys share would otherwise be written as an anchor, which would puzzle a reader


for _side in (_Loader, _Dumper):
    _side.yaml_implicit_resolvers = {k: list(v) for k, v in _side.yaml_implicit_resolvers.items()}
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def load_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a recipe's file. RecipeError if it is no YAML, or no mapping, or repeats a key."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a SafeLoader
    except RecipeError as error:
        raise RecipeError(f"{path}, {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise RecipeError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise RecipeError(f"{path} is no mapping of names to values; expected one `key: value` a line.")
    return values


def dump_yaml(values: dict[str, Any]) -> str:
    """`values` as the text of a recipe, in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))


def checked(path: Path, key: str, value: Any, hint: Any) -> Any:
    """`value` as the parser wants it. RecipeError if `hint` does not allow the type that it has in YAML."""
    from huggingface_hub.dataclasses import type_validator

    if value is False and key in ("save_strategy", "eval_strategy", "logging_strategy"):
        return "no"  # which YAML reads as false
    if key in SWITCHES_AND_TEXTS and isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and list[str] in (hint, *typing.get_args(hint)):
        value = [value]  # as on the command line: lora_target_modules: all-linear
    try:
        type_validator(key, value, hint)
    except TypeError as error:
        try:
            type_validator(key, _as_floats(value), hint)
        except TypeError:
            raise RecipeError(f"{path}: {key} is {value!r}. {str(error).partition(' Errors: ')[0]}") from error
    return value


def _as_floats(value: Any) -> Any:
    """Whole numbers as floats, because 1 may stand for 1.0."""
    if isinstance(value, list):
        return [_as_floats(part) for part in value]
    return float(value) if type(value) is int else value
