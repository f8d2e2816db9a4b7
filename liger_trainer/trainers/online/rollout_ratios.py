"""Importance ratios between the policy and the engine that generated the completions, with TRL's formulas.

If vLLM generated the completions, GRPO weights its loss by exp(old - sampled): `old` is a token's log-probability under
the policy, `sampled` under vLLM. TRL computes the ratios of a whole generation batch before it is shuffled and split
into micro-batches. Here each micro-batch computes its own ratios, from its training pass. The logged metrics still
cover the whole generation batch: each micro-batch adds its part, and the last one logs them.
"""

import math
from typing import NamedTuple

import torch
from accelerate import Accelerator

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
_METRICS = (
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
)


class RatioOptions(NamedTuple):
    """TRL's `vllm_importance_sampling_mode`, one of `MODES`, and its limits."""

    mode: str
    smallest: float | None
    largest: float | None

    @property
    def of_sequences(self) -> bool:
        return self.mode.startswith("sequence")


def importance_ratio(old: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor, by: RatioOptions) -> torch.Tensor:
    """Compute the weights of a loss on completions that another engine than the policy generated.

    Args:
        old (`torch.Tensor`): Log-probabilities under the policy, fp32 (B, T).
        sampled (`torch.Tensor`): Log-probabilities under the engine, fp32 (B, T). A missing one is NaN; its token gets
            the factor 1.
        mask (`torch.Tensor`): (B, T), 1 for the tokens that count.
        by (`RatioOptions`): TRL's mode and limits.

    Returns:
        `torch.Tensor`, fp32: (B, T), or (B, 1) for ratios of sequences.
    """
    difference = torch.nan_to_num((old - sampled) * mask, nan=0.0)
    if by.of_sequences:
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    if by.mode.endswith("truncate"):
        return torch.clamp(ratio, min=by.smallest, max=by.largest)
    smallest = -math.inf if by.smallest is None else by.smallest
    largest = math.inf if by.largest is None else by.largest
    return ratio.masked_fill((ratio < smallest) | (ratio > largest), 0.0)


class RatioMetrics:
    """Accumulates the logged metrics of one generation batch over its micro-batches.

    Args:
        parts (`int`): The micro-batches of the generation batch.
        of_sequences (`bool`): Whether there is one ratio for each sequence. These count even if the sequence is masked.
    """

    def __init__(self, parts: int, of_sequences: bool):
        self.parts = parts
        self.of_sequences = of_sequences
        self._sums: list[torch.Tensor] = []
        self._extremes: list[torch.Tensor] = []

    def add(self, old: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor, ratio: torch.Tensor) -> None:
        """Add a micro-batch: the arguments of `importance_ratio`, and the ratio that it returned."""
        counts = mask.bool()
        distance = torch.abs(old - sampled)
        known = counts & ~torch.isnan(distance)
        weighed = torch.ones_like(ratio, dtype=torch.bool) if self.of_sequences else counts
        self._sums.append(
            torch.stack(
                (
                    torch.where(known, distance, 0.0).sum(),
                    known.sum().float(),
                    torch.where(weighed, ratio, 0.0).sum(),
                    weighed.sum().float(),
                )
            )
        )
        self._extremes.append(
            torch.stack(
                (
                    torch.where(known, distance, -math.inf).amax(),
                    torch.where(weighed, ratio, -math.inf).amax(),
                    torch.where(weighed, -ratio, -math.inf).amax(),
                )
            )
        )

    @property
    def is_whole(self) -> bool:
        """Return whether all micro-batches were added."""
        return len(self._sums) == self.parts

    def gathered(self, accelerator: Accelerator) -> dict[str, float]:
        """Return TRL's metrics over all processes, or 0 without a token. Every process has to call this."""
        distances, known, ratios, weighed = torch.stack(self._sums).sum(0)
        farthest, highest, lowest = torch.stack(self._extremes).amax(0)
        zero = torch.zeros_like(distances)
        own = torch.stack(
            (
                torch.where(known > 0, distances / known, zero),
                torch.where(known > 0, farthest, zero),
                torch.where(weighed > 0, -lowest, zero),
                torch.where(weighed > 0, ratios / weighed, zero),
                torch.where(weighed > 0, highest, zero),
            )
        )
        all_ranks = accelerator.gather(own[None])
        means = all_ranks.mean(0)
        largest = all_ranks.amax(0)
        smallest = all_ranks.amin(0)
        picked = torch.stack((means[0], largest[1], smallest[2], means[3], largest[4]))
        return dict(zip(_METRICS, picked.tolist(), strict=True))
