"""Several processes that have to decide alike: a few numbers of each, of which the least count for all."""

import torch
import torch.distributed as dist


class Ranks:
    """All processes of the training.

    They agree once in a micro-batch, through the host's network. The GPUs do not wait for that, and neither does the
    host wait for its GPU: it needs the other hosts only, which issue their work at the same pace.
    """

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo") if several else None

    @property
    def first(self) -> bool:
        return self.group is None or dist.get_rank() == 0

    def least(self, *numbers: int) -> tuple[int, ...]:
        """The least of the numbers that all processes give in each place. All have to call this, with as many."""
        if self.group is None:
            return numbers
        least = torch.tensor(numbers)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return tuple(least.tolist())

    def close(self) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None
