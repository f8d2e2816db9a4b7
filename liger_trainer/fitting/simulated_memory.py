"""Simulates the memory of a GPU: counts the bytes of the tensors of a step."""

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALIGNED = 512  # bytes; the GPU's allocator rounds up to multiples of it


class SimulatedMemory(TorchDispatchMode):
    """Stands in for `GpuMemory`: counts the tensors that are made while the mode is active, until they are freed.

    Args:
        size (`int`): Bytes of the GPU.

    Attributes:
        highest (`int`): The most bytes in use since it was last set.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size = size
        self.highest = self._now = self._peak = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addmm.dtype_out:  # torch 2.11 cannot infer its shape; the result is in `out`
            return kwargs["out"]
        out = func(*args, **(kwargs or {}))
        self.count(tensor for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor))
        return out

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors, also ones that were made before the mode was active."""
        for tensor in tensors:
            if tensor.device.type == "meta":  # stands for a tensor on the host
                continue
            storage = tensor.untyped_storage()
            key = id(storage)
            size = -(-storage.nbytes() // ALIGNED) * ALIGNED
            if key not in self._known and size:
                self._known[key] = weakref.ref(storage, functools.partial(self._gone, key, size))
                self.add(size)

    def _gone(self, key: int, size: int, _: weakref.ref) -> None:
        del self._known[key]
        self.add(-size)

    def add(self, size: int) -> None:
        """Count bytes that no tensor stands for."""
        self._now += size
        self._peak = max(self._peak, self._now)
        self.highest = max(self.highest, self._now)

    def allocated(self) -> int:
        return self._now

    def peak(self) -> int:
        peak, self._peak = self._peak, self._now
        return peak

    def capacity(self) -> int:
        return self.size

    def retries(self) -> int:
        return 0

    def transport(self, host_gib: float | None) -> None:
        """Return None: without a GPU, the time of an offload to the host is unknown."""
