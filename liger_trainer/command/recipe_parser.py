"""TRL's parser, set up for the keys of one trainer: the options of the command line and the texts of `--help`."""

import argparse
import dataclasses
import json
import os
import textwrap
import typing
from typing import Any, NamedTuple, NoReturn

from liger_trainer.command.options import take_options
from liger_trainer.command.recipe_keys import RecipeArguments
from liger_trainer.command.recipe_values import list_of
from liger_trainer.command.trainer_table import TrainerEntry
from liger_trainer.command.unknown_keys import about_unknown_option
from liger_trainer.errors import RecipeError

TRAIN_USAGE = "liger-trainer train RECIPE [--dry_run] [--preview [N]] [--key value ...]"


class Key(NamedTuple):
    """The type hint and the default of a key, and the topic of `--help` that it belongs to."""

    hint: Any
    default: Any
    topic: str


def parser_of(entry: TrainerEntry, usage: str = TRAIN_USAGE) -> tuple[Any, dict[str, Key]]:
    """TRL's parser for the three dataclasses of a trainer, and all of its keys.

    Args:
        entry (`TrainerEntry`): The trainer.
        usage (`str`): The first line of `--help`, which names the command and its own options.
    """
    from trl import ModelConfig, TrlParser

    import liger_trainer

    if entry.experimental:  # naming the trainer is a choice: no warning that TRL may change it
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    dataclass_types = (RecipeArguments, getattr(liger_trainer, entry.config), ModelConfig)
    parser = TrlParser(
        dataclass_types,
        usage=usage,
        allow_abbrev=False,  # an abbreviation is a misspelling that happens to work
    )
    keys: dict[str, Key] = {}
    for cls in dataclass_types:
        hints = typing.get_type_hints(cls)
        for field in (field for field in dataclasses.fields(cls) if field.init):
            default = None if field.default is dataclasses.MISSING else field.default
            owners = (base for base in reversed(cls.__mro__) if field.name in getattr(base, "__annotations__", ()))
            topic = {RecipeArguments: "recipe", ModelConfig: "model"}.get(cls) or _topic(next(owners).__module__)
            keys[field.name] = Key(hints[field.name], default, topic)
    return parser, keys


def _topic(module: str) -> str:
    return {"transformers": "training", "liger_trainer": "ours"}.get(module.partition(".")[0], "trainer")


_TOPICS = {
    "recipe": "rows, rewards, and what this command does",
    "model": "the model, its adapter and its quantisation",
    "ours": "kernels, memory, fp8, Medusa",
    "trainer": "the trainer's loss and data",
    "training": "steps, optimizer, precision, evaluation, saving, logging",
}


def _help(parser: Any, keys: dict[str, Key], word: str) -> str:
    """The text of `--help`: all names by topic or, with a word, the keys of that topic or with it in their names.

    Raises:
        RecipeError: No key has the word in its name.
    """
    if word:
        name = word.lstrip("-").replace("-", "_")
        found = {key for key, of in keys.items() if name in (key, "all", of.topic)}
        wanted = found or {key for key in keys if name in key}
        if not wanted:
            raise RecipeError(f"--help has {word!r}, which is no topic ({', '.join(_TOPICS)}, all) and in no key.")
        for action in parser._actions:
            if action.dest not in wanted:
                action.help = argparse.SUPPRESS
        return parser.format_help()
    lines = [f"usage: {parser.usage}", "", "Any key of a recipe is an option too, and beats the file. Keys by topic:"]
    for topic, about in _TOPICS.items():
        names = ", ".join(key for key, of in keys.items() if of.topic == topic)
        lines += ["", f"{topic}: {about}", textwrap.fill(names, 118, initial_indent="  ", subsequent_indent="  ")]
    lines += [
        "",
        "What keys mean, their defaults and this recipe's values: --help KEY, --help TOPIC, --help all, or --help WORD",
        "for all keys with that word in their names, such as lora or eval.",
    ]
    return "\n".join(lines) + "\n"


def show_in_help(parser, values: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Let `--help` say of each key of the recipe that its value comes from there, and what its default is.

    Of the other keys, the help says only the default, as it does without a recipe.
    """
    parser.set_defaults_with_config(**values)
    for action in parser._actions:
        if action.dest in values:
            default = "unset" if defaults[action.dest] is None else _shown(defaults[action.dest])
            said = f"(this recipe: {_shown(values[action.dest])}; default: {default})".replace("%", "%%")
            # argparse adds its own "(default: ...)" unless the text refers to the default; ".0" prints none of it.
            action.help = f"{action.help or ''} {said}%(default).0s".lstrip()


def _shown(value: Any) -> str:
    value = getattr(value, "value", value)  # of an enum
    return str(value).lower() if isinstance(value, bool) else str(value)


def options_given(parser, owners: dict[str, Key], words: list[str], entry: TrainerEntry) -> dict[str, Any]:
    """The keys that the command line sets, including those that it sets to their defaults.

    Every key starts with a mark that no option can have as its value. Without it, a value that was given could not be
    told from a default, and a key with a `--no_` twin has two defaults.

    Raises:
        RecipeError: A word is no option, or its value has the wrong form.
        SystemExit: 0, after `--help`.
    """

    def refuse(message: str) -> NoReturn:
        raise RecipeError(f"{message.rstrip('.')}. `liger-trainer train RECIPE --help` says what each option takes.")

    parser.error = refuse  # argparse would print the usage and exit
    asked, words = take_options(["--help" if word == "-h" else word for word in words], "help")
    if "help" in asked:
        print(_help(parser, owners, asked["help"]), end="")
        raise SystemExit(0)
    namespace, rest = parser.parse_known_args(list(words), argparse.Namespace(**dict.fromkeys(owners, _NOT_GIVEN)))
    if rest:
        raise RecipeError(about_unknown_option(rest[0], owners, entry))
    given = {key: value for key, value in vars(namespace).items() if key in owners and value is not _NOT_GIVEN}
    for key, value in given.items():
        # argparse makes 20.0 of the 20 in `--save_steps 20`, but messages and --dry_run show it as a file has it.
        if isinstance(value, float) and value.is_integer():
            given[key] = int(value)
        elif isinstance(value, list):
            hint, named = owners[key].hint, list_of(value)
            takes_text = typing.get_origin(hint) is not list and str in typing.get_args(hint)
            given[key] = named[0] if takes_text and len(named) == 1 else named  # as a file would have it
        elif isinstance(value, str) and value.startswith("{") and key != "columns":  # which is read as YAML
            _check_json(key, value)
    return given


def _check_json(key: str, value: str) -> None:
    try:
        json.loads(value)
    except json.JSONDecodeError as error:
        raise RecipeError(f"--{key} is {value!r}, which is not valid JSON: {error}.") from error


_NOT_GIVEN = object()
