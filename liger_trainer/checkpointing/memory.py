"""The memory of the device: what tensors take up now, and how much they may."""

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from liger_trainer.checkpointing.host_memory import Transport

GIB = 2**30
RESERVE = 0.06  # of what tensors may take up: for what the allocator cannot use, being in pieces
RESERVE_OF_BUDGET = 0.002  # of a budget that the user has set: for what is not the same in every step


class Memory(Protocol):
    """What is asked of a device. All sizes are bytes of tensors of this process.

    Attributes:
        highest (`int`): The most bytes until `start_peak` was last called.
    """

    highest: int

    def allocated(self) -> int:
        """Bytes of the tensors that exist."""

    def start_peak(self) -> None:
        """Count the peak from here."""

    def peak(self) -> int:
        """The most bytes since `start_peak`."""

    def capacity(self) -> int:
        """How many bytes tensors could take up at most, if nobody else's part of the device's memory grows."""

    def release(self) -> None:
        """Give back what is not in use."""

    def transport(self, host_gib: float | None) -> "Transport | None":
        """What carries activations to the host's memory and back; None if there is nothing of that kind.

        Args:
            host_gib (`float`, *optional*): How many GiB it may take there; without it, a part of what is free.
        """


class GpuMemory:
    """The memory of a CUDA device, as its allocator counts it.

    To count a peak anew resets torch's own counter, `torch.cuda.max_memory_allocated`.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.highest = 0

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def start_peak(self) -> None:
        self.highest = max(self.highest, self.peak())
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def capacity(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        ours = torch.cuda.memory_reserved(self.device)
        return min(free + ours, int(torch.cuda.get_per_process_memory_fraction(self.device) * total))

    def release(self) -> None:
        torch.cuda.empty_cache()

    def transport(self, host_gib: float | None) -> "Transport | None":
        from liger_trainer.checkpointing.host_memory import GpuTransport, HostMemory, room_of

        room = room_of(host_gib)
        return GpuTransport(HostMemory(room), self.device) if room else None


def memory_of(device: torch.device) -> Memory | None:
    """The memory of `device`, or None if it has none that can be measured."""
    return GpuMemory(device) if device.type == "cuda" else None


def limit_of(budget_gib: float | None, capacity: int) -> int:
    """How many bytes a plan may fill: the budget that was set, as far as the device has it, less a reserve."""
    fits = int(capacity * (1 - RESERVE))
    if budget_gib is None:
        return fits
    return min(fits, int(budget_gib * GIB * (1 - RESERVE_OF_BUDGET)))
