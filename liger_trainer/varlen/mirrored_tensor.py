"""Tensors of a GPU with a copy of their values on the host: which tokens belong to images, and sizes of images.

Models put images into the embeddings of text with `masked_scatter`, add visual states to hidden states that a mask
picks, and split what a tower returns by the sizes of images. On a GPU each of these waits for all that was launched
before, some in the backward pass. In place of a `MirroredTensor` mask,
PyTorch gets indices that the host has computed, and `tolist` answers from the host. Any other operation gets the plain
tensor. Once it has been written to, all operations do.
"""

import functools
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from liger_trainer.varlen.host_copies import remember, sent


class MirroredTensor(torch.Tensor):
    """A tensor of a device. `values` are its values on the host, where `values_of` finds them too."""

    values: torch.Tensor
    version: int
    exposed: list[bool]  # filled when its memory is handed out past autograd's versions; views share the list

    @classmethod
    def of(cls, values: torch.Tensor, device: torch.device) -> "MirroredTensor":
        """Make one on `device` of `values` on the host."""
        return cls.around(sent(values, device), values)

    @classmethod
    def around(cls, x: torch.Tensor, values: torch.Tensor, exposed: list[bool] | None = None) -> "MirroredTensor":
        """Make one of `x`, which has `values`. A view gets the `exposed` of what it is a view of."""
        found = x.as_subclass(cls)
        found.values, found.version = values, -1 if x.is_inference() else x._version
        found.exposed = [] if exposed is None else exposed
        remember(found, values, found.exposed)
        return found

    @functools.cached_property
    def indices(self) -> tuple[torch.Tensor, ...]:
        """Where it is true, in each dimension: int64, on its device."""
        return tuple(sent(x.contiguous(), self.device) for x in self.values.nonzero(as_tuple=True))

    @functools.cached_property
    def places(self) -> torch.Tensor:
        """Where it is true, flattened: int64 (N,), on its device."""
        return sent(self.values.flatten().nonzero()[:, 0], self.device)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in _PAST_VERSIONS and isinstance(args[0], cls):
            args[0].exposed.append(True)
        if function in (*_OWN, *_ON_BOTH) and any(map(is_stale, tree_leaves((args, kwargs)))):
            return _plainly(function, args, kwargs)
        if function in _OWN and not kwargs:
            found = _OWN[function](*args)
            if found is not NotImplemented:
                return found
        if function in _ON_BOTH and all(isinstance(x, cls) for x in tree_leaves(args) if isinstance(x, torch.Tensor)):
            on_host = tree_map(lambda x: x.values if isinstance(x, cls) else x, (args, kwargs or {}))
            return cls.around(_plainly(function, args, kwargs), function(*on_host[0], **on_host[1]))
        return _plainly(function, args, kwargs)


def _plainly(function: Any, args: tuple, kwargs: dict | None) -> Any:
    args, kwargs = tree_map(lambda x: _plain(x) if isinstance(x, MirroredTensor) else x, (args, kwargs or {}))
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def is_stale(x: Any) -> bool:
    """Return whether `x` is a `MirroredTensor` with values that may be out of date.

    It has been written to, or it is a tensor of inference mode, where PyTorch counts no writes.
    """
    if not isinstance(x, MirroredTensor):
        return False
    plain = _plain(x)
    return bool(x.exposed) or plain.is_inference() or plain._version != x.version


def _plain(x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)


def _masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    """As `Tensor.masked_scatter`, of a mask (..., 1), which takes or leaves each row of x as a whole."""
    width = x.shape[-1]
    if not isinstance(mask, MirroredTensor) or isinstance(x, MirroredTensor) or mask.values.shape != (*x.shape[:-1], 1):
        return NotImplemented
    if source.numel() != mask.places.numel() * width:
        return NotImplemented
    return x.reshape(-1, width).index_copy(0, mask.places, source.reshape(-1, width)).view(x.shape)


def _getitem(x: Any, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    if not isinstance(x, MirroredTensor):
        return x[_with_indices(parts)] if _picks(parts) else NotImplemented
    if any(isinstance(part, torch.Tensor) for part in parts):
        return NotImplemented
    return MirroredTensor.around(_plain(x)[index], x.values[index], x.exposed)


def _setitem(x: Any, index: Any, value: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    if isinstance(x, MirroredTensor) or not _picks(parts):
        return NotImplemented
    x[_with_indices(parts)] = value
    return None


def _to(x: Any, *args: Any) -> Any:
    """As `Tensor.to`, which returns the same tensor where it is one of that device and dtype already."""
    if not isinstance(x, MirroredTensor):
        return NotImplemented
    plain = _plain(x)
    there = plain.to(*args)
    return x if there is plain else there


def _picks(parts: tuple) -> bool:
    """Return whether a mask of ours alone picks elements: other indices would be combined with it."""
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    return len(tensors) == 1 and isinstance(tensors[0], MirroredTensor) and tensors[0].values.dtype == torch.bool


def _with_indices(parts: tuple) -> tuple:
    found: list[Any] = []
    for part in parts:
        found += part.indices if isinstance(part, MirroredTensor) else (part,)
    return tuple(found)


_OWN = {
    torch.Tensor.masked_scatter: _masked_scatter,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.__setitem__: _setitem,
    torch.Tensor.to: _to,
    torch.Tensor.tolist: lambda x: x.values.tolist() if isinstance(x, MirroredTensor) else NotImplemented,
}
# These hand out the memory, and autograd does not count what is written to it then.
_PAST_VERSIONS = {
    torch.Tensor.data.__get__,
    torch.Tensor.data.__set__,
    torch.Tensor.numpy,
    torch.Tensor.__array__,  # type: ignore[attr-defined]
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.data_ptr,
    torch.Tensor.__dlpack__,
    torch.Tensor.set_,
}
_ON_BOTH = {torch.Tensor.__or__, torch.Tensor.prod, torch.Tensor.__floordiv__, torch.Tensor.__mul__}
