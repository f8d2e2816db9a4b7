"""Pinned memory of the host for activations that are swapped out, and the copies between it and the GPU.

The GPU copies to and from pinned memory while it computes. It is taken in slabs that are used again from step to step.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # accelerate needs it
import torch

from liger_trainer._logging import logger

GIB = 2**30
SMALL = 1 << 20  # bytes: smaller tensors stay on the GPU
SHARE = 0.5  # of the host's free memory, for all processes of this machine
TRIED = 64 << 20  # bytes that are copied to measure the rate
_CGROUP = Path("/sys/fs/cgroup")


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


class Slot:
    """Bytes of a slab, uint8 (n,), as long as this object lives."""

    def __init__(self, slab: "_Slab", start: int, size: int):
        self._slab, self.bytes = slab, slab.memory[start : start + size]
        slab.slots += 1

    def __del__(self) -> None:
        self._slab.slots -= 1


class _Slab:
    """Memory that is handed out from its start to its end, and again when all of it has come back."""

    def __init__(self, memory: torch.Tensor):
        self.memory = memory
        self.slots = 0  # in use
        self._used = 0  # bytes from the start

    def take(self, size: int) -> Slot | None:
        if not self.slots:
            self._used = 0
        start, end = self._used, self._used + _aligned(size)
        if end > len(self.memory):
            return None
        self._used = end
        return Slot(self, start, size)


def _aligned(size: int) -> int:
    return -(-size // 512) * 512


class PinnedMemory:
    """At most `room` bytes of pinned memory for the activations of one process.

    `pin` makes the uint8 tensor of a slab. It has `slab` bytes unless a tensor has more: PyTorch pins powers of two.
    Tensors of fewer than `small` bytes stay on the GPU.
    """

    def __init__(self, room: int, pin: Callable[[int], torch.Tensor] = _pinned, slab: int = GIB, small: int = SMALL):
        self.room = room
        self.small = small
        self._pin = pin
        self._slab = slab
        self._slabs: list[_Slab] = []
        self.is_full = False  # whether it has had no room for a tensor

    @property
    def taken(self) -> int:
        return sum(len(slab.memory) for slab in self._slabs)

    def take(self, size: int) -> Slot | None:
        """Return a slot of `size` bytes, or None if the room is used up."""
        for slab in self._slabs:
            slot = slab.take(size)
            if slot is not None:
                return slot
        new = max(min(self._slab, self.room - self.taken), _aligned(size))  # the last slab may be a smaller one
        if self.taken + new > self.room:
            self.is_full = True
            return None
        try:
            self._slabs.append(_Slab(self._pin(new)))
        except RuntimeError as error:  # the system pins less than it has free
            logger.warning(
                f"The host has pinned {self.taken / GIB:.0f} GiB for activations and no more ({error}). Set "
                "host_memory_budget to fewer GiB."
            )
            self.room, self.is_full = self.taken, True
            return None
        return self._slabs[-1].take(size)

    def release(self) -> None:
        """Free all slabs that are not in use."""
        self._slabs = [slab for slab in self._slabs if slab.slots]
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # copies may still run
            torch._C._host_emptyCache()  # PyTorch 2.11 has no public name for it


class HostCopier:
    """Copies between a CUDA GPU and pinned memory, on a stream of its own."""

    def __init__(self, host: PinnedMemory, device: torch.device):
        self.host = host
        self.device = device
        self.stream = torch.cuda.Stream(device)

    @functools.cached_property
    def rate(self) -> float:
        """Bytes a second in the slower direction. The first read measures them and waits for the GPU."""
        on_gpu, on_host = torch.empty(TRIED, dtype=torch.uint8, device=self.device), _pinned(TRIED)
        slowest = 0.0
        for to, of in ((on_host, on_gpu), (on_gpu, on_host)):
            to.copy_(of, non_blocking=True)
            begin = self.mark()
            to.copy_(of, non_blocking=True)
            slowest = max(slowest, self.seconds(begin, self.mark()))
        return TRIED / slowest

    def mark(self) -> torch.cuda.Event:
        """Return an event after all that the GPU has been given until now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds from one mark to another."""
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def host_bytes_allowed(budget_gib: float | None) -> int:
    """Return how many bytes may be pinned: the budget, or this process's part of the free memory."""
    if budget_gib is not None:
        return int(budget_gib * GIB)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(min(psutil.virtual_memory().available, _left_in_cgroup()) * SHARE) // processes


def _left_in_cgroup() -> float:
    """Return how many bytes a container may still take; infinite without a limit."""
    for most, now, cache in (
        ("memory.max", "memory.current", "inactive_file "),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file "),
    ):
        try:
            limit = int((_CGROUP / most).read_text())
            used = int((_CGROUP / now).read_text())
            lines = ((_CGROUP / most).parent / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # the file is missing, or it says "max"
            continue
        reclaimable = sum(int(line.split()[1]) for line in lines if line.startswith(cache))
        return limit - used + reclaimable
    return float("inf")
