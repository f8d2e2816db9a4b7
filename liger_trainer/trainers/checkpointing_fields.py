"""The fields `activation_checkpointing` and `memory_budget`, under the names and with the values that we take.

Transformers 5.23 has the first one as a switch, with `gradient_checkpointing` for its old name. Transformers 5.17 has
the old name alone, which TRL sets to True. The new name counts wherever it is given.
"""

import dataclasses
from typing import Any

from transformers import TrainingArguments

from liger_trainer.trainers.auto_checkpointing import AUTO

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
            "activation_checkpointing is 'auto' and activation_offloading is true: one keeps activations on the GPU "
            "and the other moves them away. Remove one of the two."
        )
    if not KNOWS_NEW_NAME and value is not None:
        args.gradient_checkpointing = bool(value)
    if not KNOWS_NEW_NAME and args.activation_checkpointing_kwargs is not None:
        args.gradient_checkpointing_kwargs = args.activation_checkpointing_kwargs


def check_options(args: Any) -> None:
    """Refuse options of checkpointing that `auto` would reckon without. To be called when they are a dict."""
    options = args.gradient_checkpointing_kwargs
    if args.activation_checkpointing == AUTO and isinstance(options, dict) and options.get("offload"):
        raise ValueError(
            "activation_checkpointing is 'auto' and its option offload is true: one keeps activations on the GPU and "
            "the other moves them away, of which what is measured would not know. Remove offload from "
            "activation_checkpointing_kwargs, or set activation_checkpointing: true."
        )


def _check_budget(args: Any) -> None:
    budget = args.memory_budget
    if budget is None:
        return
    if not isinstance(budget, int | float) or isinstance(budget, bool) or not 0 < budget < float("inf"):
        raise ValueError(f"memory_budget is {budget!r}; expected a number of GiB above 0, such as 70.")
    if args.activation_checkpointing != AUTO:
        raise ValueError(
            f"memory_budget is {budget}, which only activation_checkpointing: auto reads, and that is "
            f"{args.activation_checkpointing!r}. Set activation_checkpointing: auto, or remove memory_budget."
        )
