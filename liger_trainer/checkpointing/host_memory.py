"""The host's memory, as far as activations may wait there for their backward pass.

It is page-locked, so that the GPU copies to and from it while it computes, and taken in slabs that are used again from
step to step. How it is locked is in `page_locked.py`.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import psutil  # type: ignore[import-untyped]  # accelerate needs it
import torch

from liger_trainer._logging import logger
from liger_trainer.checkpointing.memory import GIB
from liger_trainer.checkpointing.page_locked import page_locked

SMALL = 1 << 20  # bytes: tensors that are smaller stay on the GPU
SHARE = 0.5  # of what is free, for all processes of this machine
TRIED = 64 << 20  # bytes that are copied to measure the rate
_CGROUP = Path("/sys/fs/cgroup")


class Slot:
    """Bytes of a slab, until nobody holds this any more.

    Attributes:
        bytes (`torch.Tensor`): uint8 (n,), on the host.
    """

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
    """Memory of the host for the activations of one process.

    Args:
        room (`int`): How many bytes it may take at most.
        lock (`Callable`): Makes the uint8 tensor of a slab from its size.
        slab (`int`): How many bytes a slab has, unless a tensor has more.
        small (`int`): Tensors of fewer bytes stay on the GPU.
    """

    def __init__(
        self, room: int, lock: Callable[[int], torch.Tensor] = page_locked, slab: int = GIB, small: int = SMALL
    ):  # fmt: skip
        self.room, self.small, self._lock, self._slab = room, small, lock, slab
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
            self._slabs.append(_Slab(self._lock(new)))
        except RuntimeError as error:  # the system locks less than it has free
            logger.warning(
                f"The host has locked {self.taken / GIB:.0f} GiB for activations and no more ({error}). The others "
                "stay on the GPU. Set host_memory_budget to fewer GiB."
            )
            self.room = self.taken
            return None
        return self._slabs[-1].take(size)

    def release(self) -> None:
        """Give back everything that is not in use."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # copies of what nobody wants any more may go on
        self._slabs = [slab for slab in self._slabs if slab.slots]


class Transport(Protocol):
    """Carries bytes between a device and the host's memory.

    Attributes:
        host (`HostMemory`): The memory.
        stream (`torch.cuda.Stream` or `None`): On which the device copies. None: it copies at once.
        rate (`float`): Bytes a second, in the slower direction.
    """

    host: HostMemory
    stream: torch.cuda.Stream | None

    @property
    def rate(self) -> float: ...

    def mark(self) -> Any:
        """Mark the point that the device has come to when it has done what it has been given until now."""

    def seconds(self, begin: Any, end: Any) -> float:
        """How long it has taken from one mark to another."""


class GpuTransport:
    """That of a CUDA GPU."""

    def __init__(self, host: HostMemory, device: torch.device):
        self.host, self.device, self.stream = host, device, torch.cuda.Stream(device)

    @functools.cached_property
    def rate(self) -> float:
        """Measured when it is first asked for, which waits for the GPU."""
        on_gpu, on_host = torch.empty(TRIED, dtype=torch.uint8, device=self.device), page_locked(TRIED)
        slowest = 0.0
        for to, of in ((on_host, on_gpu), (on_gpu, on_host)):
            to.copy_(of, non_blocking=True)
            begin = self.mark()
            to.copy_(of, non_blocking=True)
            slowest = max(slowest, self.seconds(begin, self.mark()))
        return TRIED / slowest

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
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
