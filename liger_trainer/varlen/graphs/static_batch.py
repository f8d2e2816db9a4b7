"""The batch of a captured backbone: one row of tokens of a fixed size, in buffers that each replay reads."""

from typing import Any, NamedTuple

import torch
from torch import nn

from liger_trainer.varlen.graphs.graph_recorder import Graph
from liger_trainer.varlen.graphs.snapshot import Snapshot
from liger_trainer.varlen.graphs.static_gradients import GradientBuffers
from liger_trainer.varlen.host_copies import sent
from liger_trainer.varlen.rows import StaticRows

STEP = 64  # tokens; sizes are multiples of it, which keeps Triton's kernels in one class of alignment


class TokenBatch(NamedTuple):
    """The inputs that change from one replay to the next.

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


class SharedBuffers:
    """The buffers that all sizes of a model share, since one replay is done with them before the next begins.

    Args:
        embeds (`torch.Tensor`): (1, N, H). The buffers take its dtype and device.
        tokens (`int`): The most that a size may have.

    Attributes:
        embeds (`torch.Tensor`): (1, tokens, H), what a forward reads.
        exchange (`list[torch.Tensor]`): What passes in and out, made by the first forward. First (1, tokens, H): the
            hidden states, then their gradient, then the gradient of the embeddings. Where a call asks for the logits of
            routers, they and their gradients are second: (layers, tokens, experts).
        zeros_stay_finite (`bool`): Whether embeddings of zero were seen to give finite outputs.
    """

    def __init__(self, embeds: torch.Tensor, tokens: int):
        self.tokens = tokens
        self.embeds = torch.zeros(1, tokens, embeds.shape[-1], dtype=embeds.dtype, device=embeds.device)
        self.exchange: list[torch.Tensor] = []
        self.zeros_stay_finite = False


class CapturedSize:
    """The two graphs of one number of tokens, and what they read and write.

    Args:
        batch (`TokenBatch`): The first batch of this size.
        tokens (`int`): T, its tokens with the row that fills it up.
        most_rows (`int`): Rows that the table of offsets has room for, the filling one included.
        longest (`int`): Tokens that a row may have. The attention kernel leaves out what lies beyond.
        buffers (`SharedBuffers`): Those of the model.
        needs_grad (`bool`): Whether the embeddings get a gradient.

    Attributes:
        embeds (`torch.Tensor`): (1, T, H), the part of the buffer that the forward reads.
        learned (`list`): The parameters that get a gradient in the backward.
        gradients (`GradientBuffers` or None): What holds these gradients, once it is captured.
        snapshot (`Snapshot` or None): The state that it was captured in.
    """

    def __init__(
        self, batch: TokenBatch, tokens: int, most_rows: int, longest: int, buffers: SharedBuffers, needs_grad: bool
    ):
        positions, device = batch.positions, batch.embeds.device
        self.tokens = tokens
        self.most_rows = most_rows
        self.longest = longest
        self.buffers, self.needs_grad = buffers, needs_grad
        self.embeds = buffers.embeds[:, :tokens].requires_grad_(needs_grad)
        self.positions = positions.new_zeros(*positions.shape[:-1], tokens)
        # transformers looks for rows in the values of positions where it gets no mask.
        self.mask = torch.ones(1, tokens, dtype=torch.long, device=device)
        offsets = torch.zeros(most_rows + 1, dtype=torch.int32, device=device)
        self.rows = StaticRows(offsets, tokens, longest)
        self.output_class: Any = None
        self.learned: list[nn.Parameter] = []
        self.gradients: GradientBuffers | None = None
        self.snapshot: Snapshot | None = None
        self.forward: Graph | None = None
        self.backward: Graph | None = None
        self.last_used = 0

    @property
    def exchange(self) -> list[torch.Tensor]:
        """Return `SharedBuffers.exchange` for T tokens: (1, T, H), and (layers, T, experts) if there are routers."""
        assert self.buffers.exchange, "the forward comes first"
        return [buffer[:, : self.tokens] for buffer in self.buffers.exchange]

    def takes(self, batch: TokenBatch) -> bool:
        rows, longest = bounds_of(batch, self.tokens)
        return rows <= self.most_rows and longest <= self.longest

    def fill(self, batch: TokenBatch) -> None:
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


def bounds_of(batch: TokenBatch, tokens: int) -> tuple[int, int]:
    """Return (rows, tokens of the longest row) of a batch that is filled up to `tokens`."""
    filling = tokens - batch.tokens
    return len(batch.lengths) + 1, max(*batch.lengths, filling, 1)


def offsets_of(batch: TokenBatch, size: CapturedSize) -> torch.Tensor:
    """int32 (most_rows + 1,) on the device: where each row begins. Rows after the last one are empty."""
    ends = torch.tensor([0, *batch.lengths], device="cpu").cumsum(0).int()
    offsets = torch.full((size.most_rows + 1,), size.tokens, dtype=torch.int32, device="cpu")
    offsets[: len(ends)] = ends
    return sent(offsets, size.embeds.device)


def power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
