"""The values of a recipe: YAML is read and written in such a way that both mean the same, and types are checked."""

import enum
import re
import types
import typing
from pathlib import Path
from typing import Any, Literal

import yaml

from liger_trainer.errors import RecipeError

SWITCHES_AND_TEXTS = ("resume_from_checkpoint", "activation_checkpointing")
"""Keys that are strings for the parser, which may be true and false as well."""


class _Loader(yaml.SafeLoader):
    """Reads YAML in which a repeated key is an error and `2e-5` is a number, as in YAML 1.2 (in 1.1 it is a string)."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = f"line {key_node.start_mark.line + 1}"
            if isinstance(key, (list, dict, set)):
                raise RecipeError(f"{line}: the key is {key!r}; expected a name.")
            if key in seen:
                raise RecipeError(f"{line}: the key {key!r} is there twice; keep one.")
            seen.add(key)
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
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise RecipeError(f"{path}{line} is not valid YAML: {error.problem}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise RecipeError(f"{path} nests its values too deeply; expected one `key: value` a line.") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        found = "is empty" if values is None else "is no mapping of names to values"
        raise RecipeError(f"{path} {found}; expected one `key: value` a line.")
    return values


def list_of(words: list[str]) -> list[Any]:
    """The words after an option that takes a list, which may also be one list as YAML writes it."""
    text = " ".join(map(str, words))
    if not (text.startswith("[") and text.endswith("]")):
        return words
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError:
        return words


def dump_yaml(values: dict[str, Any]) -> str:
    """`values` as the text of a recipe, in their order."""
    plain = {key: _plain(value) for key, value in values.items()}
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))


def _plain(value: Any) -> Any:
    """A value as YAML has it: of an enum, the value of its member."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_plain(member) for member in value]
    return value


_TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string", dict: "a mapping"}
_YAML_NAMES = _TYPE_NAMES | {bool: "a boolean", list: "a list"}


def _options(hint: Any) -> tuple:
    """The members of a union; for any other hint, the hint alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value read from YAML has the type `hint`, which is no union."""
    origin = typing.get_origin(hint) or hint
    if origin is Literal:
        return value in typing.get_args(hint) and type(value) in {type(option) for option in typing.get_args(hint)}
    if origin is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is list:
        members = typing.get_args(hint)
        return isinstance(value, list) and (
            not members or all(any(_fits(v, o) for o in _options(members[0])) for v in value)
        )
    if origin is Any:
        return True
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return value in {member.value for member in origin}
    return isinstance(value, origin)


def _expected(hint: Any) -> str:
    """The type `hint` in words, for a message."""
    origin = typing.get_origin(hint) or hint
    if origin is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    if origin is list:
        members = typing.get_args(hint)
        return f"a list of {_expected(members[0]).removeprefix('a ')}s" if members else "a list"
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return "one of " + ", ".join(repr(member.value) for member in origin)
    return _TYPE_NAMES.get(origin, getattr(origin, "__name__", str(origin)))


def checked(path: Path, key: str, value: Any, hint: Any) -> Any:
    """`value` as the parser wants it. RecipeError if `hint` does not allow the type that it has in YAML."""
    options = _options(hint)
    enums = [o for o in options if isinstance(o, type) and issubclass(o, enum.Enum)]
    if value is False and any("no" in {member.value for member in o} for o in enums):
        return "no"  # `save_strategy: no` is the boolean false in YAML
    if key in SWITCHES_AND_TEXTS and isinstance(value, bool):
        return str(value).lower()
    # If enum and str are both allowed, only its members are allowed: any other string fails later, far from the recipe.
    allowed = [o for o in options if o is not str] if enums else options
    if any(_fits(value, o) for o in allowed):
        return value
    expected = " or ".join(_expected(o) for o in allowed if o is not type(None))
    got = "empty" if value is None else f"{value!r}, {_YAML_NAMES.get(type(value), 'a ' + type(value).__name__)}"
    raise RecipeError(f"{path}: {key} is {got}; expected {expected}.")
