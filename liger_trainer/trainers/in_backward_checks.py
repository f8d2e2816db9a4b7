"""What `optimizer_in_backward` cannot be used with, because it would train wrongly."""

from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from transformers import TrainerCallback
from transformers.optimization import Adafactor

if TYPE_CHECKING:
    from liger_trainer.trainers.base import LigerTrainerMixin

# Optimizers whose step of one weight depends on nothing but that weight, its gradient, its state and its group
_CLASSES = (
    torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, Adafactor,
)  # fmt: skip
_NAMES = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad", "adafactor")
_OF_BITSANDBYTES = (
    "adamw_bnb_8bit", "adamw_8bit", "lion_8bit", "lion_32bit", "ademamix", "ademamix_8bit", "rmsprop_bnb",
    "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit",
    "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit",
)  # fmt: skip


def wants(args: Any) -> bool:
    return bool(getattr(args, "optimizer_in_backward", False))


def check_fields(args: Any) -> None:
    """ValueError if `optimizer_in_backward` does not go with the other fields of the arguments."""
    value = args.optimizer_in_backward
    if not isinstance(value, bool):
        raise ValueError(f"optimizer_in_backward is {value!r}; expected true or false.")
    if not value:
        return
    optim = getattr(args.optim, "value", args.optim)
    refused = {  # field: (whether its value is refused, why, and what to set)
        "max_grad_norm": (
            args.max_grad_norm > 0,
            "gradients can only be clipped when all of them are there. Set max_grad_norm: 0 (its default is 1.0)",
        ),
        "gradient_accumulation_steps": (
            args.gradient_accumulation_steps > 1,
            "gradients that are freed are not added to. Set gradient_accumulation_steps: 1, and a larger "
            "per_device_train_batch_size",
        ),
        "fp16": (args.fp16, "its gradients are scaled until all of them are there. Set bf16: true"),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "a step that has run out of memory cannot be run again, because weights have changed. Remove it",
        ),
        "enable_jit_checkpoint": (
            getattr(args, "enable_jit_checkpoint", False),
            "it saves before the optimizer step, when weights have changed already. Remove it",
        ),
        "optim": (
            optim not in (*_NAMES, *_OF_BITSANDBYTES),
            "it may look at several weights at once, or steps by hooks of its own. Set optim to one of "
            f"{', '.join(_NAMES)}, or to one of bitsandbytes",
        ),
    }
    for field, (is_refused, why) in refused.items():
        if is_refused:
            value = optim if field == "optim" else getattr(args, field)
            raise ValueError(
                f"optimizer_in_backward is true and {field} is {value}: {why}, or set optimizer_in_backward: false."
            )


def check_trainer(trainer: "LigerTrainerMixin") -> None:
    """ValueError if `optimizer_in_backward` does not go with how the trainer was launched, or with its optimizer."""
    if not wants(trainer.args):
        return
    check_fields(trainer.args)
    if (kind := trainer.accelerator.distributed_type) != DistributedType.NO or trainer.args.n_gpu > 1:
        raise ValueError(
            f"optimizer_in_backward is true and the training runs on several devices or is sharded ({kind.value}), so "
            "that a gradient is not whole when it arrives. Start one process on one GPU, without FSDP and DeepSpeed, "
            "or set optimizer_in_backward: false."
        )
    if trainer.accelerator.scaler is not None:
        raise ValueError(
            "optimizer_in_backward is true and accelerate's mixed_precision is fp16, whose gradients are scaled until "
            "all of them are there. Set bf16: true, or set optimizer_in_backward: false."
        )
    if trainer.optimizer is not None:
        _check_class(type(plain(trainer.optimizer)))
    elif trainer.optimizer_cls_and_kwargs is not None:
        _check_class(trainer.optimizer_cls_and_kwargs[0])


def plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _check_class(kind: Any) -> None:
    if kind in _CLASSES or kind.__module__.startswith("bitsandbytes.optim."):
        return
    known = ", ".join(each.__name__ for each in _CLASSES)
    raise ValueError(
        f"optimizer_in_backward is true and the optimizer is a {kind.__module__}.{kind.__qualname__}, of which it is "
        f"not known whether it can step one weight at a time. Use {known} or one of bitsandbytes, none of them "
        "subclassed, or set optimizer_in_backward: false."
    )


def refuse_listeners(trainer: "LigerTrainerMixin", optimizer: torch.optim.Optimizer, ours: Any = None) -> None:
    """ValueError if a callback, or a hook that is not `ours`, runs between backward pass and optimizer step."""
    found = None
    for callback in trainer.callback_handler.callbacks:
        method = getattr(callback.on_pre_optimizer_step, "__func__", callback.on_pre_optimizer_step)
        # Ours and those of transformers look at neither weights nor gradients there
        known = method.__module__.partition(".")[0] in ("liger_trainer", "transformers")
        if method is not TrainerCallback.on_pre_optimizer_step and not known:
            found = f"the callback {type(callback).__qualname__} has on_pre_optimizer_step"
    for hook in getattr(optimizer, "_optimizer_step_pre_hooks", {}).values():
        if hook != ours:
            found = f"the optimizer has a step_pre_hook, {hook}"
    if found is not None:
        raise ValueError(
            f"optimizer_in_backward is true and {found}. By then weights have changed and gradients are gone. To see "
            "or change a gradient, put a hook on the weight with weight.register_hook, or set optimizer_in_backward: "
            "false."
        )
