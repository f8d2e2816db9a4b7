"""The batch of a captured backbone: one row of tokens of a fixed size, in buffers that each replay reads."""

from typing import Any, NamedTuple

import torch
from torch import nn

from liger_trainer.varlen.attention import StaticRows
from liger_trainer.varlen.host_copies import sent
from liger_trainer.varlen.recorder import Graph

STEP = 64  # tokens; sizes are multiples of it, which keeps Triton's kernels in one class of alignment


class Batch(NamedTuple):
    """What changes from one replay to the next.

    Attributes:
        embeds (`torch.Tensor`): (1, N, H), the embeddings of the real tokens.
        positions (`torch.Tensor`): int64 (..., 1, N).
        lengths (`list[int]`): Tokens of each row.
    """

    embeds: torch.Tensor
    positions: torch.Tensor
    lengths: list[int]

    @property
    def tokens(self) -> int:
        return self.embeds.shape[1]


class Size:
    """The two graphs of one number of tokens, and the buffers that they read and write.

    Args:
        batch (`Batch`): The first batch of this size.
        tokens (`int`): T, its tokens with the row that fills it up.
        most_rows (`int`): Rows that the table of offsets has room for, the filling one included.
        longest (`int`): Tokens that a row may have. The attention kernel leaves out what lies beyond.
        needs_grad (`bool`): Whether the embeddings get a gradient.

    Attributes:
        output (`torch.Tensor`): (1, T, H), what the forward writes.
        upstream (`torch.Tensor`): (1, T, H), the gradient of the output that the backward reads.
        embeds_grad (`torch.Tensor` or `None`): (1, T, H), what the backward writes.
        learned (`list`): The parameters whose gradients the backward adds to.
    """

    def __init__(self, batch: Batch, tokens: int, most_rows: int, longest: int, needs_grad: bool):
        embeds, positions = batch.embeds, batch.positions
        device = embeds.device
        self.tokens, self.most_rows, self.longest = tokens, most_rows, longest
        self.embeds = embeds.new_zeros(1, tokens, embeds.shape[-1]).requires_grad_(needs_grad)
        self.positions = positions.new_zeros(*positions.shape[:-1], tokens)
        # transformers looks for rows in the values of positions where it gets no mask.
        self.mask = torch.ones(1, tokens, dtype=torch.long, device=device)
        offsets = torch.zeros(most_rows + 1, dtype=torch.int32, device=device)
        self.rows = StaticRows(offsets, tokens, longest)
        self.output: torch.Tensor | None = None
        self.output_class: Any = None
        self.upstream: torch.Tensor | None = None
        self.embeds_grad: torch.Tensor | None = None
        self.learned: list[nn.Parameter] = []
        self.forward: Graph | None = None
        self.backward: Graph | None = None
        self.last_used = 0
        self.seconds = 0.0  # of a replay, where it was timed

    def takes(self, batch: Batch) -> bool:
        rows, longest = bounds_of(batch, self.tokens)
        return rows <= self.most_rows and longest <= self.longest

    def fill(self, batch: Batch) -> None:
        """Copy a batch into the static buffers, with zeros after it.

        The filling row has embeddings of zero: whatever a layer makes of them is finite, and no scale of FP8 moves.
        """
        n = batch.tokens
        with torch.no_grad():
            self.embeds[:, :n].copy_(batch.embeds)
            self.embeds[:, n:].zero_()
            self.positions[..., :n].copy_(batch.positions)
            self.positions[..., n:].zero_()
            self.rows.offsets.copy_(offsets_of(batch, self), non_blocking=True)


def round_up(tokens: int) -> int:
    """Round a number of tokens up to a size: multiples of `STEP`, each at most 1/8 larger than the one before."""
    power = 1 << max(tokens - 1, 1).bit_length() - 1
    step = max(STEP, power // 8)
    return -(-tokens // step) * step


def bounds_of(batch: Batch, tokens: int) -> tuple[int, int]:
    """Return (rows, tokens of the longest row) of a batch that is filled up to `tokens`."""
    filling = tokens - batch.tokens
    return len(batch.lengths) + 1, max(*batch.lengths, filling, 1)


def offsets_of(batch: Batch, size: Size) -> torch.Tensor:
    """int32 (most_rows + 1,) on the device: where each row begins. Rows after the last one are empty."""
    ends = torch.tensor([0, *batch.lengths], device="cpu").cumsum(0).int()
    offsets = torch.full((size.most_rows + 1,), size.tokens, dtype=torch.int32, device="cpu")
    offsets[: len(ends)] = ends
    return sent(offsets, size.embeds.device)


def power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
