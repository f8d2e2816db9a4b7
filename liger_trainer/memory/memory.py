"""The memory of the device, and the host's pinned memory to which activations are swapped out.

The GPU copies to and from pinned memory while it computes. It is taken in slabs that are used again from step to step.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import psutil  # type: ignore[import-untyped]  # accelerate needs it
import torch

from liger_trainer._logging import logger

GIB = 2**30
RESERVE = 0.06  # of the device's memory: for fragmentation
RESERVE_OF_BUDGET = 0.002  # of a budget that the user has set: for what differs from step to step
SMALL = 1 << 20  # bytes: smaller tensors stay on the GPU
SHARE = 0.5  # of the host's free memory, for all processes of this machine
TRIED = 64 << 20  # bytes that are copied to measure the rate
_CGROUP = Path("/sys/fs/cgroup")


class HostTransport(Protocol):
    """What the planner knows of copies between the device and the host, such as `Transport`."""

    host: "PinnedMemory"

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream of the copies; None if the device copies at once."""

    @property
    def rate(self) -> float:
        """Bytes a second in the slower direction."""

    def mark(self) -> Any:
        """Return the device's time after all that it has been given until now, for `seconds`."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds from one mark to another."""


class DeviceMemory(Protocol):
    """What the planner asks of a device's memory, in bytes of this process's tensors, such as `GpuMemory`."""

    highest: int  # the peak until torch's own counter was last reset

    def allocated(self) -> int:
        """Return the bytes that are allocated now."""

    def peak(self) -> int:
        """Return the most bytes since it was last called."""

    def capacity(self) -> int:
        """Return the most bytes that tensors could take up."""

    def retries(self) -> int:
        """Return how often the allocator has had to release its cache."""

    def transport(self, host_gib: float | None) -> HostTransport | None:
        """Return what copies to `host_gib` GiB of the host's memory; None without room there."""


class GpuMemory:
    """The memory of a CUDA device, in bytes of this process's tensors, as its allocator counts it.

    `peak` returns the most bytes since it was last called. It resets torch's own counter,
    `torch.cuda.max_memory_allocated`; `highest` is the peak until then.
    """

    def __init__(self, device: torch.device):
        self.device, self.highest = device, 0

    def _bytes(self, kind: str, which: str) -> int:
        return torch.cuda.memory_stats_as_nested_dict(self.device)[kind]["all"][which]

    def allocated(self) -> int:
        return self._bytes("allocated_bytes", "current")

    def peak(self) -> int:
        peak = self._bytes("allocated_bytes", "peak")
        self.highest = max(self.highest, peak)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def capacity(self) -> int:
        """Return the most bytes that tensors could take up, as long as other processes take no more."""
        free, total = torch.cuda.mem_get_info(self.device)
        ours = self._bytes("reserved_bytes", "current")
        return min(free + ours, int(torch.cuda.get_per_process_memory_fraction(self.device) * total))

    def retries(self) -> int:
        """Return how often the allocator has had to release its cache."""
        return torch.cuda.memory_stats_as_nested_dict(self.device)["num_alloc_retries"]

    def transport(self, host_gib: float | None) -> "Transport | None":
        """Return what swaps out to `host_gib` GiB of the host's memory, or to a part of what is free."""
        room = room_of(host_gib)
        return Transport(PinnedMemory(room), self.device) if room else None


def limit_of(budget_gib: float | None, capacity: int) -> int:
    """Return how many bytes a plan may fill: the budget, or the device's memory if that is less, without a reserve."""
    fits = int(capacity * (1 - RESERVE))
    if budget_gib is None:
        return fits
    return min(fits, int(budget_gib * GIB * (1 - RESERVE_OF_BUDGET)))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that the device's memory is full. cuBLAS and Triton have messages of their own."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("CUDA out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text)
    )


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


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
        """Return a slot of `size` bytes, or None if there is no room left."""
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


class Transport:
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


def room_of(budget_gib: float | None) -> int:
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
        except (OSError, ValueError):  # there is no such file, or it says "max"
            continue
        reclaimable = sum(int(line.split()[1]) for line in lines if line.startswith(cache))
        return limit - used + reclaimable
    return float("inf")
