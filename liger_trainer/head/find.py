"""Finding the LM head of a model and the options of its fused head, and saying why it cannot be fused."""

from collections.abc import Callable

import torch
from torch import nn

from liger_trainer._logging import logger
from liger_trainer.head.module import why_not_fusable
from liger_trainer.head.outputs import HeadOptions
from liger_trainer.instance.binding import Binding
from liger_trainer.instance.hooks import output_seen_by


class FusedHeadBinding(Binding):
    """The binding of a model, made by `install_fused_head`.

    Attributes:
        options (`HeadOptions`): What calls with `fused_lm_head=True` do by default.
    """

    key = "_liger_head"

    def __init__(self, function: Callable):
        super().__init__(function)
        self.options = HeadOptions()


def base_model_of(model: nn.Module) -> nn.Module:
    """The transformers model inside `torch.compile` and a PEFT wrapper, or the model itself."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that makes the logits of a transformers model, or None."""
    get_head = getattr(base_model_of(model), "get_output_embeddings", None)
    return None if get_head is None else get_head()


def head_reason(model: nn.Module) -> str | None:
    """Tell why `model` cannot have a fused head, or return None."""
    head = output_head(model)
    if head is None:
        return f"{type(base_model_of(model)).__name__} has no LM head (get_output_embeddings() is None)"
    options = head_options(model)
    reason = why_not_fusable(head, options is not None and options.cast_lm_head_to_fp32)
    return None if reason is None else f"the LM head of {type(base_model_of(model)).__name__} cannot be fused: {reason}"


def head_options(model: nn.Module) -> HeadOptions | None:
    """The options of the fused head of `model`, or None where it has none."""
    binding = FusedHeadBinding.of(base_model_of(model))
    return None if binding is None or binding.aside else binding.options


def has_fused_head(model: nn.Module) -> bool:
    """Return whether `model` has a fused head, also where accelerate has wrapped its forward."""
    return head_options(model) is not None


def who_sees_outputs(model: nn.Module) -> str | None:
    """Describe a hook or a forward of the user's that gets the outputs of `model`, which may be wrapped, or None."""
    for module in model.modules():  # a wrapper comes before what it wraps
        ours = FusedHeadBinding.of(module)
        if (seen := output_seen_by(module, ours)) is not None:
            return f"{seen} on the {type(module).__name__} sees its outputs, which would have no logits"
        if ours is not None:
            break
    return None


def report_unfused(model: nn.Module, reason: str) -> None:
    """Say in the log and in the report of `model`, which may be wrapped by PEFT, that its head is not fused."""
    if torch.compiler.is_compiling():
        return
    model = base_model_of(model)
    binding = FusedHeadBinding.of(model)
    if binding is not None and binding.place is not None:
        binding.place.keeps_its_code(reason)
    logger.warning_once(
        f"The LM head of {type(model).__name__} is not fused: {reason}. "
        "Full logits are built instead, so the numbers are right, but no memory is saved."
    )


def why_peft_needs_logits(model: nn.Module) -> str | None:
    """Tell why the PEFT wrapper `model` needs real logits in calls with labels, or return None."""
    for name, config in getattr(model, "peft_config", {}).items():
        if config.peft_type == "CPT":
            return f"the adapter {name!r} is CPT, which computes its own loss from logits"
    return None
