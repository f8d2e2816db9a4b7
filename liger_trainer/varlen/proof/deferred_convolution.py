"""Delays a convolution until the layer splits its result into queries, keys and values.

A layer transposes the result to (B, L, C) and calls `torch.split`. The rule of linear attention then copies each part,
because the parts of one tensor are not contiguous. With the split known before the convolution runs, the kernel writes
three tensors, and its backward reads three gradients.

`DeferredConvolution` is a plain class with `__torch_function__`, like `DeferredLogits`. Any other use of it computes
the result as one tensor.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

_PARTS = 3  # the parts that `liger_triton.short_conv` can write
_whole_is_refused = contextvars.ContextVar("a result as one tensor is refused", default=False)


@contextlib.contextmanager
def refuse_whole() -> Iterator[None]:
    """Context manager: computing a result as one tensor raises RuntimeError. A proof thus shows that it is split."""
    token = _whole_is_refused.set(True)
    try:
        yield
    finally:
        _whole_is_refused.reset(token)


class DeferredConvolution:
    """The result of a convolution that has not run yet.

    Args:
        compute (`Callable`): Called with None, returns the result (B, C, L). Called with three widths that sum to C,
            returns its parts (B, L, width), each contiguous.
        shape (`torch.Size`): (B, C, L).
        is_transposed (`bool`, *optional*, defaults to `False`): Whether the layer has transposed it to (B, L, C).
    """

    __slots__ = ("_compute", "_results", "_shape", "is_transposed")

    def __init__(
        self, compute: Callable[[tuple[int, ...] | None], Any], shape: torch.Size, is_transposed: bool = False
    ):
        self._compute = compute
        self._shape = shape
        self.is_transposed = is_transposed
        self._results: dict[tuple[int, ...] | None, Any] = {}  # by the argument of `compute`

    def _transposed(self) -> "DeferredConvolution":
        other = DeferredConvolution(self._compute, self._shape, not self.is_transposed)
        other._results = self._results
        return other

    def _result(self, widths: tuple[int, ...] | None) -> Any:
        if widths not in self._results:
            self._results[widths] = self._compute(widths)
        return self._results[widths]

    @property
    def shape(self) -> torch.Size:
        batch, channels, length = self._shape
        return torch.Size((batch, length, channels)) if self.is_transposed else self._shape

    def whole(self) -> torch.Tensor:
        """Compute the result as one tensor."""
        if _whole_is_refused.get():
            raise RuntimeError("the result of its convolution is not only cut into queries, keys and values")
        result = self._result(None)
        return result.transpose(1, 2) if self.is_transposed else result

    def transpose(self, dim0: int, dim1: int) -> Any:
        if {dim0 % 3, dim1 % 3} == {1, 2}:
            return self._transposed()
        return self.whole().transpose(dim0, dim1)

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[torch.Tensor, ...]:
        """Split like `torch.Tensor.split`. Three parts of the channels are computed as three contiguous tensors."""
        by_channel = self.is_transposed and dim % 3 == 2 and None not in self._results  # code may have written to it
        if by_channel and isinstance(split_size, list | tuple) and len(split_size) == _PARTS and min(split_size) > 0:
            return self._result(tuple(split_size))
        return self.whole().split(split_size, dim)

    def __getitem__(self, index: Any) -> Any:
        """Return itself for slices that take everything. Some layers slice to remove what a cache has appended."""
        parts = index if isinstance(index, tuple) else (index,)
        takes_all = len(parts) <= 3 and all(map(_takes_all, parts, self.shape))
        return self if takes_all else self.whole()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.split:
            return _split(*args, **kwargs)
        return func(*tree_map(_whole, args), **tree_map(_whole, kwargs))


def _special_methods() -> set[str]:
    """List the methods of tensors that Python looks up on the class, such as `__add__`: `__getattr__` misses them."""
    names = set(dir(torch.Tensor)) - set(dir(object))
    special = {name for name in names if name.startswith("__")}
    special |= {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
    special -= {*vars(DeferredConvolution), "__torch_dispatch__", "__setstate__", "__deepcopy__"}
    return {name for name in special if callable(getattr(torch.Tensor, name))}


def _method_of_whole(name: str) -> Callable:
    return lambda self, *args: getattr(self.whole(), name)(*map(_whole, args))


for _name in _special_methods():
    setattr(DeferredConvolution, _name, _method_of_whole(_name))


def _takes_all(part: Any, size: int) -> bool:
    return isinstance(part, slice) and part.indices(size) == (0, size, 1)


def _split(tensor: Any, split_size_or_sections: Any, dim: int = 0) -> tuple[torch.Tensor, ...]:
    return tensor.split(split_size_or_sections, dim)


def _whole(x: Any) -> Any:
    return x.whole() if isinstance(x, DeferredConvolution) else x
