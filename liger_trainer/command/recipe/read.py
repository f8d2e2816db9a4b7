"""Reads a recipe: a flat YAML file of the fields of `RecipeArguments`, the trainer's config and `trl.ModelConfig`.

TRL's parser does the parsing. Mistakes that it accepts are errors here, before anything runs: unknown and repeated
keys, and values of the wrong YAML type.
"""

import contextlib
import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_trainer.command.options import take_options
from liger_trainer.command.recipe.accelerate_file import apply_config, find_config
from liger_trainer.command.recipe.checks import resolve_keys
from liger_trainer.command.recipe.key_names import names_by_topic
from liger_trainer.command.recipe.keys import RecipeArguments
from liger_trainer.command.recipe.parser import (
    SWITCHES_AND_TEXTS,
    asks_for_topics,
    build_parser,
    check_type,
    command_line_values,
    dump_yaml,
    load_yaml,
    refuse_unknown_keys,
    topics_text,
)
from liger_trainer.command.recipe.shipped_files import find_shipped, recipe_names
from liger_trainer.command.recipe.trainers import TRAINERS, TrainerEntry
from liger_trainer.errors import RecipeError, without_tokens
from liger_trainer.paths import find_beside

TRAIN_USAGE = "liger-trainer train RECIPE [--dry_run] [--preview [N]] [--key value ...]"


@dataclass
class Recipe:
    """A parsed recipe. `explicit` holds the keys that the file and the command line set, `argv` the command line.

    `sharding` is the `distributed_type` that the recipe asks for itself. `began` becomes true when training begins.
    """

    path: Path
    entry: TrainerEntry
    args: RecipeArguments
    training: Any
    model: Any
    explicit: dict[str, Any]
    argv: tuple[str, ...] = ()
    sharding: str | None = None
    began: bool = False

    def to_yaml(self) -> str:
        """Return the recipe as it runs. Data next to the recipe gets its full path, so it can be saved anywhere."""
        values = self._values()
        for key in ("dataset_name", "eval_dataset_name"):
            named = values.get(key)
            if named is not None:
                paths = [self._full_path(name) for name in ([named] if isinstance(named, str) else named)]
                values[key] = paths[0] if isinstance(named, str) else paths
        config = values.get("accelerate_config")
        if config is not None and self._full_path(config) != config:
            values["accelerate_config"] = str(find_config(self.path, config).absolute())
        hidden = "" if values.pop("hub_token", None) is None else "# hub_token is set (not shown)\n"
        return without_tokens(dump_yaml(values)) + hidden

    def to_card(self) -> str:
        """Return the command and the set keys as Markdown. Absolute paths lose their folders: cards are public."""
        argv = take_options(self.argv, "hub_token")[1]
        keys = dump_yaml({key: value for key, value in self._values().items() if key != "hub_token"})
        text = f"```bash\nliger-trainer train {shlex.join(argv)}\n```\n\n```yaml\n{keys}```\n"
        return without_tokens(re.sub(r"(?<![\w.:/~-])/(?:[^\s'\"/]+/)+", "", text))

    def _values(self) -> dict[str, Any]:
        """Return the keys that were set, with true and false as YAML has them."""
        texts = {"true": True, "false": False}
        return {
            key: texts.get(value, value) if key in SWITCHES_AND_TEXTS else value for key, value in self.explicit.items()
        }

    def _full_path(self, name: str) -> str:
        path = find_beside(name, self.path.parent)
        return name if path is None else str(path.absolute())


def find_recipe(name: str) -> Path:
    """Return the file that `name` means: a path, or a shipped recipe with or without `.yaml`."""
    path = Path(name).expanduser()
    return path if path.is_file() else find_shipped(name, "RECIPE", recipe_names())[1]


def parse_recipe(name: str, overrides: Sequence[str] = (), usage: str = TRAIN_USAGE) -> Recipe:
    """Read the recipe `name` (a path or a shipped name), with `overrides` such as `["--max_steps", "5"]` on top.

    RecipeError for keys and values that do not fit; SystemExit after `--help`, which begins with `usage`.
    """
    return read_recipe(name, overrides, usage)[1]()


def read_recipe(
    name: str, overrides: Sequence[str] = (), usage: str = TRAIN_USAGE
) -> tuple[dict[str, Any], Callable[[], Recipe]]:
    """Run the first half of `parse_recipe`: return the keys that are set, and a function that builds the recipe.

    The function builds the trainer's config, and that initializes the process group of a launch. So the caller can look
    at the keys first.
    """
    path, argv = find_recipe(name), list(overrides)
    values = load_yaml(path)
    trainer = take_options(argv, "trainer")[0].get("trainer", values.get("trainer", "sft"))
    if not isinstance(trainer, str) or trainer not in TRAINERS:
        raise RecipeError(f"{path}: trainer is {trainer!r}; expected one of: {', '.join(TRAINERS)}.")
    entry = TRAINERS[trainer]
    names = names_by_topic(entry) if asks_for_topics(argv) else None
    if names is not None:
        print(topics_text(usage, names), end="")
        raise SystemExit(0)
    parser, keys = build_parser(entry, usage)
    refuse_unknown_keys(path, values, keys, entry)
    values = {key: check_type(path, key, value, keys[key].hint) for key, value in values.items()}
    for key, value in values.items():
        if isinstance(value, str) and keys[key].choices and value not in keys[key].choices:
            raise RecipeError(f"{path}: {key} is {value!r}; expected one of: {', '.join(keys[key].choices)}.")
    overriding = command_line_values(parser, keys, argv, entry)

    def parsed() -> Recipe:
        with _one_line_errors(path, overriding, explicit):
            args, training, model = parser.parse_dict(explicit)
        if isinstance(model.lora_target_modules, str) and model.lora_target_modules.isidentifier():
            # TRL turns a list of one name into a string. peft would take it for a pattern that full names must match,
            # and no layer has the full name q_proj.
            model.lora_target_modules = [model.lora_target_modules]
        return Recipe(path, entry, args, training, model, explicit, (str(name), *argv), sharding)

    with _one_line_errors(path, overriding):
        _resolve_aliases(values, overriding)
        explicit = resolve_keys(values, overriding, {key: key_info.default for key, key_info in keys.items()}, entry)
        sharding = _resolve_sharding(path, explicit)
    return explicit, parsed


@contextlib.contextmanager
def _one_line_errors(path: Path, overriding: dict[str, Any], explicit: Any = ()) -> Iterator[None]:
    """Context manager: turn a library's error into one line that names the recipe and the options it is about."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        text = " ".join(str(error).split())
        wrong = re.match(r"(\S+) is not a valid ", text)
        if wrong:  # transformers names the class of choices and not the key
            text = "".join(f"{key}: " for key in explicit if str(explicit[key]) == wrong[1]) + text
        options = "".join(f" --{key}" for key in overriding if re.search(rf"\b{key}\b", text))
        hint = " Without a GPU that computes in bf16, pass --bf16 false." if "bf16" in text else ""
        raise RecipeError(f"{path}{options and ' with' + options}: {text}{hint}") from error


def _resolve_aliases(file_values: dict[str, Any], overriding: dict[str, Any]) -> None:
    """Let the command line override the file under either name of an option. RecipeError if both names are set.

    transformers has two names for each of these options, and silently uses the second if both are set.
    """
    for suffix in ("", "_kwargs"):
        names = [f"gradient_checkpointing{suffix}", f"activation_checkpointing{suffix}"]
        for name in names if overriding.keys() & set(names) else ():
            file_values.pop(name, None)
        if set(names) <= (file_values | overriding).keys():
            raise RecipeError(f"{' and '.join(names)} are two names of one option. Keep one of them.")


def _resolve_sharding(path: Path, explicit: dict[str, Any]) -> str | None:
    """Apply `accelerate_config`. Return how the recipe asks to shard the model ("FSDP", "DEEPSPEED"), or None."""
    keys = [key for key in ("accelerate_config", "fsdp", "deepspeed") if explicit.get(key)]
    if len(keys) > 1:
        raise RecipeError(f"{' and '.join(keys)} each say how the model is sharded over processes. Keep one of them.")
    if keys == ["accelerate_config"]:
        return apply_config(path, explicit["accelerate_config"])
    if keys == ["deepspeed"] and importlib.util.find_spec("deepspeed") is None:
        raise RecipeError(
            f"deepspeed is {explicit['deepspeed']!r}, and the package is missing: `pip install deepspeed`."
        )
    return {"fsdp": "FSDP", "deepspeed": "DEEPSPEED"}.get(keys[0]) if keys else None
