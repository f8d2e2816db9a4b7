"""A recipe: a flat YAML file of the fields of `RecipeArguments`, of the trainer's config and of `trl.ModelConfig`.

It is parsed with TRL's parser. What that parser lets through is refused here, before anything runs: unknown and
repeated keys, keys under the wrong heading, and values of the wrong YAML type.
"""

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_trainer.command.accelerate_file import apply_config, find_config
from liger_trainer.command.options import take_options
from liger_trainer.command.recipe_checks import check_optimizer, settle
from liger_trainer.command.recipe_keys import RecipeArguments
from liger_trainer.command.recipe_parser import TRAIN_USAGE, options_given, parser_of, show_in_help
from liger_trainer.command.recipe_values import SWITCHES_AND_TEXTS, checked, dump_yaml, load_yaml
from liger_trainer.command.trainer_table import TRAINERS, TrainerEntry
from liger_trainer.command.unknown_keys import nearest, refuse_unknown_keys
from liger_trainer.errors import RecipeError, without_tokens
from liger_trainer.paths import find_beside, shipped


@dataclass
class Recipe:
    """A parsed recipe. `chosen` holds what the file and the command line set, `words` the command line itself.

    `sharding` is the `distributed_type` that the recipe asks for itself. `began` becomes true when training begins.
    """

    path: Path
    entry: TrainerEntry
    args: RecipeArguments
    training: Any
    model: Any
    chosen: dict[str, Any]
    words: tuple[str, ...] = ()
    sharding: str | None = None
    began: bool = False

    def to_yaml(self) -> str:
        """The recipe as it runs. It can be saved anywhere, because data found next to the recipe gets its full path."""
        values = dict(self.chosen)
        for key in SWITCHES_AND_TEXTS:
            if (value := values.get(key)) in ("true", "false"):
                values[key] = value == "true"
        for key in ("dataset_name", "eval_dataset_name"):
            if (named := values.get(key)) is not None:
                paths = [self._full_path(name) for name in ([named] if isinstance(named, str) else named)]
                values[key] = paths[0] if isinstance(named, str) else paths
        if (config := values.get("accelerate_config")) is not None and self._full_path(config) != config:
            values["accelerate_config"] = str(find_config(self.path, config).absolute())
        hidden = "" if values.pop("hub_token", None) is None else "# hub_token is set, and not shown\n"
        return without_tokens(dump_yaml(values)) + hidden

    def to_card(self) -> str:
        """The command and the keys that were set, in Markdown. Absolute paths lose their folders: cards get public."""
        words = take_options(self.words, "hub_token")[1]
        keys = dump_yaml({key: value for key, value in self.chosen.items() if key != "hub_token"})
        text = f"```bash\nliger-trainer train {shlex.join(words)}\n```\n\n```yaml\n{keys}```\n"
        return without_tokens(re.sub(r"(?<![\w.:/~-])/(?:[^\s'\"/]+/)+", "", text))

    def _full_path(self, name: str) -> str:
        path = find_beside(name, self.path.parent)
        return name if path is None else str(path.absolute())


def recipe_names() -> dict[str, Path]:
    """The files of the shipped recipes by their names, such as `llama3_8b/sft_alpaca`."""
    root = shipped("recipes")
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def describe(path: Path) -> str:
    """The description of a recipe, which is its first line, a comment."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    if not first.startswith("# "):
        raise RecipeError(
            f"{path}: the first line is {first!r}; expected a comment that describes the recipe in one line."
        )
    return first[2:].strip()


def find_recipe(name: str) -> Path:
    """The file that `name` means: a path, or else a shipped recipe, with or without `.yaml`."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    names = recipe_names()
    if (key := name.removesuffix(".yaml")) in names:
        return names[key]
    raise RecipeError(
        f"RECIPE is {name!r}, which is neither a file nor the name of a shipped recipe.{nearest(key, names)} "
        f"Shipped: {', '.join(names)}."
    )


def parse_recipe(name: str, overrides: Sequence[str] = (), usage: str = TRAIN_USAGE) -> Recipe:
    """Read the recipe `name` (a path or a shipped name), with `overrides` such as `["--max_steps", "5"]` on top.

    The help of its keys begins with `usage`.

    Raises:
        RecipeError: A key is unknown, repeated or misplaced, a value has the wrong type, or values exclude each other.
        SystemExit: 0, after `--help`.
    """
    return read_recipe(name, overrides, usage)[1]()


def read_recipe(
    name: str, overrides: Sequence[str] = (), usage: str = TRAIN_USAGE
) -> tuple[dict[str, Any], Callable[[], Recipe]]:
    """`parse_recipe` in two steps: the keys that are set, and a function that makes the recipe of them.

    That function makes the trainer's config, which joins the processes of a launch.
    """
    path, words = find_recipe(name), list(overrides)
    values = load_yaml(path)
    entry = _trainer_entry(path, values, words)
    parser, owners = parser_of(entry, usage)
    refuse_unknown_keys(path, values, owners, entry)
    values = {key: checked(path, key, value, owners[key].hint) for key, value in values.items()}
    defaults = {key: owner.default for key, owner in owners.items()}
    show_in_help(parser, values, defaults)
    given = options_given(parser, owners, words, entry)

    def parsed() -> Recipe:
        with _placed(path, given):
            args, training, model = parser.parse_dict(chosen)
            check_optimizer(training)
        if isinstance(model.lora_target_modules, str) and model.lora_target_modules.isidentifier():
            # TRL turns a list of one name into a string, which peft takes for a pattern that full names must match. No
            # layer has the full name q_proj.
            model.lora_target_modules = [model.lora_target_modules]
        return Recipe(path, entry, args, training, model, chosen, (str(name), *words), sharding)

    with _placed(path, given):
        _check_two_names(values, given)
        chosen = settle(values, given, defaults, entry)
        sharding = _settle_sharding(path, chosen)
    return chosen, parsed


@contextlib.contextmanager
def _placed(path: Path, given: dict[str, Any]) -> Iterator[None]:
    """Turn an error into one line that begins with the recipe, and with the options of the command line it is about."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        text = " ".join(str(error).split())
        named = {key: rf"\b{key.replace('_', '[_ ]')}\b" for key in given}  # torch says "learning rate"
        options = "".join(f" --{key}" for key, pattern in named.items() if re.search(pattern, text))
        hint = (
            " Without a GPU that computes in bf16, set `bf16: false` in the recipe or pass --bf16 false."
            if "bf16" in text and not isinstance(error, RecipeError)
            else ""
        )
        raise RecipeError(f"{path}{options and ' with' + options}: {text}{hint}") from error


def _trainer_entry(path: Path, values: dict[str, Any], words: list[str]) -> TrainerEntry:
    """The recipe's trainer. It is looked up before the parser is made, because it decides which keys there are."""
    name = take_options(words, "trainer")[0].get("trainer", values.get("trainer", "sft"))
    if not isinstance(name, str) or name not in TRAINERS:
        raise RecipeError(f"{path}: trainer is {name!r}; expected one of: {', '.join(TRAINERS)}.")
    return TRAINERS[name]


def _check_two_names(filed: dict[str, Any], given: dict[str, Any]) -> None:
    """Let the command line beat the file under either name of an option. RecipeError if two names disagree.

    Transformers has two names for each of these options, and takes the second where both are set.
    """
    for suffix in ("", "_kwargs"):
        names = [f"gradient_checkpointing{suffix}", f"activation_checkpointing{suffix}"]
        if any(name in given for name in names):
            for name in names:
                filed.pop(name, None)
        values = [(filed | given).get(name) for name in names]
        values = [str(value).lower() if isinstance(value, bool) else value for value in values]
        if None not in values and values[0] != values[1]:
            raise RecipeError(
                f"{names[0]} is {values[0]} and {names[1]} is {values[1]}, but these are two names of one option. Keep "
                "one of them."
            )


def _settle_sharding(path: Path, chosen: dict[str, Any]) -> str | None:
    """Apply `accelerate_config`, and return how the recipe wants the model to be shared out, if it says so itself."""
    keys = [key for key in ("accelerate_config", "fsdp", "deepspeed") if chosen.get(key)]
    if len(keys) > 1:
        raise RecipeError(
            f"{' and '.join(f'{key} is {chosen[key]!r}' for key in keys)}, but each says how the model is shared out "
            "over the processes. Keep one of them."
        )
    if keys == ["accelerate_config"]:
        return apply_config(path, chosen["accelerate_config"])
    return {"fsdp": "FSDP", "deepspeed": "DEEPSPEED"}.get(keys[0]) if keys else None
