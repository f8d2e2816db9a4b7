"""The processes of one training, which agree on small numbers over the host's network."""

from datetime import timedelta

import torch
import torch.distributed as dist


class Ranks:
    """All processes of the training. They agree over the host's network, so that no GPU waits for another."""

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(timeout=timeout, backend="gloo") if self.several else None

    @property
    def is_first(self) -> bool:
        """Return whether this process logs for all."""
        return not self.several or dist.get_rank() == 0

    def least(self, *numbers: int) -> tuple[int, ...]:
        """Return the least that any process gives in each place. All processes call this with as many numbers."""
        if not self.several:
            return numbers
        least = torch.tensor(numbers)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return tuple(least.tolist())

    def close(self) -> None:
        """Give the process group back."""
        if self.several:
            dist.destroy_process_group(self.group)
