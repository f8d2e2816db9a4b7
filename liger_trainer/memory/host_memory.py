"""The host's memory, as far as activations may wait there for their backward pass.

It is pinned, so that the GPU copies to and from it while it computes, and taken in slabs that are used again from step
to step.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # accelerate needs it
import torch

from liger_trainer._logging import logger
from liger_trainer.memory.memory import GIB

SMALL = 1 << 20  # bytes: tensors that are smaller stay on the GPU
SHARE = 0.5  # of what is free, for all processes of this machine
TRIED = 64 << 20  # bytes that are copied to measure the rate
_CGROUP = Path("/sys/fs/cgroup")


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class Slot:
    """Bytes of a slab, uint8 (n,), until this is not held any more."""

    def __init__(self, slab: "_Slab", start: int, size: int):
        self._slab, self.bytes = slab, slab.memory[start : start + size]
        slab.slots += 1

    def __del__(self) -> None:
        self._slab.slots -= 1


class _Slab:
    """Memory that is given away from its start to its end, and again when all of it has come back."""

    def __init__(self, memory: torch.Tensor):
        self.memory, self.slots, self._used = memory, 0, 0

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


class HostMemory:
    """At most `room` bytes of the host for the activations of one process.

    `pin` makes the uint8 tensor of a slab, which has `slab` bytes (PyTorch pins powers of two) unless a tensor has
    more. Tensors of fewer than `small` bytes stay on the GPU.
    """

    def __init__(self, room: int, pin: Callable[[int], torch.Tensor] = _pinned, slab: int = GIB, small: int = SMALL):
        self.room, self.small, self._pin, self._slab = room, small, pin, slab
        self._slabs: list[_Slab] = []

    @property
    def taken(self) -> int:
        """How many bytes it has taken."""
        return sum(len(slab.memory) for slab in self._slabs)

    def take(self, size: int) -> Slot | None:
        """Room for `size` bytes, or None if there is none left."""
        for slab in self._slabs:
            if (slot := slab.take(size)) is not None:
                return slot
        new = max(min(self._slab, self.room - self.taken), _aligned(size))  # the last slab may be a smaller one
        if self.taken + new > self.room:
            return None
        try:
            self._slabs.append(_Slab(self._pin(new)))
        except RuntimeError as error:  # the system pins less than it has free
            logger.warning(
                f"The host has pinned {self.taken / GIB:.0f} GiB for activations and no more ({error}). The others "
                "stay on the GPU. Set host_memory_budget to fewer GiB."
            )
            self.room = self.taken
            return None
        return self._slabs[-1].take(size)

    def release(self) -> None:
        """Give back everything that is not in use."""
        self._slabs = [slab for slab in self._slabs if slab.slots]
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # copies of what is not wanted any more may go on
            torch._C._host_emptyCache()  # PyTorch 2.11 has no public name for it


class Transport:
    """Carries bytes between a CUDA GPU and the host's memory, on a stream of its own."""

    def __init__(self, host: HostMemory, device: torch.device):
        self.host, self.device, self.stream = host, device, torch.cuda.Stream(device)

    @functools.cached_property
    def rate(self) -> float:
        """Bytes a second, in the slower direction. Measured when it is first asked for, which waits for the GPU."""
        on_gpu, on_host = torch.empty(TRIED, dtype=torch.uint8, device=self.device), _pinned(TRIED)
        slowest = 0.0
        for to, of in ((on_host, on_gpu), (on_gpu, on_host)):
            to.copy_(of, non_blocking=True)
            begin = self.mark()
            to.copy_(of, non_blocking=True)
            slowest = max(slowest, self.seconds(begin, self.mark()))
        return TRIED / slowest

    def mark(self) -> torch.cuda.Event:
        """Mark the point that the GPU has come to when it has done what it has been given until now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """How long it has taken from one mark to another."""
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def room_of(budget_gib: float | None) -> int:
    """How many bytes of the host's memory activations may take: the budget, or this process's part of what is free."""
    if budget_gib is not None:
        return int(budget_gib * GIB)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(min(psutil.virtual_memory().available, _left_in_cgroup()) * SHARE) // processes


def _left_in_cgroup() -> float:
    """How many bytes a container may still take; infinite where there is no such limit."""
    for most, now, cache in (
        ("memory.max", "memory.current", "inactive_file "),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file "),
    ):
        try:
            limit, used = int((_CGROUP / most).read_text()), int((_CGROUP / now).read_text())
            lines = ((_CGROUP / most).parent / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # there is no such file, or it says "max"
            continue
        return limit - used + sum(int(line.split()[1]) for line in lines if line.startswith(cache))
    return float("inf")
