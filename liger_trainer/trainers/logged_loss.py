"""`logging_nan_inf_filter` without its waits.

`Trainer` leaves NaN and infinite losses out of what it logs by asking every loss whether it is finite, for which the
host waits for the GPU once a micro-batch. Here the loss that `Trainer` is given answers that it is, and filters itself
on the device where `Trainer` adds it to the sum of those before it: the same numbers, and no wait.
"""

import torch


class FilteredLoss(torch.Tensor):
    """A loss () for `Trainer` to log. Added to a sum of losses, it counts as their mean where it is not finite.

    Attributes:
        steps (`int`): By how many steps `Trainer` divides the sum for that mean.
    """

    @classmethod
    def of(cls, loss: torch.Tensor, steps: int) -> "FilteredLoss":
        filtered = loss.as_subclass(cls)
        filtered.steps = steps
        return filtered

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.isnan, torch.isinf):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            if func in (torch.Tensor.add_, torch.Tensor.add) and not isinstance(args[0], cls):
                total, loss = args
                return func(total, torch.where(torch.isfinite(loss), loss, total / loss.steps))
            return func(*args, **(kwargs or {}))
