"""The memory of the device: what tensors take up now, and how much they may."""

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from liger_trainer.memory.host_memory import Transport

GIB = 2**30
RESERVE = 0.06  # of what tensors may take up: for what the allocator cannot use, being in pieces
RESERVE_OF_BUDGET = 0.002  # of a budget that the user has set: for what is not the same in every step


class Memory(Protocol):
    """What is asked of a device. All sizes are bytes of tensors of this process.

    Attributes:
        highest (`int`): The most bytes until `peak` was last called.
    """

    highest: int

    def allocated(self) -> int:
        """Bytes of the tensors that exist."""

    def peak(self) -> int:
        """The most bytes since this was last called."""

    def capacity(self) -> int:
        """How many bytes tensors could take up at most, if no other process takes more of the device's memory."""

    def retries(self) -> int:
        """How often the allocator has had to give back what it had cached, because nothing else was left."""

    def transport(self, host_gib: float | None) -> "Transport | None":
        """What carries activations to at most `host_gib` GiB of the host's memory, or a part of what is free."""


class GpuMemory:
    """The memory of a CUDA device, as its allocator counts it.

    To count a peak anew resets torch's own counter, `torch.cuda.max_memory_allocated`.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.highest = 0

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
        free, total = torch.cuda.mem_get_info(self.device)
        ours = self._bytes("reserved_bytes", "current")
        return min(free + ours, int(torch.cuda.get_per_process_memory_fraction(self.device) * total))

    def retries(self) -> int:
        return torch.cuda.memory_stats_as_nested_dict(self.device)["num_alloc_retries"]

    def transport(self, host_gib: float | None) -> "Transport | None":
        from liger_trainer.memory.host_memory import HostMemory, Transport, room_of

        room = room_of(host_gib)
        return Transport(HostMemory(room), self.device) if room else None


def memory_of(device: torch.device) -> Memory | None:
    """The memory of `device`, or None if it has none that can be measured."""
    return GpuMemory(device) if device.type == "cuda" else None


def limit_of(budget_gib: float | None, capacity: int) -> int:
    """How many bytes a plan may fill: the budget that was set, as far as the device has it, less a reserve."""
    fits = int(capacity * (1 - RESERVE))
    if budget_gib is None:
        return fits
    return min(fits, int(budget_gib * GIB * (1 - RESERVE_OF_BUDGET)))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that the device's memory is full. cuBLAS and Triton have messages of their own for that."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("CUDA out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text)
    )
