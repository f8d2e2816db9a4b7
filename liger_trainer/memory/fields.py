"""The fields of activation checkpointing, under the names and with the values that we take.

Transformers 5.23 has the first one as a switch, with `gradient_checkpointing` for its old name. Transformers 5.17 has
the old name alone, which TRL sets to True. The new name counts wherever it is given.
"""

import dataclasses
from typing import Any

from transformers import TrainingArguments

from liger_trainer.memory.feature import AUTO

KNOWS_NEW_NAME = "activation_checkpointing" in {field.name for field in dataclasses.fields(TrainingArguments)}
_WORDS = {"true": True, "false": False, AUTO: AUTO}


def settle(args: Any) -> None:
    """Give both names of checkpointing their values, before the stock class looks at them. ValueError for others."""
    value = args.activation_checkpointing
    if isinstance(value, str):
        value = _WORDS.get(value.lower(), value)
    if value is not None and not isinstance(value, bool) and value != AUTO:
        raise ValueError(f"activation_checkpointing is {value!r}; expected true, false or auto.")
    args.activation_checkpointing = value
    _check_budget(args)
    if value == AUTO and args.torch_compile:
        raise ValueError(
            "activation_checkpointing is 'auto', which runs each layer in one way or another from step to step, and "
            "torch_compile would compile the model anew each time. Set activation_checkpointing to true or false, or "
            "remove torch_compile."
        )
    if value == AUTO and getattr(args, "activation_offloading", False):
        raise ValueError(
            "activation_checkpointing is 'auto' and activation_offloading is true, and each of them decides what waits "
            "in the host's memory. Remove activation_offloading, or set activation_checkpointing to true or false."
        )
    if not KNOWS_NEW_NAME and value is not None:
        args.gradient_checkpointing = bool(value)
    if not KNOWS_NEW_NAME and args.activation_checkpointing_kwargs is not None:
        args.gradient_checkpointing_kwargs = args.activation_checkpointing_kwargs


def check_options(args: Any) -> None:
    """Refuse options of checkpointing that `auto` does not take into account. To be called when they are a dict."""
    options = args.gradient_checkpointing_kwargs
    if args.activation_checkpointing == AUTO and isinstance(options, dict) and options.get("offload"):
        raise ValueError(
            "activation_checkpointing is 'auto' and its option offload is true, and each of them decides what waits "
            "in the host's memory. Remove offload from activation_checkpointing_kwargs, or set "
            "activation_checkpointing: true."
        )


def _check_budget(args: Any) -> None:
    for name, least in (("memory_budget", "above 0, such as 70"), ("host_memory_budget", "of 0 or more, such as 32")):
        budget = getattr(args, name)
        if budget is None:
            continue
        number = isinstance(budget, int | float) and not isinstance(budget, bool) and budget < float("inf")
        if not number or budget < 0 or (budget == 0 and name == "memory_budget"):
            raise ValueError(f"{name} is {budget!r}; expected a number of GiB {least}.")
        if args.activation_checkpointing != AUTO:
            raise ValueError(
                f"{name} is {budget}, which only activation_checkpointing: auto reads, and that is "
                f"{args.activation_checkpointing!r}. Set activation_checkpointing: auto, or remove {name}."
            )
