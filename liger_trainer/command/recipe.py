"""A recipe: a flat YAML file of the fields of `RecipeArguments`, of the trainer's config and of `trl.ModelConfig`.

It is parsed with TRL's parser. What that parser lets through is refused here, before anything runs: unknown and
repeated keys, keys under the wrong heading, and values of the wrong YAML type.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_trainer.command.accelerate_file import apply_config, find_config
from liger_trainer.command.options import take_options
from liger_trainer.command.recipe_checks import check_scheduler, settle
from liger_trainer.command.recipe_keys import RecipeArguments
from liger_trainer.command.recipe_parser import TRAIN_USAGE, options_given, parser_of, show_in_help
from liger_trainer.command.recipe_values import checked, dump_yaml, load_yaml
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
        for key in ("dataset_name", "eval_dataset_name"):
            if (named := values.get(key)) is not None:
                paths = [self._full_path(name) for name in ([named] if isinstance(named, str) else named)]
                values[key] = paths[0] if isinstance(named, str) else paths
        if (config := values.get("accelerate_config")) is not None and self._full_path(config) != config:
            values["accelerate_config"] = str(find_config(self.path, config).absolute())
        hidden = "" if values.pop("hub_token", None) is None else "# hub_token is set, and not shown\n"
        return without_tokens(dump_yaml(values)) + hidden

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
    refuse_unknown_keys(path, values, {key: owner.name for key, owner in owners.items()}, entry)
    values = {key: checked(path, key, value, owners[key].hints[key]) for key, value in values.items()}
    defaults = {key: owner.defaults[key] for key, owner in owners.items()}
    show_in_help(parser, values, defaults)
    given = options_given(parser, owners, words, entry)
    _check_two_names(path, values, given)
    chosen = settle(path, values, given, defaults)
    sharding = _settle_sharding(path, chosen)
    return chosen, lambda: _parsed(path, entry, parser, chosen, (str(name), *words), sharding)


def _parsed(
    path: Path, entry: TrainerEntry, parser: Any, chosen: dict[str, Any], words: tuple[str, ...], sharding: str | None
) -> Recipe:
    try:
        args, training, model = parser.parse_dict(chosen)
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise RecipeError(f"{path}: {error}{_bf16_hint(error)}") from error
    _check_needs(path, entry, args, training)
    if {"lr_scheduler_type", "lr_scheduler_kwargs"} & set(chosen):
        check_scheduler(path, training)
    if isinstance(model.lora_target_modules, str) and model.lora_target_modules.isidentifier():
        # TRL turns a list of one name into a string, which peft takes for a pattern that full names must match. No
        # layer has the full name q_proj.
        model.lora_target_modules = [model.lora_target_modules]
    return Recipe(path, entry, args, training, model, chosen, words, sharding)


def _trainer_entry(path: Path, values: dict[str, Any], words: list[str]) -> TrainerEntry:
    """The recipe's trainer. It is looked up before the parser is made, because it decides which keys there are."""
    name = take_options(words, "trainer")[0].get("trainer", values.get("trainer", "sft"))
    if not isinstance(name, str) or name not in TRAINERS:
        raise RecipeError(f"{path}: trainer is {name!r}; expected one of: {', '.join(TRAINERS)}.")
    return TRAINERS[name]


# Transformers has two names for each of these options, and takes the second where both are set.
_TWO_NAMES = (
    ("gradient_checkpointing", "activation_checkpointing"),
    ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
)


def _check_two_names(path: Path, filed: dict[str, Any], given: dict[str, Any]) -> None:
    """Let the command line beat the file under either name of an option. RecipeError if two names disagree."""
    for names in _TWO_NAMES:
        if any(name in given for name in names):
            for name in names:
                filed.pop(name, None)
        values = [(filed | given).get(name) for name in names]
        values = [str(value).lower() if isinstance(value, bool) else value for value in values]
        if None not in values and values[0] != values[1]:
            raise RecipeError(
                f"{path}: {names[0]} is {values[0]} and {names[1]} is {values[1]}, but these are two names of one "
                "option. Keep one of them."
            )


def _settle_sharding(path: Path, chosen: dict[str, Any]) -> str | None:
    """Apply `accelerate_config`, and return how the recipe wants the model to be shared out, if it says so itself."""
    keys = [key for key in ("accelerate_config", "fsdp", "deepspeed") if chosen.get(key)]
    if len(keys) > 1:
        raise RecipeError(
            f"{path}: {' and '.join(f'{key} is {chosen[key]!r}' for key in keys)}, but each says how the model is "
            "shared out over the processes. Keep one of them."
        )
    if keys == ["accelerate_config"]:
        return apply_config(path, chosen["accelerate_config"])
    return {"fsdp": "FSDP", "deepspeed": "DEEPSPEED"}.get(keys[0]) if keys else None


def _check_needs(path: Path, entry: TrainerEntry, args: RecipeArguments, training: Any) -> None:
    """RecipeError if a trainer lacks what it cannot do without, or if a key would be ignored or do harm."""
    if entry.rewards and not args.reward_funcs:
        raise RecipeError(
            f"{path}: {entry.trainer} needs reward_funcs; set a list, such as [boxed_answer] or [my_module.my_reward]."
        )
    if args.reward_funcs and not entry.rewards:
        with_rewards = [name for name, other in TRAINERS.items() if other.rewards]
        raise RecipeError(
            f"{path}: reward_funcs is {args.reward_funcs!r}, which {entry.trainer} does not compute. Remove it, or set "
            f"trainer to one of: {', '.join(with_rewards)}."
        )
    if args.early_stopping_patience is not None and not training.load_best_model_at_end:
        # With load_best_model_at_end, transformers itself checks that the two strategies are set and agree.
        raise RecipeError(
            f"{path}: early_stopping_patience is {args.early_stopping_patience}, which needs load_best_model_at_end: "
            "true, and eval_strategy and save_strategy: steps or epoch, both the same. Add them, or remove "
            "early_stopping_patience."
        )
    if getattr(training, "enable_jit_checkpoint", False):
        raise RecipeError(
            f"{path}: enable_jit_checkpoint is true, with which each process that gets SIGTERM would save by itself, "
            "and end as if all steps were done. Remove it: a run saves a checkpoint of all its processes anyway."
        )
    if getattr(training, "teacher_model_name_or_path", "") is None:
        raise RecipeError(
            f"{path}: {entry.trainer} needs teacher_model_name_or_path; set it to a folder, or to a model on the Hub."
        )


def _bf16_hint(error: Exception) -> str:
    if "bf16" not in str(error):
        return ""
    return " Without a GPU that computes in bf16, set `bf16: false` in the recipe or pass --bf16 false."
