"""Rejects keys that would be silently ignored or reinterpreted.

The keys alone decide, before anything is loaded; only `check_columns_exist` looks at the columns of the rows. Values
that a library rejects itself are left to that library.
"""

import difflib
import fnmatch
import importlib.util
import json
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from liger_trainer.command.recipe.trainers import TRAINERS, TrainerEntry
from liger_trainer.errors import RecipeError

Value = Callable[[str], Any]  # returns the value of a key, or its default


def _is_any_set(*values: Any) -> bool:
    return any(value and value != "no" for value in values)


_EVAL_ROWS = ("eval_dataset_name", "dataset_eval_split", "eval_fraction")


class _Switch(NamedTuple):
    """Keys that have no effect unless other keys turn them on."""

    keys: str  # names and patterns, separated by spaces
    switches: str  # the other keys
    needs: str  # what turns the keys on, as the error says it
    is_on: Callable[..., Any] = _is_any_set  # takes the values of the other keys


_SWITCHES = (
    _Switch(
        "lora_* use_rslora use_dora load_in_4bit load_in_8bit",
        "use_peft",
        "use_peft: true (without it, all weights are trained)",
    ),
    _Switch("bnb_4bit_* use_bnb_nested_quant", "load_in_4bit", "load_in_4bit: true"),
    _Switch("save_steps", "save_strategy", "save_strategy: steps", lambda strategy: strategy == "steps"),
    _Switch("save_total_limit save_only_model", "save_strategy", "save_strategy: steps or epoch"),
    _Switch(
        "eval_steps load_best_model_at_end eval_on_start do_eval", "eval_strategy", "eval_strategy: steps or epoch"
    ),
    _Switch(" ".join(_EVAL_ROWS), "eval_strategy", "eval_strategy: steps or epoch"),
    _Switch("dataset_stopping_strategy", "dataset_weights", "dataset_weights (each data set is used to its end)"),
    _Switch("early_stopping_patience", "load_best_model_at_end", "load_best_model_at_end: true"),
    _Switch(
        "memory_budget host_memory_budget",
        "activation_checkpointing",
        "activation_checkpointing: auto",
        lambda value: value == "auto",
    ),
    _Switch("liger_config", "use_liger", "use_liger: true"),
    _Switch(
        "fp8_recipe",
        "fp8 use_peft",
        "fp8: true and use_peft: false (the base of an adapter is not torchao's)",
        lambda fp8, peft: fp8 and not peft,
    ),
)

# Keys that PEFT restricts for adapters on experts, and the values that it accepts
NOT_ON_EXPERTS = {"lora_dropout": "0.0", "use_dora": "false"}


class _Range(NamedTuple):
    """Numbers that no library checks before training begins."""

    keys: str  # separated by spaces
    expected: str
    least: float
    largest: float = math.inf


_RANGES = (
    _Range(
        "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps save_total_limit "
        "max_length max_completion_length lora_r lora_alpha",
        "of 1 or more",
        least=1,
    ),
    _Range(
        "weight_decay max_grad_norm warmup_steps dataloader_num_workers neftune_noise_alpha beta desirable_weight "
        "undesirable_weight cpo_alpha",
        "of 0 or more",
        least=0,
    ),
    _Range("learning_rate num_train_epochs logging_steps eval_steps save_steps temperature", "above 0", least=1e-12),
    _Range("label_smoothing_factor lora_dropout", "from 0 to 1", least=0, largest=1),
)

# transformers reads no `optim_args` for these optimizers
_WITHOUT_OPTIM_ARGS = ("adamw_torch", "adamw_torch_fused", "adafactor")


def resolve_keys(
    file_values: dict[str, Any], overriding: dict[str, Any], defaults: dict[str, Any], entry: TrainerEntry
) -> dict[str, Any]:
    """Return the keys of the file, overridden by the command line. RecipeError if they conflict.

    Turning an option off on the command line, such as `--use_peft false`, drops the file's keys that depend on it.
    """
    explicit = file_values | overriding

    def value(key: str) -> Any:
        setting = explicit.get(key, defaults.get(key))
        return getattr(setting, "value", setting)  # an enum's value

    _check_ranges(value)
    for key in explicit:
        _check_value(key, value(key))
    _check_optimizer_and_steps(value)
    _drop_keys_without_effect(explicit, overriding, value)
    _choose_steps_or_epochs(explicit, overriding, value)
    _check_evaluation(value)
    if (value("packing") or value("eval_packing")) and value("packing_strategy") == "wrapped":
        raise RecipeError("packing_strategy is 'wrapped', which lets rows see each other. Set packing_strategy: bfd.")
    _check_what_the_command_does(explicit, value)
    if value("train_on"):
        _turn_on_assistant_only_loss(explicit, defaults, value("train_on"), entry)
    _check_trainer(defaults, value, entry)
    return explicit


def _check_ranges(value: Value) -> None:
    for numbers in _RANGES:
        for key in numbers.keys.split():
            number = value(key)
            if isinstance(number, (int, float)) and not numbers.least <= number <= numbers.largest:  # also true of NaN
                raise RecipeError(f"{key} is {number}; expected a number {numbers.expected}.")


def _check_optimizer_and_steps(value: Value) -> None:
    if value("optim_args") and value("optim") in _WITHOUT_OPTIM_ARGS:
        raise RecipeError(
            f"optim_args is {value('optim_args')!r}, which has no effect with optim: {value('optim')}. Use keys such "
            "as weight_decay, adam_beta1 and adam_epsilon, or another optim."
        )
    if value("max_steps") != -1 and value("max_steps") < 1:
        raise RecipeError(f"max_steps is {value('max_steps')}; expected 1 or more, or -1 to train num_train_epochs.")


def _drop_keys_without_effect(explicit: dict[str, Any], overriding: dict[str, Any], value: Value) -> None:
    """Remove keys that the command line has turned off. RecipeError for keys that the recipe itself has turned off."""
    turned_off = set(overriding)  # by the command line; keys that depend on them are added below
    for keys, switches, needs, is_on in _SWITCHES:
        names = switches.split()
        if is_on(*map(value, names)):
            continue
        for key in _matching(explicit, keys):
            if value(key) is None or value(key) is False:
                continue
            if key in overriding or turned_off.isdisjoint(names):
                raise RecipeError(f"{key} is {value(key)!r}, which has no effect without {needs}.")
            del explicit[key]
            turned_off.add(key)


def _choose_steps_or_epochs(explicit: dict[str, Any], overriding: dict[str, Any], value: Value) -> None:
    """Remove `num_train_epochs` if the command line sets `max_steps`. RecipeError if the recipe has both."""
    if "num_train_epochs" not in explicit or value("max_steps") <= 0:
        return
    if "max_steps" not in overriding or "num_train_epochs" in overriding:
        epochs = value("num_train_epochs")
        raise RecipeError(f"num_train_epochs is {epochs}, and max_steps {value('max_steps')}. Remove one of them.")
    del explicit["num_train_epochs"]


def _check_evaluation(value: Value) -> None:
    if value("eval_strategy") != "no" and not _is_any_set(*map(value, _EVAL_ROWS)):
        raise RecipeError(
            f"eval_strategy is {value('eval_strategy')!r}, and the recipe has no rows to evaluate on. Set one of "
            f"{', '.join(_EVAL_ROWS)}."
        )
    if value("save_strategy") == "best" and value("eval_strategy") == "no":
        raise RecipeError("save_strategy is 'best', which saves nothing without eval_strategy: steps or epoch.")


def _check_what_the_command_does(explicit: dict[str, Any], value: Value) -> None:
    """RecipeError for keys that ask for what the command does anyway, or never does."""
    for key, only in (("do_train", True), ("do_predict", False)):
        if key in explicit and value(key) is not only:
            raise RecipeError(f"{key} is {value(key)}, which has no effect: the command trains. Remove it.")
    if value("enable_jit_checkpoint"):
        raise RecipeError("enable_jit_checkpoint is true. Remove it: at SIGTERM a run saves all its processes anyway.")
    if value("use_liger_kernel"):
        raise RecipeError(
            "use_liger_kernel is true, which would have the package liger-kernel patch the model too. Remove it; "
            "use_liger: true is the key for the kernels here."
        )


def _turn_on_assistant_only_loss(
    explicit: dict[str, Any], defaults: dict[str, Any], roles: list[str], entry: TrainerEntry
) -> None:
    """Set `assistant_only_loss`, which makes TRL learn the tokens that the chat template marks for `roles`."""
    if "assistant_only_loss" not in defaults:
        raise RecipeError(f"train_on is {roles}, which {entry.trainer} does not read. Remove it.")
    if explicit.get("assistant_only_loss") is False:
        raise RecipeError(f"train_on is {roles}, but assistant_only_loss is false. Remove one of them.")
    explicit["assistant_only_loss"] = True


def _check_trainer(defaults: dict[str, Any], value: Value, entry: TrainerEntry) -> None:
    """RecipeError for keys that the trainer or its adapter cannot work with, or works without."""
    for key, allowed in NOT_ON_EXPERTS.items():
        if value("lora_target_parameters") and value(key):
            raise RecipeError(
                f"{key} is {value(key)}, which PEFT refuses with lora_target_parameters. Set {key}: {allowed}."
            )
    if value("beta") == 0 and entry.trainer in ("LigerDPOTrainer", "LigerKTOTrainer"):
        raise RecipeError("beta is 0, so no preference would be learned. Set a number above 0.")
    if bool(value("reward_funcs")) != entry.rewards:
        with_rewards = ", ".join(name for name, other in TRAINERS.items() if other.rewards)
        raise RecipeError(f"reward_funcs is {value('reward_funcs')!r}; expected a list for {with_rewards} alone.")
    if "teacher_model_name_or_path" in defaults and not value("teacher_model_name_or_path"):
        raise RecipeError(f"{entry.trainer} needs teacher_model_name_or_path.")


def _matching(keys: Iterable[str], patterns: str) -> list[str]:
    """Return the keys that match one of the patterns in a text such as "lora_* use_dora"."""
    found = []
    for key in keys:
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns.split()):
            found.append(key)
    return found


def _check_value(key: str, value: Any) -> None:
    """RecipeError for a value that some library would take for something else, or fail on far from here."""
    if isinstance(value, float) and not math.isfinite(value) and key != "max_grad_norm":  # there, it means no clipping
        raise RecipeError(f"{key} is {value}; expected a finite number.")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise RecipeError(f"{key} is {value}, which does not fit into 64 bits. For no limit, leave it out or set null.")
    if key.endswith("_kwargs") and isinstance(value, str) and not value.lstrip().startswith("{"):
        name, _, setting = value.replace(":", "=").partition("=")
        example = {name.strip() or "name": _typed(setting.strip() or "value")}
        raise RecipeError(
            f"{key} is {value!r}; expected a mapping, such as '{json.dumps(example)}', in a recipe without the outer "
            "quotes."
        )
    if key == "sample_prompts" and isinstance(value, list) and any(not str(text).strip() for text in value):
        raise RecipeError(f"sample_prompts is {value}, and one of them is empty. Write a prompt, or remove it.")


def _typed(text: str) -> Any:
    """Return the number, true, false or null that `text` is in JSON; otherwise the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


# For each tracker of `report_to`, the packages that provide it; one is enough.
_TRACKERS = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "trackio": ("trackio",),
    "swanlab": ("swanlab",),
}


class ReadRecipe(Protocol):
    """The attributes of a recipe that the last checks read. `read.py` makes recipes, and imports this module."""

    training: Any  # the trainer's arguments, of the class that the recipe names
    model: Any  # TRL's `ModelConfig`
    explicit: dict[str, Any]


def check_packages(recipe: ReadRecipe) -> None:
    """RecipeError if a key needs a package that is not installed, or if `report_to` names no tracker.

    Only training calls this: recipes can be read, and their memory estimated, without these packages.
    """
    training, model = recipe.training, recipe.model
    optimizer = str(getattr(training.optim, "value", training.optim))
    by_bitsandbytes = any(word in optimizer for word in ("8bit", "bnb", "paged", "ademamix"))
    needed: list[tuple[str, Any, tuple[str, ...]]] = [
        ("load_in_8bit", model.load_in_8bit, ("bitsandbytes",)),
        ("optim", optimizer if by_bitsandbytes and "torch" not in optimizer else None, ("bitsandbytes",)),
    ]
    trackers = [training.report_to] if isinstance(training.report_to, str) else training.report_to or []
    _check_trackers(trackers)
    needed += [("report_to", name, _TRACKERS[name]) for name in trackers if name in _TRACKERS]
    for key, value, packages in needed:
        if value and not any(importlib.util.find_spec(package) for package in packages):
            raise RecipeError(
                f"{key} is {value!r}, and the package {packages[0]} is missing. Run `pip install {packages[0]}`, or "
                f"leave {key} out."
            )


def _check_trackers(names: list[str | None]) -> None:
    """RecipeError for a tracker that transformers does not know. `Trainer` would refuse it after loading the model."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in names:
        if name in INTEGRATION_TO_CALLBACK:
            continue
        written = "null" if name is None else repr(name)
        guess = difflib.get_close_matches(str(name), INTEGRATION_TO_CALLBACK, n=1)
        hint = f" Did you mean {guess[0]}?" if guess else ""
        raise RecipeError(
            f"report_to is {written}; expected none, all, or some of: {', '.join(INTEGRATION_TO_CALLBACK)}.{hint}"
        )


def check_columns_exist(recipe: ReadRecipe, columns: list[str]) -> None:
    """RecipeError if a key refers to columns that the rows do not have.

    Without completions, TRL would ignore completion_only_loss and learn every token.
    """
    field = recipe.explicit.get("dataset_text_field")
    if field is not None and field not in columns:
        raise RecipeError(
            f"dataset_text_field is {field!r}, and the trainer reads other columns: {', '.join(columns)}. Remove it."
        )
    if getattr(recipe.training, "completion_only_loss", None) and not {"completion", "completion_mask"} & set(columns):
        raise RecipeError(
            f"completion_only_loss is true, but the rows have {', '.join(columns)} and no completion. Remove it. To "
            "learn the last answer of messages, set prompt_template: last_turn; for all answers, assistant_only_loss: "
            "true."
        )
