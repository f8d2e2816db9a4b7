"""Filters logged losses as `logging_nan_inf_filter` asks, without making the host wait for the GPU.

`Trainer` asks every loss whether it is NaN or infinite, and adds the mean of the losses before it in place of such a
one. For the answer the host waits for the GPU once per micro-batch. Here the device chooses between the two, and the
argument is off from the end of `training_step` to the call of `floating_point_ops`, which `Trainer` makes right after
it has added the loss. So nothing but its own two statements finds it off.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from liger_trainer.trainers.base import LigerTrainerMixin


@contextmanager
def filtering_losses(trainer: "LigerTrainerMixin") -> Iterator[None]:
    """Within it, `logging_nan_inf_filter` works on the losses of `trainer` without waiting for the GPU."""
    args, step, operations = trainer.args, trainer.training_step, trainer.floating_point_ops
    if not (trainer.uses_liger and args.logging_nan_inf_filter):
        yield
        return

    def filtered_step(*given: Any, **named: Any) -> torch.Tensor:
        filter_on()  # a callback may have called it before
        loss = step(*given, **named)  # a subclass that overrides it gets each loss as it is
        in_place = all(trainer.__dict__.get(name) is method for name, method in ours.items())
        if args.logging_nan_inf_filter and in_place:
            steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
            loss = torch.where(torch.isfinite(loss), loss, trainer._tr_loss / steps)
            args.logging_nan_inf_filter = None
        return loss

    def counted(*given: Any, **named: Any) -> Any:
        filter_on()
        return operations(*given, **named)

    def filter_on() -> None:
        if args.logging_nan_inf_filter is None:
            args.logging_nan_inf_filter = True

    ours = {"training_step": filtered_step, "floating_point_ops": counted}
    before = {name: trainer.__dict__[name] for name in ours if name in trainer.__dict__}
    trainer.__dict__.update(ours)
    try:
        yield
    finally:
        filter_on()
        for name, method in ours.items():
            if trainer.__dict__.get(name) is method:  # otherwise a callback has wrapped or removed it
                del trainer.__dict__[name]
        trainer.__dict__.update(before)
