"""Rejects keys that would be silently ignored or reinterpreted.

The keys alone decide, before anything is loaded; only `check_columns_exist` looks at the columns of the rows. Values
that a library rejects itself are left to that library.
"""

import difflib
import fnmatch
import importlib.util
import json
import math
from collections.abc import Callable
from typing import Any

from liger_trainer.command.recipe.trainers import TRAINERS, TrainerEntry
from liger_trainer.errors import RecipeError


def _is_any_set(*values: Any) -> bool:
    return any(value and value != "no" for value in values)


_EVAL_ROWS = ("eval_dataset_name", "dataset_eval_split", "eval_fraction")

# Keys (as patterns) that only have an effect together with other keys: the other keys, the text for the error, and a
# function of the other keys' values that returns whether the first keys have an effect.
_SWITCHES: tuple[tuple[str, str, str, Callable[..., Any]], ...] = (
    ("lora_* use_rslora use_dora load_in_4bit load_in_8bit", "use_peft",
     "use_peft: true (without it, all weights are trained)", _is_any_set),
    ("bnb_4bit_* use_bnb_nested_quant", "load_in_4bit", "load_in_4bit: true", _is_any_set),
    ("save_steps", "save_strategy", "save_strategy: steps", lambda strategy: strategy == "steps"),
    ("save_total_limit save_only_model", "save_strategy", "save_strategy: steps or epoch", _is_any_set),
    ("eval_steps load_best_model_at_end eval_on_start do_eval", "eval_strategy", "eval_strategy: steps or epoch",
     _is_any_set),
    (" ".join(_EVAL_ROWS), "eval_strategy", "eval_strategy: steps or epoch", _is_any_set),
    ("dataset_stopping_strategy", "dataset_weights", "dataset_weights (each data set is used to its end)", _is_any_set),
    ("early_stopping_patience", "load_best_model_at_end", "load_best_model_at_end: true", _is_any_set),
    ("memory_budget host_memory_budget", "activation_checkpointing", "activation_checkpointing: auto",
     lambda value: value == "auto"),
    ("liger_config", "use_liger", "use_liger: true", _is_any_set),
    ("fp8_recipe", "fp8 use_peft", "fp8: true and use_peft: false (the base of an adapter is not torchao's)",
     lambda fp8, peft: fp8 and not peft),
)  # fmt: skip

# Keys that PEFT restricts for adapters on experts, and the values that it accepts
NOT_ON_EXPERTS = {"lora_dropout": "0.0", "use_dora": "false"}

# Numbers that no library checks before training begins: the text for the error, the lowest and the highest value, keys
_RANGES = (
    ("of 1 or more", 1, math.inf, "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps "
     "save_total_limit max_length max_completion_length lora_r lora_alpha"),
    ("of 0 or more", 0, math.inf, "weight_decay max_grad_norm warmup_steps dataloader_num_workers neftune_noise_alpha "
     "beta desirable_weight undesirable_weight cpo_alpha"),
    ("above 0", 1e-12, math.inf, "learning_rate num_train_epochs logging_steps eval_steps save_steps temperature"),
    ("from 0 to 1", 0, 1, "label_smoothing_factor lora_dropout"),
)  # fmt: skip

# Optimizers for which transformers reads no `optim_args`
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

    for expected, least, largest, keys in _RANGES:
        for key in keys.split():
            number = value(key)
            if isinstance(number, (int, float)) and not least <= number <= largest:  # also true of NaN
                raise RecipeError(f"{key} is {number}; expected a number {expected}.")
    for key in explicit:
        _check_value(key, value(key))
    if value("optim_args") and value("optim") in _WITHOUT_OPTIM_ARGS:
        raise RecipeError(
            f"optim_args is {value('optim_args')!r}, which has no effect with optim: {value('optim')}. Use keys such "
            "as weight_decay, adam_beta1 and adam_epsilon, or another optim."
        )
    if value("max_steps") != -1 and value("max_steps") < 1:
        raise RecipeError(f"max_steps is {value('max_steps')}; expected 1 or more, or -1 to train num_train_epochs.")
    turned_off = set(overriding)  # by the command line; keys that depend on them are added below
    for patterns, switches, needs, on in _SWITCHES:
        if on(*(value(switch) for switch in switches.split())):
            continue
        for key in [key for key in explicit if any(fnmatch.fnmatchcase(key, each) for each in patterns.split())]:
            if value(key) is None or value(key) is False:
                continue
            if key in overriding or not any(switch in turned_off for switch in switches.split()):
                raise RecipeError(f"{key} is {value(key)!r}, which has no effect without {needs}.")
            del explicit[key]
            turned_off.add(key)
    if "num_train_epochs" in explicit and value("max_steps") > 0:
        if "max_steps" not in overriding or "num_train_epochs" in overriding:
            epochs = value("num_train_epochs")
            raise RecipeError(f"num_train_epochs is {epochs}, and max_steps {value('max_steps')}. Remove one of them.")
        del explicit["num_train_epochs"]
    if value("eval_strategy") != "no" and not _is_any_set(*map(value, _EVAL_ROWS)):
        raise RecipeError(
            f"eval_strategy is {value('eval_strategy')!r}, and the recipe has no rows to evaluate on. Set one of "
            f"{', '.join(_EVAL_ROWS)}."
        )
    if value("save_strategy") == "best" and value("eval_strategy") == "no":
        raise RecipeError("save_strategy is 'best', which saves nothing without eval_strategy: steps or epoch.")
    if (value("packing") or value("eval_packing")) and value("packing_strategy") == "wrapped":
        raise RecipeError("packing_strategy is 'wrapped', which lets rows see each other. Set packing_strategy: bfd.")
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
    if value("train_on"):
        if "assistant_only_loss" not in defaults:
            raise RecipeError(f"train_on is {value('train_on')}, which {entry.trainer} does not read. Remove it.")
        if explicit.get("assistant_only_loss") is False:
            raise RecipeError(f"train_on is {value('train_on')}, but assistant_only_loss is false. Remove one of them.")
        explicit["assistant_only_loss"] = True  # makes TRL learn the tokens that the chat template marks
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
    return explicit


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


def check_packages(recipe: Any) -> None:
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


def check_columns_exist(recipe: Any, columns: list[str]) -> None:
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
