"""Filters logged losses as `logging_nan_inf_filter` asks, without making the host wait for the GPU.

`Trainer` asks every loss whether it is NaN or infinite, and leaves such losses out of what it logs. For the answer the
host waits for the GPU once per micro-batch. Here `Trainer` gets a loss that always answers no. It filters itself on the
device instead, when `Trainer` adds it to the sum of the losses before it, so that the logged numbers are the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from liger_trainer.trainers.base import LigerTrainerMixin


class FilteredLoss(torch.Tensor):
    """A loss () for `Trainer` to log. If it is not finite, adding it to a sum of losses adds their mean instead.

    Attributes:
        steps (`int`): The number of steps by which `Trainer` divides the sum to get that mean.
    """

    steps: int

    @classmethod
    def of(cls, loss: torch.Tensor, steps: int) -> "FilteredLoss":
        filtered = loss.as_subclass(cls)
        filtered.steps = steps
        return filtered

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (torch.isnan, torch.isinf):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            if func in (torch.Tensor.add_, torch.Tensor.add) and not isinstance(args[0], cls):
                total, loss = args
                return func(total, torch.where(torch.isfinite(loss), loss, total / loss.steps))
            return func(*args, **(kwargs or {}))


@contextmanager
def filtering_losses(trainer: "LigerTrainerMixin") -> Iterator[None]:
    """Within it, `logging_nan_inf_filter` works on the losses of `trainer` without waiting for the GPU."""
    if not (trainer.uses_liger and trainer.args.logging_nan_inf_filter):
        yield
        return
    step = trainer.training_step  # a subclass that overrides it gets each loss as it is
    before = {name: value for name, value in vars(trainer).items() if name == "training_step"}

    def filtered_step(*args: Any, **kwargs: Any) -> torch.Tensor:
        return FilteredLoss.of(step(*args, **kwargs), 1 + trainer.state.global_step - trainer._globalstep_last_logged)

    trainer.__dict__["training_step"] = filtered_step
    try:
        yield
    finally:
        if vars(trainer).get("training_step") is filtered_step:  # otherwise somebody has wrapped or removed it
            del trainer.__dict__["training_step"]
        trainer.__dict__.update(before)
