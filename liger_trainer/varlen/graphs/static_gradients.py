"""The gradients that captured backward passes add to."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn


class Handed(NamedTuple):
    """The gradients that one backward hands out.

    Attributes:
        fresh (`list`): The parameters with a gradient that was not yet an alias of their buffer.
        kept (`dict`): The values of those buffers that something of the user's refers to.
    """

    fresh: list[nn.Parameter]
    kept: dict[nn.Parameter, torch.Tensor]


class GradientBuffers:
    """One static buffer for the gradient of each parameter that a captured backward adds to.

    `.grad` of the parameter is an alias of its buffer from the end of a backward until it is set to None. So clipping,
    scaling and the optimizer find ordinary tensors, and a second micro-batch adds to the first.
    """

    def __init__(self) -> None:
        self.buffers: dict[nn.Parameter, torch.Tensor] = {}
        self._alias: dict[nn.Parameter, Callable[[], torch.Tensor | None]] = {}
        self._holders: dict[nn.Parameter, int] = {}  # of the buffer's memory, while only we refer to it

    def keep(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Take a gradient as the buffer of `parameter`, if it has none yet."""
        if parameter not in self.buffers:
            self.buffers[parameter] = gradient.detach()

    def count_holders(self) -> None:
        """Note how many refer to each buffer while no user does. Called after a capture."""
        for parameter, buffer in self.buffers.items():
            self._holders.setdefault(parameter, _holders(buffer))

    def drop_new(self) -> None:
        """Forget the buffers of a capture that has failed: no graph adds to them."""
        for parameter in self.buffers.keys() - self._holders.keys():
            del self.buffers[parameter]

    def zero(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set the buffers of `parameters` to zero, as far as they have one."""
        buffers = [self.buffers[p] for p in parameters if p in self.buffers]
        if buffers:
            torch._foreach_zero_(buffers)

    def in_use(self) -> bool:
        """Return whether a gradient of the user's lies in a buffer: `.grad`, or something that was kept of it."""
        if any(self._is_alias(p) for p in self.buffers):
            return True
        for p in self.buffers:
            self._move_kept_alias(p)
        return any(self._is_held(p) for p in self.buffers)

    def _is_alias(self, p: nn.Parameter) -> bool:
        buffer = self.buffers[p]
        return p.grad is not None and p.grad.data_ptr() == buffer.data_ptr() and p.grad.stride() == buffer.stride()

    @property
    def size(self) -> int:
        """Return how many bytes all buffers take."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Context manager: buffers of now have their values back at the end, also where the code inside fails.

        A capture runs backward passes that add to them. Between two micro-batches they hold the user's gradients.
        """
        buffers = list(self.buffers.values())
        values = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            if buffers:
                torch._foreach_copy_(buffers, values)

    def begin(self, learned: list[nn.Parameter]) -> Handed:
        """Make the buffers ready for a backward that adds to them. `end` hands out what it has added.

        A gradient that the user kept, though `.grad` is another tensor or None now, keeps its values: the tensor itself
        gets memory of its own, and where views of it are left the buffer gets its values back afterwards.
        """
        fresh = [p for p in learned if not self._is_alias(p)]
        for p in fresh:
            self._move_kept_alias(p)
        kept = {p: self.buffers[p].clone() for p in fresh if self._is_held(p)}
        self.zero(fresh)
        return Handed(fresh, kept)

    def end(self, handed: Handed) -> None:
        """Hand the gradients out after the backward."""
        for p in handed.fresh:
            buffer = self.buffers[p]
            values = handed.kept.get(p)
            gradient = buffer.detach()
            if values is not None:
                gradient = buffer.clone()
                buffer.copy_(values)
            if p.grad is not None:
                p.grad.add_(gradient)
                continue
            p.grad = gradient
            if values is None:
                self._alias[p] = weakref.ref(gradient)

    def _move_kept_alias(self, p: nn.Parameter) -> None:
        """Give what was `.grad` memory of its own, if the user kept it and `.grad` is something else now."""
        find = self._alias.pop(p, None)
        alias = None if find is None else find()
        if alias is not None:
            alias.data = alias.detach().clone()

    def _is_held(self, p: nn.Parameter) -> bool:
        """Return whether there are views of a buffer."""
        return _holders(self.buffers[p]) > self._holders[p]


def _holders(tensor: torch.Tensor) -> int:
    """Return how many tensors and storages refer to the memory of `tensor`."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)
