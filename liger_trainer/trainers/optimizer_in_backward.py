"""Implements `optimizer_in_backward`: steps each weight in the backward pass, and frees its gradient at once.

The trainer's own optimizer is used. For the step of one weight, its groups contain only that weight. So states, groups
and learning rates stay where they are, and checkpoints are the same. The trainer's own step after the backward pass
finds no gradients and changes nothing, but still calls the optimizer's hooks once per step.

Between these two steps, a weight has its new value and no gradient. Stock code would expect the old value and the
gradient, so any use of the weight is an error (`SteppedWeight`).
"""

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import Trainer
from transformers.optimization import Adafactor

from liger_trainer.feature import Feature, FeatureTrainer, StepRunner

# In these optimizers, the step of a weight depends only on the weight, its gradient, its state and its group.
_CLASSES = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    Adafactor,
)
_NO_WEIGHT = types.SimpleNamespace(grad=None)  # optimizers skip it
# Attributes and methods of a stepped weight that are safe to use: they depend on neither its value nor its gradient.
_SAFE_ATTRIBUTES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_cuda")
_SAFE_METHODS = ("size", "dim", "numel", "element_size", "is_floating_point", "is_complex")
_ABOUT_A_WEIGHT = {getattr(torch.Tensor, name).__get__ for name in _SAFE_ATTRIBUTES}
_ABOUT_A_WEIGHT |= {getattr(torch.Tensor, name) for name in _SAFE_METHODS}


@dataclass
class InBackwardFields:
    """The config field `optimizer_in_backward`."""

    optimizer_in_backward: bool = field(
        default=False,
        metadata={
            "help": "Step each weight in the backward pass, as soon as its gradient is there, and free the gradient. "
            "So all gradients never exist together. Needs max_grad_norm: 0 and gradient_accumulation_steps: 1."
        },
    )


class InBackwardArguments(Protocol):
    """The trainer arguments that `optimizer_in_backward` reads."""

    auto_find_batch_size: bool
    fp16: bool
    gradient_accumulation_steps: int
    max_grad_norm: float
    n_gpu: int
    optimizer_in_backward: bool


class InBackwardTrainer(FeatureTrainer, Protocol):
    """The trainer attributes that `optimizer_in_backward` reads. It writes `grad_norm_of_step`."""

    args: InBackwardArguments
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None
    grad_norm_of_step: Callable[[], torch.Tensor] | None


class InBackward(Feature[InBackwardArguments, InBackwardTrainer]):
    """The feature `optimizer_in_backward`. It rejects options that would train wrongly with it."""

    def check(self, args: InBackwardArguments) -> None:
        if not isinstance(args.optimizer_in_backward, bool):
            raise ValueError(f"optimizer_in_backward is {args.optimizer_in_backward!r}; expected true or false.")
        if not args.optimizer_in_backward:
            return
        if args.max_grad_norm > 0:
            raise _refusal(
                f"max_grad_norm is {args.max_grad_norm}: gradients can only be clipped when all of them are there. Set "
                "max_grad_norm: 0 (its default is 1.0)"
            )
        if args.gradient_accumulation_steps > 1:
            raise _refusal(
                f"gradient_accumulation_steps is {args.gradient_accumulation_steps}: freed gradients cannot be added "
                "up. Set gradient_accumulation_steps: 1, and a larger per_device_train_batch_size"
            )
        if args.fp16:
            raise _refusal("fp16 is True: its gradients stay scaled until all of them are there. Set bf16: true")
        if args.auto_find_batch_size:
            raise _refusal(
                "auto_find_batch_size is True: a step that runs out of memory cannot be repeated, because weights have "
                "already changed. Remove it"
            )
        if getattr(args, "enable_jit_checkpoint", False):
            raise _refusal(
                "enable_jit_checkpoint is True: it saves before the optimizer step, when weights have already changed. "
                "Remove it"
            )

    def check_trainer(self, trainer: InBackwardTrainer) -> None:
        if not getattr(trainer.args, "optimizer_in_backward", False):
            return
        self.check(trainer.args)
        kind = trainer.accelerator.distributed_type
        if kind != DistributedType.NO or trainer.args.n_gpu > 1:
            raise _refusal(
                f"the training runs on several devices or is sharded ({kind.value}), so gradients arrive in parts. "
                "Start one process on one GPU, without FSDP and DeepSpeed"
            )
        if trainer.accelerator.scaler is not None:
            raise _refusal(
                "accelerate's mixed_precision is fp16, which scales gradients until all are there. Set bf16: true"
            )
        if trainer.optimizer is not None:
            optimizer: Any = type(_unwrapped(trainer.optimizer))
        else:
            named = trainer.optimizer_cls_and_kwargs or Trainer.get_optimizer_cls_and_kwargs(
                trainer.args, trainer.model
            )
            optimizer = named[0]
        _check_class(optimizer)

    @contextmanager
    def around_training(self, trainer: InBackwardTrainer) -> Iterator[StepRunner | None]:
        if not getattr(trainer.args, "optimizer_in_backward", False):
            yield None
            return
        self.check_trainer(trainer)  # arguments may have changed since the trainer was built
        steps = OptimizerInBackward(trainer)
        trainer.grad_norm_of_step = steps.grad_norm
        try:
            yield steps.run
        except BaseException as error:
            if steps.has_stepped:
                error.add_note(
                    "The step failed after some weights had taken their optimizer step (optimizer_in_backward: true). "
                    "Resume from the last checkpoint."
                )
            raise
        finally:
            trainer.grad_norm_of_step = None
            steps.close()


class SteppedWeight(nn.Parameter):
    """The class of a weight between its step in the backward pass and the trainer's optimizer step."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _ABOUT_A_WEIGHT:
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        clipping = _clipping_function()
        if clipping is not None:
            raise _refusal(
                f"{clipping} was called: gradients can only be clipped when all of them are there, and each is freed "
                "in the backward pass. Remove the call"
            )
        raise RuntimeError(
            f"optimizer_in_backward is true, but a weight is used ({torch.overrides.resolve_name(func)}) after its "
            "optimizer step in the backward pass and before the end of the training step. Possible causes: a second "
            "forward or backward pass; checkpointing that is reentrant (use_reentrant: true), or that recomputes a "
            "layer which reads another layer's weight; code that reads weights or gradients after the backward pass. "
            "Set optimizer_in_backward: false. To change gradients, use weight.register_hook."
        )


class OptimizerInBackward:
    """Steps the optimizer of a trainer for one weight at a time, as the gradients of a training step arrive.

    Weights have hooks from the beginning of a training step until its optimizer step.
    """

    def __init__(self, trainer: InBackwardTrainer):
        self.trainer = trainer
        self._stepped: dict[nn.Parameter, tuple[type, torch.Tensor]] = {}  # weight -> (its class, norm of its gradient)
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._hooks: list[RemovableHandle] = []  # of the weights
        self._end_hook: RemovableHandle | None = None

    @property
    def has_stepped(self) -> bool:
        """True if a weight has taken its step in the training step that is running."""
        return bool(self._stepped)

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `step(*args, **kwargs)`, the forward and backward pass of a training step."""
        if not self._hooks:
            self._begin(_unwrapped(self.trainer.optimizer))
        return step(*args, **kwargs)

    def grad_norm(self) -> torch.Tensor:
        """Return the norm of all gradients of the step, as `torch.nn.utils.clip_grad_norm_` would compute it."""
        norms = []
        for weight in self.trainer.model.parameters():
            if weight in self._stepped:
                norms.append(self._stepped[weight][1])
            elif weight.grad is not None:  # a weight that is not in the optimizer; its norm is part of the total too
                norms.append(weight.grad)
        return torch.nn.utils.get_total_norm(norms)

    def close(self) -> None:
        """Remove our hooks from optimizer and weights."""
        self._leave_weights()
        if self._end_hook is not None:
            self._end_hook.remove()

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        self.close()
        _check_class(type(optimizer))  # the optimizer may have been created or replaced meanwhile
        self._end_hook = optimizer.register_step_pre_hook(self._leave_weights)
        of_bitsandbytes: Any = optimizer if type(optimizer).__module__.startswith("bitsandbytes.") else None
        if of_bitsandbytes is not None and not of_bitsandbytes.initialized:
            of_bitsandbytes.check_overrides()  # its first step does this for all weights
            of_bitsandbytes.to_gpu()
            of_bitsandbytes.initialized = True
        for group in optimizer.param_groups:
            for place, weight in enumerate(group["params"]):
                if weight.requires_grad:
                    # bitsandbytes has options for single weights, looked up by their place in the groups
                    place = 0 if of_bitsandbytes is None else place
                    arrived = functools.partial(self._arrived, optimizer, group, place)
                    self._hooks.append(weight.register_post_accumulate_grad_hook(arrived))

    def _arrived(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], place: int, weight: nn.Parameter
    ) -> None:
        with self._lock:
            assert weight.grad is not None, "it has just arrived"
            norm = torch.nn.utils.get_total_norm([weight.grad])
            step_alone(optimizer, group, weight, place)
            self._stepped[weight] = type(weight), norm
            weight.__class__ = SteppedWeight

    def _leave_weights(self, *_: Any) -> None:
        """Restore the weights before the trainer's optimizer step, or when training ends."""
        for hook in self._hooks:
            hook.remove()
        for weight, (kind, _) in self._stepped.items():
            weight.__class__ = kind
        self._hooks, self._stepped = [], {}


@torch.no_grad()
def step_alone(optimizer: torch.optim.Optimizer, group: dict[str, Any], weight: nn.Parameter, place: int = 0) -> None:
    """Step `optimizer` only for `weight` of `group`, without the optimizer's hooks, and free its gradient.

    `place` is the index in the group at which the optimizer sees the weight.
    """
    groups = [(each, each["params"]) for each in optimizer.param_groups]
    for each, _ in groups:
        each["params"] = []
    group["params"] = [_NO_WEIGHT] * place + [weight]
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):  # PyTorch has put the optimizer's hooks around it
        step = step.__wrapped__
    try:
        step(optimizer)
    finally:
        for each, weights in groups:
            each["params"] = weights
    weight.grad = None
    # Fused optimizers do not bump the version, but autograd must raise if something still needs the old values
    torch.autograd.graph.increment_version(weight)


def _clipping_function() -> str | None:
    """Return the running PyTorch function that clips gradients, such as `clip_grad_value_`, or None."""
    frame: Any = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad" and name.startswith("clip_grad"):
            return name
        frame = frame.f_back
    return None


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _check_class(optimizer: type) -> None:
    if optimizer not in _CLASSES and not optimizer.__module__.startswith("bitsandbytes.optim."):
        known = ", ".join(each.__name__ for each in _CLASSES)
        raise _refusal(
            f"the optimizer is a {optimizer.__module__}.{optimizer.__qualname__}, which may look at several weights at "
            f"once. Use {known} or an optimizer of bitsandbytes, not a subclass"
        )


def _refusal(why: str) -> ValueError:
    return ValueError(f"optimizer_in_backward is true and {why}, or set optimizer_in_backward: false.")
