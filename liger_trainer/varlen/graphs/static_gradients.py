"""The gradients that captured backward passes add to."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn


class Handed(NamedTuple):
    """What `GradientBuffers.end` needs to hand the gradients of one backward to their parameters.

    Attributes:
        fresh (`list`): The parameters with a `.grad` that is not an alias of their buffer yet.
        kept (`dict`): The earlier values of buffers that a tensor of the user's still refers to.
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
        self._alias: dict[nn.Parameter, Callable[[], torch.Tensor | None]] = {}  # weak references to each last `.grad`
        self._holders: dict[nn.Parameter, int] = {}  # references to each buffer's memory while users have none

    def keep(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Take a gradient as the buffer of `parameter`, if it has none yet."""
        if parameter not in self.buffers:
            self.buffers[parameter] = gradient.detach()

    def count_holders(self) -> None:
        """Note how many references each buffer has without any of the user's. Called after a capture."""
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
        """Return whether a gradient of the user's lies in a buffer: `.grad`, or a tensor or view kept from it."""
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
        """Context manager: at the end, the present buffers get their values back, even if the code inside fails.

        Between two micro-batches the buffers hold the user's gradients, and a capture runs backward passes that add to
        them.
        """
        buffers = list(self.buffers.values())
        values = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            if buffers:
                torch._foreach_copy_(buffers, values)

    def begin(self, learned: list[nn.Parameter]) -> Handed:
        """Make the buffers ready for a backward that adds to them. `end` then hands the gradients out.

        The user may have kept a gradient, though `.grad` is another tensor or None now. It keeps its values: the kept
        tensor gets memory of its own. If views of it are left, `end` puts the buffer's earlier values back instead.
        """
        fresh = [p for p in learned if not self._is_alias(p)]
        for p in fresh:
            self._move_kept_alias(p)
        kept = {p: self.buffers[p].clone() for p in fresh if self._is_held(p)}
        self.zero(fresh)
        return Handed(fresh, kept)

    def end(self, handed: Handed) -> None:
        """Set or add to `.grad` of each parameter after the backward."""
        gradients = {}
        for p in handed.fresh:
            buffer = self.buffers[p]
            if p in handed.kept:
                gradients[p] = buffer.clone()
                buffer.copy_(handed.kept[p])
            else:
                gradients[p] = buffer.detach()
        # Only now, because a `.grad` that the user has set may lie in the buffer of another parameter.
        for p, gradient in gradients.items():
            if p.grad is not None:
                p.grad.add_(gradient)
                continue
            p.grad = gradient
            if p not in handed.kept:
                self._alias[p] = weakref.ref(gradient)

    def _move_kept_alias(self, p: nn.Parameter) -> None:
        """Give the last alias memory of its own, if the user kept it and `.grad` is another tensor now.

        It stays in the buffer while views of it do, because they have to follow it.
        """
        reference = self._alias.get(p)
        alias = None if reference is None else reference()
        if alias is None or alias.data_ptr() != self.buffers[p].data_ptr():
            self._alias.pop(p, None)
        elif _holders(alias) == self._holders[p] + 1:
            del self._alias[p]
            alias.data = alias.detach().clone()

    def _is_held(self, p: nn.Parameter) -> bool:
        """Return whether there are views of a buffer."""
        return _holders(self.buffers[p]) > self._holders[p]


def _holders(tensor: torch.Tensor) -> int:
    """Return how many tensors and storages refer to the memory of `tensor`."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)
