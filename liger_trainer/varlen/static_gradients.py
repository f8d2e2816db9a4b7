"""The gradients that captured backward passes add to."""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn


class GradientBuffers:
    """One static buffer for the gradient of each parameter that a captured backward adds to.

    `.grad` of the parameter is an alias of its buffer from the end of a backward until it is set to None. So clipping,
    scaling and the optimizer find ordinary tensors, and a second micro-batch adds to the first.
    """

    def __init__(self) -> None:
        self.buffers: dict[nn.Parameter, torch.Tensor] = {}
        self._alias: dict[nn.Parameter, Callable[[], torch.Tensor | None]] = {}
        self._holders: dict[nn.Parameter, int] = {}  # of the buffer's memory while nobody else has it

    def keep(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Take a gradient as the buffer of `parameter`, if it has none yet."""
        if parameter not in self.buffers:
            self.buffers[parameter] = gradient.detach()

    def count_holders(self) -> None:
        """Note how many refer to each buffer while no user does. Called after a capture."""
        for parameter, buffer in self.buffers.items():
            self._holders.setdefault(parameter, _holders(buffer))

    def zero(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set the buffers of those of `parameters` that have one to zero."""
        buffers = [self.buffers[p] for p in parameters if p in self.buffers]
        if buffers:
            torch._foreach_zero_(buffers)

    def in_use(self) -> bool:
        """Return whether a gradient of the user's lies in a buffer."""
        return any(self._is_alias(p) for p in self.buffers)

    def _is_alias(self, p: nn.Parameter) -> bool:
        return p.grad is not None and p.grad.data_ptr() == self.buffers[p].data_ptr()

    def begin(self, learned: list[nn.Parameter]) -> list[nn.Parameter]:
        """Make the buffers ready for a backward that adds to them.

        Returns the parameters whose gradient is a tensor of its own, to which the buffer is added afterwards.
        """
        elsewhere = [p for p in learned if p.grad is not None and not self._is_alias(p)]
        unset = [p for p in learned if p.grad is None]
        for p in unset:
            self._leave_to_its_holders(p)
        self.zero((*elsewhere, *unset))
        return elsewhere

    def end(self, learned: list[nn.Parameter], elsewhere: list[nn.Parameter]) -> None:
        """Hand the gradients out after the backward."""
        for p in elsewhere:
            assert p.grad is not None, "it has one, or it would not be elsewhere"
            p.grad.add_(self.buffers[p])
        for p in learned:
            if p.grad is None:
                alias = self.buffers[p].detach()
                p.grad = alias
                self._alias[p] = weakref.ref(alias)

    def _leave_to_its_holders(self, p: nn.Parameter) -> None:
        """Give a gradient that the user kept, though `.grad` is None, memory of its own."""
        buffer, find = self.buffers[p], self._alias.get(p)
        alias = None if find is None else find()
        if alias is not None:
            alias.data = alias.detach().clone()
        if _holders(buffer) > self._holders[p]:
            raise RuntimeError(
                f"Something holds a view of the gradient of a parameter {tuple(p.shape)}, though its .grad was set to "
                "None. The next backward would write over it, since the step is captured (cuda_graphs). Keep a clone "
                "of the gradient, or set cuda_graphs: false."
            )


def _holders(tensor: torch.Tensor) -> int:
    """Return how many tensors and storages refer to the memory of `tensor`."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)
