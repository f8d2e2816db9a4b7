"""The memory of the device: what is allocated, what its peak was, and how much a plan may fill."""

from typing import Any, Protocol

import torch

from liger_trainer.memory.pinned_memory import GIB, HostCopier, PinnedMemory, host_bytes_allowed

RESERVE = 0.06  # of the device's memory: for fragmentation
RESERVE_OF_BUDGET = 0.002  # of a budget that the user has set: for what differs from step to step


class SupportsHostCopies(Protocol):
    """Copies between the device and the host, as far as the planner uses them, such as `HostCopier`."""

    host: PinnedMemory

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Return the stream of the copies; None if the device copies at once."""

    @property
    def rate(self) -> float:
        """Bytes a second in the slower direction."""

    def mark(self) -> Any:
        """Return the device's time after all that it has been given until now, for `seconds`."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds from one mark to another."""


class DeviceMemory(Protocol):
    """A device's memory in bytes of this process's tensors, as far as the planner reads it, such as `GpuMemory`."""

    highest: int  # the peak until torch's own counter was last reset

    def allocated(self) -> int:
        """Return the bytes that are allocated now."""

    def peak(self) -> int:
        """Return the most bytes since it was last called."""

    def capacity(self) -> int:
        """Return the most bytes that tensors could take up."""

    def retries(self) -> int:
        """Return how often the allocator has had to release its cache."""

    def transport(self, host_gib: float | None) -> SupportsHostCopies | None:
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

    def transport(self, host_gib: float | None) -> HostCopier | None:
        """Return what swaps out to `host_gib` GiB of the host's memory, or to a part of what is free."""
        room = host_bytes_allowed(host_gib)
        return HostCopier(PinnedMemory(room), self.device) if room else None


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
