"""What a recipe asks for and would not get, or would get in another way than was asked, without a sign.

All of it is found out from the keys alone, before anything is loaded; only `check_rows` looks at the columns of the
rows. What the libraries refuse themselves in a line that names the value is left to them.
"""

import fnmatch
import math
from collections.abc import Callable
from typing import Any

from liger_trainer.command.trainer_table import TRAINERS, TrainerEntry
from liger_trainer.errors import RecipeError

_NO_OPTIM_ARGS = (
    "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adafactor", "lomo", "adalomo",
)  # fmt: skip
_EVALUATES = "eval_strategy: steps or epoch"
_BEST = "metric_for_best_model greater_is_better"


def _on(value: Any) -> bool:
    return bool(value) and value != "no"


def _by_steps(value: Any) -> bool:
    return value == "steps"


# Keys, as patterns, that have an effect only together with other keys: those keys, what is needed in words, and a
# function of their values that says whether the first keys have an effect.
_SWITCHES: tuple[tuple[str, str, str, Callable[..., Any]], ...] = (
    ("lora_* use_rslora use_dora load_in_4bit load_in_8bit", "use_peft",
     "use_peft: true (without it, all weights are trained)", _on),
    ("bnb_4bit_* use_bnb_nested_quant", "load_in_4bit", "load_in_4bit: true", _on),
    ("dataset_stopping_strategy", "dataset_weights", "dataset_weights, such as [3, 1]", _on),
    ("save_steps", "save_strategy", "save_strategy: steps", _by_steps),
    ("save_total_limit save_only_model", "save_strategy", "save_strategy: steps or epoch", _on),
    ("eval_steps", "eval_strategy", "eval_strategy: steps", _by_steps),
    (f"eval_delay eval_on_start load_best_model_at_end {_BEST}", "eval_strategy", _EVALUATES, _on),
    ("eval_fraction dataset_eval_split eval_dataset_name", "eval_strategy medusa_eval_rows", _EVALUATES,
     lambda strategy, rows: _on(strategy) or _on(rows)),
    (_BEST, "load_best_model_at_end save_strategy lr_scheduler_type", "load_best_model_at_end: true",
     lambda best, save, scheduler: best or save == "best" or scheduler in ("reduce_lr_on_plateau", "greedy")),
    ("early_stopping_patience", "load_best_model_at_end", "load_best_model_at_end: true", _on),
    ("packing_strategy", "packing eval_packing", "packing: true", lambda *values: any(values)),
    ("gradient_checkpointing_kwargs activation_checkpointing_kwargs", "gradient_checkpointing activation_checkpointing",
     "activation_checkpointing: true", lambda old, new: old if new is None else new),
    ("memory_budget host_memory_budget", "activation_checkpointing", "activation_checkpointing: auto",
     lambda value: value == "auto"),
    ("fp8_recipe", "fp8 use_peft", "fp8: true and use_peft: false (the base of an adapter is not torchao's)",
     lambda fp8, peft: fp8 and not peft),
    ("lr_scheduler_kwargs", "lr_scheduler_type", "an lr_scheduler_type that has options, such as cosine",
     lambda scheduler: scheduler not in ("constant", "constant_with_warmup")),
    ("optim_args", "optim", "an optim that reads it, such as sgd", lambda optim: optim not in _NO_OPTIM_ARGS),
    ("fsdp_config", "fsdp", "fsdp", _on),
    ("ref_model_mixup_alpha ref_model_sync_steps", "sync_ref_model", "sync_ref_model: true", _on),
)  # fmt: skip

# Numbers that no library checks, or that it checks only when training begins: their least and their largest value.
_RANGES = {
    (1, math.inf): "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps "
    "save_total_limit max_length max_completion_length lora_alpha",
    (0, math.inf): "weight_decay max_grad_norm dataloader_num_workers",
    (1e-12, math.inf): "num_train_epochs logging_steps eval_steps save_steps",
    (0, 1): "label_smoothing_factor",
    (1e-12, 10_000): "memory_budget",
    (0, 10_000): "host_memory_budget",
}


def settle(
    filed: dict[str, Any], given: dict[str, Any], defaults: dict[str, Any], entry: TrainerEntry
) -> dict[str, Any]:
    """The keys that are set: in the file, `filed`, and on the command line, `given`, which override the file.

    Turning an option off on the command line, as `--use_peft false` does, also drops the keys of the file that depend
    on it.

    Raises:
        RecipeError: A key has no effect, lacks another key, or its value is out of range.
    """
    chosen = filed | given

    def value(key: str) -> Any:
        found = chosen.get(key, defaults.get(key))
        return getattr(found, "value", found)  # of an enum

    for (least, largest), key in [(limits, key) for limits, keys in _RANGES.items() for key in keys.split()]:
        number = value(key)
        if isinstance(number, (int, float)) and not least <= number <= largest:  # also true of NaN
            limits = "above 0" if 0 < least < 1 else f"from {least}" if largest < math.inf else f"from {least} up"
            limits += f" to {largest}" if largest < math.inf else ""
            unit = " (GiB)" if "memory" in key else ""
            raise RecipeError(f"{key} is {number}; expected a number {limits}{unit}.")
    if value("max_steps") != -1 and value("max_steps") < 1:
        raise RecipeError(f"max_steps is {value('max_steps')}; expected 1 or more, or -1 to train num_train_epochs.")
    for patterns, switches, needs, on in _SWITCHES:
        if on(*(value(switch) for switch in switches.split())):
            continue
        for key in [key for key in chosen if any(fnmatch.fnmatchcase(key, each) for each in patterns.split())]:
            if value(key) is None or value(key) is False:
                continue
            if key in given or not any(switch in given for switch in switches.split()):
                raise RecipeError(
                    f"{key} is {value(key)!r}, which has no effect without {needs}. Set that, or remove {key}."
                )
            del chosen[key]
    if "num_train_epochs" in chosen and value("max_steps") > 0:
        if "max_steps" not in given or "num_train_epochs" in given:
            raise RecipeError(
                f"num_train_epochs is {value('num_train_epochs')} and max_steps is {value('max_steps')}, but max_steps "
                "alone would decide. Remove one of them, or set max_steps: -1."
            )
        del chosen["num_train_epochs"]
    if value("use_peft") and value("lora_task_type") != "CAUSAL_LM":
        raise RecipeError(
            f"lora_task_type is {value('lora_task_type')!r}; expected CAUSAL_LM, because every trainer here trains a "
            "causal language model. Remove lora_task_type."
        )
    rows = ("eval_dataset_name", "dataset_eval_split", "eval_fraction")
    if (_on(value("eval_strategy")) or (value("medusa_eval_rows") or 0) > 0) and not any(value(key) for key in rows):
        key = "eval_strategy" if _on(value("eval_strategy")) else "medusa_eval_rows"
        raise RecipeError(f"{key} is {value(key)!r}, but there are no rows to evaluate on. Set {' or '.join(rows)}.")
    if value("save_strategy") == "best" and value("eval_strategy") == "no":
        raise RecipeError(f"save_strategy is 'best', which saves nothing without evaluation. Set {_EVALUATES}.")
    if (value("packing") or value("eval_packing")) and value("packing_strategy") == "wrapped":
        raise RecipeError(
            "packing_strategy is 'wrapped', which joins rows and cuts them at any token, so that a row is learned with "
            "what is left of another one before it. Set packing_strategy: bfd, which keeps rows apart, or bfd_split, "
            "which keeps the rest of rows longer than max_length too."
        )
    if value("enable_jit_checkpoint"):
        raise RecipeError(
            "enable_jit_checkpoint is true, with which each process that gets SIGTERM would save by itself, and end as "
            "if all steps were done. Remove it: a run saves a checkpoint of all its processes anyway."
        )
    if bool(value("reward_funcs")) != entry.rewards:
        if entry.rewards:
            raise RecipeError(
                f"{entry.trainer} needs reward_funcs; set a list, such as [boxed_answer] or [my_module.my_reward]."
            )
        raise RecipeError(
            f"reward_funcs is {value('reward_funcs')!r}, which {entry.trainer} does not compute. Remove it, or set "
            f"trainer to one of: {', '.join(name for name, other in TRAINERS.items() if other.rewards)}."
        )
    if "teacher_model_name_or_path" in defaults and not value("teacher_model_name_or_path"):
        raise RecipeError(
            f"{entry.trainer} needs teacher_model_name_or_path; set it to a folder, or to a model on the Hub."
        )
    return chosen


def check_optimizer(training: Any) -> None:
    """Make the optimizer and the scheduler for one weight, so that what they refuse is told before a model is loaded.

    Raises:
        RecipeError: A value is out of range, an option is unknown, or a package is missing.
    """
    import torch
    from transformers import Trainer, get_scheduler

    needs_model = training.optim.startswith(("galore", "apollo", "lomo", "adalomo"))
    weight = torch.nn.Parameter(torch.zeros(1))
    try:
        make, options = Trainer.get_optimizer_cls_and_kwargs(training)
        optimizer = make([weight], **options)
    except (ImportError, ValueError, TypeError) as error:
        if not needs_model or isinstance(error, ImportError):
            raise RecipeError(f"the optimizer {training.optim.value!r} cannot be made: {error}") from error
        optimizer = torch.optim.SGD([weight], lr=training.learning_rate)
    name, options = training.lr_scheduler_type.value, training.lr_scheduler_kwargs
    try:
        get_scheduler(name, optimizer, 0, 10**9, dict(options or {}))
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"lr_scheduler_kwargs is {options!r}, which does not fit lr_scheduler_type {name!r}: {error}"
        ) from error


def check_rows(recipe: Any, columns: list[str]) -> None:
    """RecipeError if an option relies on columns that the rows do not have after the template has been applied."""
    if getattr(recipe.training, "completion_only_loss", None) and not {"completion", "completion_mask"} & set(columns):
        mend = "Remove completion_only_loss."
        if "messages" in columns:
            last = "prompt_template: last_turn to learn the last answer of each row, or "
            mend = (
                f"Set {last if recipe.args.prompt_template == 'none' else ''}assistant_only_loss: true to learn all "
                "answers."
            )
        raise RecipeError(
            f"{recipe.path}: completion_only_loss is true, but the rows have {', '.join(columns)} and no completion, "
            f"so the loss would count every token. {mend}"
        )
    name = recipe.chosen.get("dataset_text_field")
    others = [found for found in ("messages", "completion", "input_ids") if found in columns]
    if name is not None and others:
        raise RecipeError(
            f"{recipe.path}: dataset_text_field is {name!r}, but the trainer reads {others[0]}, which the rows have "
            f"too. Remove dataset_text_field, or remove {others[0]} from the rows."
        )
