"""What a recipe asks for and would not get: options without effect, values out of range, packages that are missing.

With each of them, the run would train differently from what was asked without a sign, or would fail after minutes of
loading. All of it is found out from the recipe alone, before anything is loaded; only `check_rows` looks at the columns
of the rows.
"""

import fnmatch
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from liger_trainer.errors import RecipeError


class _Switch(NamedTuple):
    """Keys, as patterns, that have an effect only together with other keys, the `switches`.

    `on` gets the value of each switch, and says whether the keys have an effect. `needs` is its condition in words.
    """

    keys: tuple[str, ...]
    switches: tuple[str, ...]
    needs: str
    on: Callable[..., bool] = bool


_OPTIMIZERS_WITHOUT_ARGS = {
    "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adafactor", "lomo", "adalomo",
}  # fmt: skip

_SWITCHES = (
    _Switch(
        ("lora_*", "use_rslora", "use_dora", "load_in_4bit", "load_in_8bit"), ("use_peft",),
        "use_peft: true (without it, all weights are trained)",
    ),
    _Switch(("bnb_4bit_*", "use_bnb_nested_quant"), ("load_in_4bit",), "load_in_4bit: true"),
    _Switch(("save_steps",), ("save_strategy",), "save_strategy: steps", lambda v: v == "steps"),
    _Switch(
        ("save_total_limit", "save_only_model"), ("save_strategy",), "save_strategy: steps or epoch",
        lambda v: v != "no",
    ),
    _Switch(("logging_steps",), ("logging_strategy",), "logging_strategy: steps", lambda v: v == "steps"),
    _Switch(("eval_steps",), ("eval_strategy",), "eval_strategy: steps", lambda v: v == "steps"),
    _Switch(
        ("eval_delay", "eval_on_start", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        ("eval_strategy",), "eval_strategy: steps or epoch", lambda v: v != "no",
    ),
    _Switch(
        ("metric_for_best_model", "greater_is_better"),
        ("load_best_model_at_end", "save_strategy", "lr_scheduler_type"), "load_best_model_at_end: true",
        lambda best, save, scheduler: best or save == "best" or scheduler in ("reduce_lr_on_plateau", "greedy"),
    ),
    _Switch(("packing_strategy",), ("packing", "eval_packing"), "packing: true", lambda *values: any(values)),
    _Switch(
        ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
        ("gradient_checkpointing", "activation_checkpointing"), "activation_checkpointing: true",
        lambda old, new: old if new is None else new,
    ),
    _Switch(
        ("memory_budget", "host_memory_budget"), ("activation_checkpointing",), "activation_checkpointing: auto",
        lambda value: value == "auto",
    ),
    _Switch(
        ("fp8_recipe",), ("fp8", "use_peft"), "fp8: true and use_peft: false (the base of an adapter is not torchao's)",
        lambda fp8, peft: fp8 and not peft,
    ),
    _Switch(("hub_model_id", "hub_revision", "hub_strategy"), ("push_to_hub",), "push_to_hub: true"),
    _Switch(
        ("lr_scheduler_kwargs",), ("lr_scheduler_type",), "an lr_scheduler_type that has options, such as cosine",
        lambda scheduler: scheduler not in ("constant", "constant_with_warmup"),
    ),
    _Switch(
        ("optim_args",), ("optim",), "an optim that reads it, such as sgd",
        lambda optim: optim not in _OPTIMIZERS_WITHOUT_ARGS,
    ),
    _Switch(("fsdp_config",), ("fsdp",), "fsdp"),
    _Switch(("liger_kernel_config",), ("use_liger_kernel",), "use_liger_kernel: true"),
    _Switch(("vllm_*",), ("use_vllm",), "use_vllm: true"),
    _Switch(("ref_model_mixup_alpha", "ref_model_sync_steps"), ("sync_ref_model",), "sync_ref_model: true"),
    _Switch(("precompute_ref_batch_size",), ("precompute_ref_log_probs",), "precompute_ref_log_probs: true"),
)  # fmt: skip

# A key, its least and largest value, and what the message says is expected. None is no value and is not checked.
_RANGES = (
    ("per_device_train_batch_size", 1, math.inf, "1 or more"),
    ("per_device_eval_batch_size", 1, math.inf, "1 or more"),
    ("gradient_accumulation_steps", 1, math.inf, "1 or more"),
    ("learning_rate", 0, 1e9, "a number from 0 up, such as 2e-5"),
    ("weight_decay", 0, 1e9, "a number from 0 up, such as 0.01"),
    ("max_grad_norm", 0, math.inf, "a number from 0 up; 0 does not clip"),
    ("adam_beta1", 0, 1 - 1e-12, "a number from 0 up and below 1"),
    ("adam_beta2", 0, 1 - 1e-12, "a number from 0 up and below 1"),
    ("adam_epsilon", 0, 1e9, "a number from 0 up, such as 1e-8"),
    ("warmup_steps", 0, math.inf, "a number from 0 up"),
    ("num_train_epochs", 1e-12, math.inf, "a number above 0"),
    ("save_total_limit", 1, math.inf, "1 or more; without it, all checkpoints are kept"),
    ("logging_steps", 1e-12, math.inf, "a number above 0"),
    ("eval_steps", 1e-12, math.inf, "a number above 0"),
    ("save_steps", 1e-12, math.inf, "a number above 0"),
    ("max_length", 1, math.inf, "1 or more"),
    ("max_completion_length", 1, math.inf, "1 or more"),
    ("label_smoothing_factor", 0, 1, "a number from 0 to 1"),
    ("dataloader_num_workers", 0, math.inf, "0 or more"),
    ("seed", 0, 2**32 - 1, "a number from 0 to 4294967295"),
    ("lora_r", 1, math.inf, "1 or more"),
    ("lora_alpha", 1, math.inf, "1 or more; with 0 the adapter would have no effect"),
    ("lora_dropout", 0, 1 - 1e-12, "a number from 0 up and below 1"),
)


# What an option needs: the module that is imported, and the package that has to be installed. Without these, training
# fails when it begins. What a model needs, such as bitsandbytes or flash-attn, transformers checks itself.
_OPTIMIZERS = (
    (("*bnb*", "paged_*", "adamw_8bit", "lion_*", "ademamix*", "galore_*_8bit*"), "bitsandbytes", "bitsandbytes"),
    (("galore_*",), "galore_torch", "galore-torch"),
    (("apollo_*",), "apollo_torch", "apollo-torch"),
    (("lomo", "adalomo"), "lomo_optim", "lomo-optim"),
    (("grokadamw",), "grokadamw", "grokadamw"),
    (("schedule_free_*",), "schedulefree", "schedulefree"),
    (("adamw_torch_4bit", "adamw_torch_8bit"), "torchao", "torchao"),
    (("stable_adamw",), "torch_optimi", "torch-optimi"),
)
_FLAGS = {
    "use_vllm": ("vllm", "vllm"),
    "use_liger_kernel": ("liger_kernel", "liger-kernel"),
}

Value = Callable[[str], Any]


def values_of(chosen: dict[str, Any], defaults: dict[str, Any]) -> Value:
    """A function that gives the value of a key, or else its default. An enum is given as the string in a recipe."""

    def value(key):
        found = chosen.get(key, defaults.get(key))
        return getattr(found, "value", found)

    return value


def settle(path: Path, filed: dict[str, Any], given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The keys that are set: in the file, `filed`, and on the command line, `given`, which override the file.

    If the command line turns off what keys of the file depend on, as `--use_peft false` does with `lora_r`, these keys
    are meant to have no effect, and are left out.

    Raises:
        RecipeError: A key has no effect, its value is out of range, or it needs a package that is not installed.
    """
    chosen = filed | given
    value = values_of(chosen, defaults)
    _check_ranges(path, value)
    for switch in _SWITCHES:
        if switch.on(*(value(key) for key in switch.switches)):
            continue
        for key in [key for key in chosen if any(fnmatch.fnmatchcase(key, pattern) for pattern in switch.keys)]:
            if value(key) is None or value(key) is False:
                continue
            if key not in given and any(other in given for other in switch.switches):
                del chosen[key]
                continue
            raise RecipeError(
                f"{path}: {key} is {value(key)!r}, which has no effect without {switch.needs}. Set that, or remove "
                f"{key}."
            )
    if value("use_peft") and value("lora_task_type") != "CAUSAL_LM":
        raise RecipeError(
            f"{path}: lora_task_type is {value('lora_task_type')!r}; expected CAUSAL_LM, because every trainer here "
            "trains a causal language model. Remove lora_task_type."
        )
    if value("save_strategy") == "best" and value("eval_strategy") == "no":
        raise RecipeError(
            f"{path}: save_strategy is 'best', which saves nothing without evaluation. Set eval_strategy: steps or "
            "epoch, or save_strategy: epoch."
        )
    if (value("packing") or value("eval_packing")) and value("packing_strategy") == "wrapped":
        raise RecipeError(
            f"{path}: packing_strategy is 'wrapped', which joins rows and cuts them at any token, so that a row is "
            "learned with what is left of another one before it. Set packing_strategy: bfd, which keeps rows apart, or "
            "bfd_split, which keeps the rest of rows longer than max_length too."
        )
    if "num_train_epochs" in chosen and value("max_steps") > 0:
        if "max_steps" not in given or "num_train_epochs" in given:
            raise RecipeError(
                f"{path}: num_train_epochs is {value('num_train_epochs')} and max_steps is {value('max_steps')}, but "
                "max_steps alone would decide. Remove one of them, or set max_steps: -1."
            )
        del chosen["num_train_epochs"]
    _check_packages(path, value)
    return chosen


def _check_ranges(path: Path, value: Value) -> None:
    for key, least, largest, expected in _RANGES:
        number = value(key)
        if isinstance(number, (int, float)) and not least <= number <= largest:  # also true of NaN
            raise RecipeError(f"{path}: {key} is {number}; expected {expected}.")
    steps = value("max_steps")
    if steps != -1 and steps < 1:
        raise RecipeError(f"{path}: max_steps is {steps}; expected 1 or more, or -1 to train num_train_epochs.")


def _check_packages(path: Path, value: Value) -> None:
    """RecipeError if an option needs a package that is not installed."""

    def need(key, needed, package, installed):
        if not installed:
            raise RecipeError(
                f"{path}: {key} is {needed!r}, which needs a package that is not installed. Run `pip install "
                f"{package}`, or remove {key}."
            )

    for key, (module, package) in _FLAGS.items():
        if value(key) and not (key == "use_liger_kernel" and value("use_liger")):  # refused, installed or not
            need(key, value(key), package, importlib.util.find_spec(module))
    for patterns, module, package in _OPTIMIZERS:
        if any(fnmatch.fnmatchcase(value("optim"), pattern) for pattern in patterns):
            need("optim", value("optim"), package, importlib.util.find_spec(module))
    _check_reports(path, value("report_to"), need)


def _check_reports(path: Path, report_to: str | list[str] | None, need: Callable) -> None:
    """RecipeError if `report_to` names an unknown tracker, or one whose package is not installed."""
    names = [report_to] if isinstance(report_to, str) else report_to or []
    if set(names) <= {"none", "all"}:
        return
    packages = {"azure_ml": "azureml-mlflow", "comet_ml": "comet-ml"}
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            expected = ", ".join(["none", "all", *sorted(INTEGRATION_TO_CALLBACK)])
            raise RecipeError(f"{path}: report_to is {name!r}; expected one of {expected}.")
        if name not in ("flyte", "kubeflow"):  # a run is started by one of these or not, and needs no package for it
            need("report_to", name, packages.get(name, name), name in get_available_reporting_integrations())


def check_scheduler(path: Path, training) -> None:
    """RecipeError if `lr_scheduler_type` does not take `lr_scheduler_kwargs`. Otherwise the first step would fail."""
    import torch
    from transformers import get_scheduler

    name, options = training.lr_scheduler_type.value, training.lr_scheduler_kwargs
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=training.learning_rate)
    try:
        get_scheduler(
            name, optimizer, num_warmup_steps=0, num_training_steps=10**9, scheduler_specific_kwargs=dict(options or {})
        )
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"{path}: lr_scheduler_kwargs is {options!r}, which does not fit lr_scheduler_type {name!r}: {error}"
        ) from error


def check_rows(recipe, columns: list[str]) -> None:
    """RecipeError if an option relies on columns that the rows do not have after the template has been applied."""
    if getattr(recipe.training, "completion_only_loss", None) and "completion" not in columns:
        if "completion_mask" in columns:
            return
        mend = "Remove completion_only_loss."
        if "messages" in columns:
            last = "prompt_template: last_turn to learn the last answer of each row, or "
            mend = (
                f"Set {last if recipe.args.prompt_template == 'none' else ''}assistant_only_loss: true to learn all "
                "answers, for which the chat template must mark them with {% generation %}."
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
