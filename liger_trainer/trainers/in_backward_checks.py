"""What `optimizer_in_backward` cannot be used with, because it would train wrongly, and its life in one training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from transformers import TrainerCallback
from transformers.optimization import Adafactor

from liger_trainer.trainers.optimizer_in_backward import OptimizerInBackward

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
    refused = None
    if args.max_grad_norm > 0:
        refused = (
            "max_grad_norm", args.max_grad_norm,
            "and gradients can only be clipped when all of them are there. Set max_grad_norm: 0 (its default is 1.0)",
        )  # fmt: skip
    elif args.gradient_accumulation_steps > 1:
        refused = (
            "gradient_accumulation_steps", args.gradient_accumulation_steps,
            "and gradients that are freed are not added to. Set gradient_accumulation_steps: 1, and a larger "
            "per_device_train_batch_size",
        )  # fmt: skip
    elif args.fp16:
        refused = "fp16", True, "and its gradients are scaled until all of them are there. Set bf16: true"
    elif args.auto_find_batch_size:
        refused = (
            "auto_find_batch_size", args.auto_find_batch_size,
            "and a step that has run out of memory cannot be run again, because weights have changed. Remove it",
        )  # fmt: skip
    elif getattr(args, "enable_jit_checkpoint", False):
        refused = (
            "enable_jit_checkpoint", True,
            "which saves before the optimizer step, when weights have changed already. Remove it",
        )  # fmt: skip
    elif (name := getattr(args.optim, "value", args.optim)) not in (*_NAMES, *_OF_BITSANDBYTES):
        refused = (
            "optim", name,
            "which may look at several weights at once, or steps by hooks of its own. Set optim to one of "
            f"{', '.join(_NAMES)}, or to one of bitsandbytes",
        )  # fmt: skip
    if refused is not None:
        field, given, why = refused
        raise ValueError(
            f"optimizer_in_backward is true and {field} is {given}, {why}, or set optimizer_in_backward: false."
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
        _check_class(type(_plain(trainer.optimizer)))
    elif trainer.optimizer_cls_and_kwargs is not None:
        _check_class(trainer.optimizer_cls_and_kwargs[0])


def _plain(optimizer: Any) -> torch.optim.Optimizer:
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


def _check_listeners(trainer: "LigerTrainerMixin", optimizer: torch.optim.Optimizer) -> None:
    """ValueError if somebody wants to be called between the backward pass and the optimizer step."""
    mend = (
        "By then weights have changed and gradients are gone. To see or change a gradient, put a hook on the weight "
        "with weight.register_hook, or set optimizer_in_backward: false."
    )
    for callback in trainer.callback_handler.callbacks:
        method = type(callback).on_pre_optimizer_step
        if method is not TrainerCallback.on_pre_optimizer_step and not _is_known(method.__module__):
            raise ValueError(
                f"optimizer_in_backward is true and the callback {type(callback).__qualname__} has "
                f"on_pre_optimizer_step. {mend}"
            )
    if hooks := getattr(optimizer, "_optimizer_step_pre_hooks", None):
        raise ValueError(
            f"optimizer_in_backward is true and the optimizer has a step_pre_hook, {next(iter(hooks.values()))}. {mend}"
        )


def _is_known(module: str) -> bool:
    """Whether a callback is ours or transformers' own, which look at neither weights nor gradients there."""
    return module.partition(".")[0] in ("liger_trainer", "transformers")


class InTraining:
    """What a trainer holds while it trains with `optimizer_in_backward`. There is an optimizer from its first step."""

    def __init__(self, trainer: "LigerTrainerMixin"):
        self.trainer = trainer
        self.steps: OptimizerInBackward | None = None

    def run(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        if self.steps is None:
            optimizer = _plain(self.trainer.optimizer)
            _check_class(type(optimizer))
            _check_listeners(self.trainer, optimizer)
            self.steps = OptimizerInBackward(optimizer, self.trainer.model)
        return self.steps.run(step, *args, **kwargs)


@contextmanager
def while_training(trainer: "LigerTrainerMixin") -> Iterator[InTraining | None]:
    """Around one training: what runs its training steps, or None without `optimizer_in_backward`."""
    if not wants(trainer.args):
        yield None
        return
    check_trainer(trainer)  # arguments may have been changed since it was built
    training = InTraining(trainer)
    try:
        yield training
    finally:
        if training.steps is not None:
            training.steps.close()
