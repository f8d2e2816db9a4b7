"""Parses the keys and values of a recipe: typed YAML, TRL's parser for the command line, `--help`, unknown keys."""

import argparse
import dataclasses
import difflib
import json
import os
import re
import textwrap
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from liger_trainer.command.options import take_options
from liger_trainer.command.processes import importing
from liger_trainer.command.recipe.key_names import TOPICS, topic_of
from liger_trainer.command.recipe.keys import RecipeArguments
from liger_trainer.command.recipe.trainers import TRAINERS, TrainerEntry
from liger_trainer.errors import RecipeError

# Names that other tools, and earlier releases of transformers and TRL, have for a key. Listed only where the most
# similar name is the wrong one.
_OTHER_NAMES = {
    "batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "lr": "learning_rate",
    "lora_rank": "lora_r",
    "model": "model_name_or_path",
    "base_model": "model_name_or_path",
    "dataset": "dataset_name",
    "sequence_len": "max_length",
    "cutoff_len": "max_length",
    "grad_accum": "gradient_accumulation_steps",
    "per_device_batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "accumulation_steps": "gradient_accumulation_steps",
    "epoch": "num_train_epochs",
    "block_size": "max_length",
    "data": "dataset_name",
    "datasets": "dataset_name",
    "data_path": "dataset_name",
    "train_file": "dataset_name",
    "template": "chat_template_path",
    "val_set_size": "eval_fraction",
    "validation_split": "eval_fraction",
    "test_size": "eval_fraction",
    "train_on_responses_only": "train_on",
    "mask_prompt": "train_on",
    "sample_packing": "packing",
    "rl": "trainer",
    "adapter": "use_peft",
    "finetuning_type": "use_peft",
    "r": "lora_r",
    "qlora": "load_in_4bit",
    "quantization": "load_in_4bit",
    "torch_dtype": "dtype",
    "precision": "dtype",
    "flash_attn": "attn_implementation",
    "patience": "early_stopping_patience",
    "resume": "resume_from_checkpoint",
    "save_dir": "output_dir",
    "wandb": "report_to",
}
# Keys that another key has replaced, with another form of value.
_MOVED = {
    "warmup_ratio": "Set warmup_steps, which takes a share too: warmup_steps: 0.1 is a tenth of the steps.",
}
_NOT_GIVEN = object()
SWITCHES_AND_TEXTS = ("resume_from_checkpoint", "activation_checkpointing", "cuda_graphs")
"""Keys that are strings for the parser, and may also be true or false in YAML."""


class Key(NamedTuple):
    """The type hint and default of a key, its topic in `--help`, and its allowed values.

    TRL's parser checks the allowed values on the command line only, so files are checked here.
    """

    hint: Any
    default: Any
    topic: str
    choices: tuple[str, ...] = ()


def build_parser(entry: TrainerEntry, usage: str) -> tuple[Any, dict[str, Key]]:
    """Return TRL's parser for the three dataclasses of a trainer, and all keys. `--help` begins with `usage`."""
    if entry.experimental:  # naming the trainer is a choice: no warning that TRL may change it
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    with importing():
        from trl import ModelConfig, TrlParser

        import liger_trainer

        dataclass_types = (RecipeArguments, getattr(liger_trainer, entry.config), ModelConfig)
    # No abbreviations: they are misspellings that happen to work.
    parser = TrlParser(dataclass_types, usage=usage, allow_abbrev=False)
    keys: dict[str, Key] = {}
    for cls in dataclass_types:
        hints = typing.get_type_hints(cls)
        for field in (field for field in dataclasses.fields(cls) if field.init):
            default = None if field.default is dataclasses.MISSING else field.default
            owners = (base for base in reversed(cls.__mro__) if field.name in getattr(base, "__annotations__", ()))
            topic = {RecipeArguments: "recipe", ModelConfig: "model"}.get(cls) or topic_of(next(owners).__module__)
            keys[field.name] = Key(hints[field.name], default, topic, tuple(field.metadata.get("choices", ())))
    # transformers' parser takes a single value for keys that are a string or a list, such as report_to.
    for action in parser._actions:
        if action.nargs is None and action.dest in keys and list[str] in typing.get_args(keys[action.dest].hint):
            action.nargs = "+"
    return parser, keys


def _help(parser: Any, keys: dict[str, Key], word: str) -> str:
    """Return the text of `--help`: all names by topic or, for `word`, the keys of that topic or with it in the name."""
    name = word.strip("-").replace("-", "_")
    if name == "all":
        return parser.format_help()
    if name:
        wanted = {key for key, key_info in keys.items() if name in (key, key_info.topic)} or {
            key for key in keys if name in key
        }
        if not wanted:
            raise RecipeError(
                f"--help has {word!r}; expected a topic ({', '.join(TOPICS)}, all), a key, or a part of a key."
            )
        for action in parser._actions:
            if action.dest not in wanted:
                action.help = argparse.SUPPRESS
        return parser.format_help()
    names: dict[str, list[str]] = {topic: [] for topic in TOPICS}
    for key, key_info in keys.items():
        names[key_info.topic].append(key)
    return topics_text(parser.usage, names)


def topics_text(usage: str, names: dict[str, list[str]]) -> str:
    """Return the text of `--help` without a word: the names of the keys by topic."""
    lines = [f"usage: {usage}", "", "Any key of a recipe is an option too, and beats the file. Keys by topic:"]
    for topic, about in TOPICS.items():
        listed = textwrap.fill(", ".join(names[topic]), 118, initial_indent="  ", subsequent_indent="  ")
        lines += ["", f"{topic}: {about}", listed]
    lines += [
        "",
        "What keys mean, and their defaults: --help KEY, --help TOPIC, --help all, or --help WORD for all keys with",
        "that word in their names, such as lora or eval.",
    ]
    return "\n".join(lines) + "\n"


def asks_for_topics(argv: Iterable[str]) -> bool:
    """Return whether the command line has `--help` without a key or a topic."""
    return take_options(["--help" if word == "-h" else word for word in argv], "help")[0].get("help") == ""


def command_line_values(parser, keys: dict[str, Key], argv: list[str], entry: TrainerEntry) -> dict[str, Any]:
    """Return the keys that the command line sets, even to their defaults.

    All keys start as `_NOT_GIVEN`, so a value from the command line can be told from a default.
    """

    def refuse(message: str) -> NoReturn:
        negative = [word for word in argv if re.fullmatch(r"-\d\S*", word)]
        if "expected one argument" in message and negative:  # argparse takes -1e-3 for an option
            raise RecipeError(f"{message.rstrip('.')}. A negative number needs an equals sign: --key={negative[0]}.")
        raise RecipeError(f"{message.rstrip('.')}. `liger-trainer train RECIPE --help` says what each option takes.")

    parser.error = refuse  # argparse would print the usage and exit
    asked, argv = take_options(["--help" if word == "-h" else word for word in argv], "help")
    if "help" in asked:
        print(_help(parser, keys, asked["help"]), end="")
        raise SystemExit(0)
    namespace, rest = parser.parse_known_args(list(argv), argparse.Namespace(**dict.fromkeys(keys, _NOT_GIVEN)))
    if rest:
        name = rest[0].partition("=")[0]
        if not name.startswith("--"):
            message = f"{rest[0]!r} on the command line belongs to no option"
            opened = [word for word in argv[: argv.index(rest[0])] if word[-1:] == ":" and ("{" in word or "[" in word)]
            if opened:  # the shell has split a mapping at its spaces
                raise RecipeError(f"{message}. Put quotes around the value that begins with {opened[-1]!r}.")
            raise RecipeError(f"{message}; write --key value after RECIPE.")
        raise RecipeError(f"{name} {_why_unknown(name[2:].replace('-', '_'), keys, entry)}")
    values = {key: value for key, value in vars(namespace).items() if key in keys and value is not _NOT_GIVEN}
    for key, value in values.items():
        hint = keys[key].hint
        if isinstance(value, list) and len(value) == 1:
            if typing.get_origin(hint) is not list and str in typing.get_args(hint):
                values[key] = value[0]  # as a file would have it
        elif isinstance(value, str) and value.startswith("{") and key != "columns":  # which is read as YAML
            try:
                json.loads(value)
            except json.JSONDecodeError as error:
                raise RecipeError(f"--{key} is {value!r}, which is not valid JSON: {error}.") from error
    return values


def refuse_unknown_keys(path: Path, values: dict[str, Any], keys: Iterable[str], entry: TrainerEntry) -> None:
    """RecipeError for the first of the recipe's keys that is not in `keys`: unknown, or of another trainer."""
    for key, value in values.items():
        if key not in keys:
            raise RecipeError(f"{path}: {key!r} (with value {value!r}) {_why_unknown(key, keys, entry)}")


def _why_unknown(key: str, keys: Iterable[str], entry: TrainerEntry) -> str:
    """Return the rest of the error about a key that `entry` lacks: the trainers with that key, or a similar name."""
    import liger_trainer

    if key in _MOVED:
        return f"is not a key of a recipe. {_MOVED[key]}"
    having = []
    for name, other in TRAINERS.items():
        fields = dataclasses.fields(getattr(liger_trainer, other.config))
        if any(field.name == key for field in fields):
            having.append(name)
    if having:
        return f"is a key of the trainers {', '.join(having)}, but {entry.trainer} does not have it. Remove it."
    return "is not a key of a recipe." + (nearest(key, keys) or " `liger-trainer train RECIPE --help` lists all keys.")


def nearest(key: str, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the name in `known` that is most like `key`; "" if none is similar."""
    known = list(known)
    other = _OTHER_NAMES.get(key)
    match = [other] if other in known else difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f" Did you mean {match[0]}?" if match else ""


class _Loader(yaml.SafeLoader):
    """Refuses repeated keys, and reads `2e-5` as a number, as YAML 1.2 does (for YAML 1.1 it is a string)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise RecipeError(f"line {key_node.start_mark.line + 1}: the key {key!r} is there twice; keep one.")
            seen.append(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes YAML that `_Loader` reads back: a string such as '2e-5' gets quotes."""


for _side in (_Loader, _Dumper):
    _side.yaml_implicit_resolvers = {k: list(v) for k, v in _side.yaml_implicit_resolvers.items()}
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def load_yaml(path: Path) -> dict[str, Any]:
    """Return the keys and values of a recipe file. RecipeError for invalid YAML, repeated keys, or anything else."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a SafeLoader
    except RecipeError as error:
        raise RecipeError(f"{path}, {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        if mark is not None and "'\\t'" in str(error):
            raise RecipeError(
                f"{path}, line {mark.line + 1}: YAML is indented with spaces; replace the tab by spaces."
            ) from error
        raise RecipeError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise RecipeError(f"{path} does not map names to values; expected one `key: value` a line.")
    return values


def dump_yaml(values: dict[str, Any]) -> str:
    """Return `values` as YAML, in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))


def check_type(path: Path, key: str, value: Any, hint: Any) -> Any:
    """Return `value` in the form that the parser takes. RecipeError if `hint` does not allow its YAML type."""
    from huggingface_hub.dataclasses import type_validator

    if value is False and key in ("save_strategy", "eval_strategy", "logging_strategy"):
        return "no"  # YAML reads an unquoted no as false
    if key in SWITCHES_AND_TEXTS and isinstance(value, bool):
        return str(value).lower()
    kinds = (hint,) if typing.get_origin(hint) is list else typing.get_args(hint)
    if isinstance(value, str) and list[str] in kinds and str not in kinds:
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
    """Return whole numbers as floats, because 1 may stand for 1.0."""
    if isinstance(value, list):
        return [_as_floats(part) for part in value]
    return float(value) if type(value) is int else value
