"""The metrics of speculative heads: sums over all rows since the last log, on all ranks."""

from collections import defaultdict
from typing import Any

import torch


class HeadSums:
    """The sums of each head since the last log, for training and evaluation apart: losses, hits and targets."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._tokens: defaultdict[str, Any] = defaultdict(int)

    def __contains__(self, mode: str) -> bool:
        return mode in self._sums

    def add(self, mode: str, sums: torch.Tensor, inputs: dict[str, Any]) -> None:
        """Add `sums` (3, heads) of a batch: for each head its loss, the targets that were its first choice, and all
        targets.
        """
        sums = sums.detach()
        self._sums[mode] = self._sums[mode] + sums if mode in self._sums else sums
        mask = inputs.get("attention_mask")
        self._tokens[mode] += inputs["labels"].numel() if mask is None or mask.ndim != 2 else mask.sum()

    def take(self, mode: str, accelerator: Any) -> tuple[list[list[float]], torch.Tensor]:
        """Return the sums of each head over all ranks and the tokens of this rank, and reset both.

        All ranks have to call it.
        """
        sums = accelerator.reduce(self._sums.pop(mode), "sum")
        return sums.tolist(), torch.as_tensor(self._tokens.pop(mode), device=sums.device)
