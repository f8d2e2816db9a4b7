"""A device memory of the size that a test wants, on a machine without a GPU: it counts the bytes of CPU tensors.

An operation whose result does not fit raises `torch.OutOfMemoryError`, as the allocator of a GPU does.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from liger_trainer.memory.memory import PinnedMemory


class CountedMemory(TorchDispatchMode):
    """Counts the storages that operations create while the mode is active, from their making to their end.

    Attributes:
        size (`int` or `None`): How many bytes there are. None stands for as many as a plan can want.
        claims (`int` or `None`): How many bytes it says that there are, if that is not true.
        failures (`int`): How many operations did not fit.
        highest (`int`): The most bytes that were there at a time.
        carries (`Transport` or `None`): By which activations go to the host.
    """

    def __init__(self, size=None):
        super().__init__()
        self.size, self.claims, self.now, self.failures, self.highest = size, None, 0, 0, 0
        self._peak = 0
        self._known = {}
        self.carries = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._count(getattr(tensor, "_local_tensor", tensor).untyped_storage())  # of a shard, this rank's part
        return out

    def _count(self, storage):
        key, nbytes = id(storage), storage.nbytes()
        if key in self._known or not nbytes or (self.carries is not None and self.carries.has(storage)):
            return
        if self.size is not None and self.now + nbytes > self.size:
            self.failures += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes.")
        self._known[key] = weakref.ref(storage, lambda _: self._gone(key, nbytes))
        self.now += nbytes
        self._peak, self.highest = max(self._peak, self.now), max(self.highest, self.now)

    def _gone(self, key, nbytes):
        del self._known[key]
        self.now -= nbytes

    def allocated(self):
        return self.now

    def peak(self):
        peak, self._peak = self._peak, self.now
        return peak

    def capacity(self):
        return self.claims or self.size or 1 << 40

    def retries(self):
        return 0

    def transport(self, host_gib):
        return self.carries


class Carries:
    """Carries activations to memory that is not counted, as fast as a test says.

    A call of a layer takes half a second.

    Attributes:
        most (`int`): How many bytes it has taken at most.
    """

    stream = None

    def __init__(self, room=1 << 30, rate=1e15):
        self.host = PinnedMemory(room, self._pin, slab=1 << 20, small=1)
        self.rate, self.clock, self.most = rate, 0.0, 0
        self._slabs = []

    def _pin(self, size):
        with _disable_current_modes():
            self._slabs.append(torch.empty(size, dtype=torch.uint8))
        self.most = max(self.most, self.host.taken + size)
        return self._slabs[-1]

    def has(self, storage):
        """Whether `storage` is of the host's memory."""
        return any(storage.data_ptr() == slab.data_ptr() for slab in self._slabs)

    def mark(self):
        self.clock += 0.5
        return self.clock

    def seconds(self, begin, end):
        return end - begin
