"""A mask of tokens on a GPU whose values the host knows.

Models put images into the embeddings of text with `masked_scatter`, and add visual states to hidden states that a mask
picks. On a GPU, the backward pass of the one and both passes of the other wait until the mask has been counted. From a
`KnownMask` PyTorch gets indices in its place, which the host has computed. Any other operation gets the plain mask.
"""

import functools
from typing import Any

import torch
from torch.utils._pytree import tree_map

from liger_trainer.varlen.host_copies import sent


class KnownMask(torch.Tensor):
    """A boolean tensor of a device. `values` are its values on the host."""

    values: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor, device: torch.device) -> "KnownMask":
        """Make one on `device` of `values` (bool, on the host)."""
        return cls.around(sent(values, device), values)

    @classmethod
    def around(cls, mask: torch.Tensor, values: torch.Tensor) -> "KnownMask":
        """Make one of `mask`, which has `values`."""
        found = mask.as_subclass(cls)
        found.values = values
        return found

    @functools.cached_property
    def indices(self) -> tuple[torch.Tensor, ...]:
        """Where it is true, in each dimension: int64, on its device."""
        return tuple(sent(x.contiguous(), self.device) for x in self.values.nonzero(as_tuple=True))

    @functools.cached_property
    def places(self) -> torch.Tensor:
        """Where it is true, flattened: int64 (N,), on its device."""
        return sent(self.values.flatten().nonzero()[:, 0], self.device)

    def taken(self, index: torch.Tensor, index_on_host: torch.Tensor) -> "KnownMask":
        """The values of (B, S) at the places `index` (N,) of the flattened mask, as (1, N)."""
        plain = self.as_subclass(torch.Tensor).flatten()[index]
        return KnownMask.around(plain[None], self.values.flatten()[index_on_host][None])

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        own = _OWN.get(function)
        if own is not None and not kwargs:
            found = own(*args)
            if found is not NotImplemented:
                return found
        plain = functools.partial(tree_map, lambda x: x.as_subclass(torch.Tensor) if isinstance(x, cls) else x)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*plain(args), **plain(kwargs or {}))


def _masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    """As `Tensor.masked_scatter`, of a mask (..., 1), which takes or leaves each row of x as a whole."""
    width = x.shape[-1]
    if not isinstance(mask, KnownMask) or isinstance(x, KnownMask) or mask.values.shape != (*x.shape[:-1], 1):
        return NotImplemented
    if source.numel() != mask.places.numel() * width:
        return NotImplemented
    return x.reshape(-1, width).index_copy(0, mask.places, source.reshape(-1, width)).view(x.shape)


def _getitem(x: Any, index: Any) -> Any:
    if isinstance(x, KnownMask):
        if any(isinstance(part, torch.Tensor) for part in (index if isinstance(index, tuple) else (index,))):
            return NotImplemented
        return KnownMask.around(x.as_subclass(torch.Tensor)[index], x.values[index])
    return x[_with_indices(index)]


def _setitem(x: Any, index: Any, value: Any) -> Any:
    if isinstance(x, KnownMask):
        return NotImplemented
    x[_with_indices(index)] = value
    return None


def _with_indices(index: Any) -> tuple:
    parts = index if isinstance(index, tuple) else (index,)
    return tuple(one for part in parts for one in (part.indices if isinstance(part, KnownMask) else (part,)))


def _either(x: Any, y: Any) -> Any:
    if not (isinstance(x, KnownMask) and isinstance(y, KnownMask)):
        return NotImplemented
    return KnownMask.around(x.as_subclass(torch.Tensor) | y.as_subclass(torch.Tensor), x.values | y.values)


_OWN = {
    torch.Tensor.masked_scatter: _masked_scatter, torch.Tensor.__getitem__: _getitem,
    torch.Tensor.__setitem__: _setitem, torch.Tensor.__or__: _either,
}  # fmt: skip
