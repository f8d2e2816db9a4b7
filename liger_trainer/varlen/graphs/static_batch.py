"""The batch of a captured backbone: one row of tokens of a fixed size, in buffers that each replay reads."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_trainer.varlen.graphs.graph_recorder import Graph
from liger_trainer.varlen.graphs.snapshot import Snapshot
from liger_trainer.varlen.graphs.static_gradients import GradientBuffers
from liger_trainer.varlen.groups import Layout
from liger_trainer.varlen.host_copies import sent
from liger_trainer.varlen.rows import Chunks, StaticRows
from liger_trainer.varlen.shared_rows import StaticSharedRows, lay_across

LEAST_LONGEST = 64  # every size has room for a row of this many tokens
CHUNK = 64  # tokens of a chunk in the rules of flash-linear-attention
STEP = 64  # sizes are multiples of this many tokens, so that Triton specializes its kernels for one alignment


class TokenBatch(NamedTuple):
    """The inputs that change from one replay to the next.

    Attributes:
        embeds (`torch.Tensor`): (1, N, H), the embeddings of the real tokens.
        positions (`torch.Tensor`): int64 (..., 1, N).
        lengths (`list[int]`): The tokens of each row, or of each segment if rows share prompts.
        layout (`Layout` or None): The layout of rows that share prompts.
        per_layer (`torch.Tensor` or None): (1, N, layers, P), the embeddings of the real tokens for each layer.
    """

    embeds: torch.Tensor
    positions: torch.Tensor
    lengths: list[int]
    layout: Layout | None = None
    per_layer: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.embeds.shape[1]


class Bounds(NamedTuple):
    """The capacity of a size: how many rows its tables of offsets hold, and how long these may be.

    Attributes:
        rows (`int`): Rows or segments, including the filler.
        longest (`int`): Tokens of the longest row.
        groups (`int`): Groups of rows that share a prompt. 0 if rows share nothing.
        private (`int`): Tokens of the longest row of queries in attention's second call (`lay_across`): the private
            parts of a group, the tokens before them, or the filler.
    """

    rows: int
    longest: int
    groups: int = 0
    private: int = 0

    def cover(self, other: "Bounds") -> bool:
        """Return whether tables of this capacity also hold `other`."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


class SharedBuffers:
    """The buffers that all sizes of a model share. A replay has finished with them before the next one starts.

    Args:
        embeds (`torch.Tensor`): (1, N, H). The buffers take its dtype and device.
        tokens (`int`): The tokens of the largest size.
        per_layer (`torch.Tensor`, *optional*): (1, N, layers, P), for a backbone with embeddings for each layer.

    Attributes:
        embeds (`torch.Tensor`): (1, tokens, H), the input of the forward.
        per_layer (`torch.Tensor` or None): (1, tokens, layers, P), an input too.
        per_layer_grad (`torch.Tensor` or None): The gradient of `per_layer`, allocated when a backward first computes
            it.
        exchange (`list[torch.Tensor]`): Outputs and gradients, allocated by the first forward. The first buffer,
            (1, tokens, H), holds the hidden states, then their gradient, then the gradient of the embeddings. If a call
            returns router logits, the second holds these and then their gradient: (layers, tokens, experts).
        zeros_stay_finite (`bool`): Whether embeddings of zero have been seen to give finite outputs.
    """

    def __init__(self, embeds: torch.Tensor, tokens: int, per_layer: torch.Tensor | None = None):
        self.tokens = tokens
        self.embeds = _zeros_like(embeds, tokens)
        self.per_layer = None if per_layer is None else _zeros_like(per_layer, tokens)
        self.per_layer_grad: torch.Tensor | None = None
        self.exchange: list[torch.Tensor] = []
        self.zeros_stay_finite = False


class CapturedSize:
    """The forward and backward graphs for one number of tokens, with their buffers.

    Args:
        batch (`TokenBatch`): The first batch of this size.
        tokens (`int`): T, the tokens of the batch and of the filler row.
        bounds (`Bounds`): The capacity of the tables. The attention kernel ignores anything beyond it.
        buffers (`SharedBuffers`): The buffers of the model.
        needs_grad (`bool`): Whether the embeddings get a gradient.
        keeps_state (`bool`, *optional*, defaults to `False`): Whether layers keep a state, and need rows in chunks.
        per_layer_needs_grad (`bool`, *optional*, defaults to `False`): Whether the embeddings for each layer get a
            gradient.

    Attributes:
        embeds (`torch.Tensor`): (1, T, H), the part of the buffer that the forward reads.
        per_layer (`torch.Tensor` or None): (1, T, layers, P), the part of the buffer that the forward reads.
        rows (`StaticRows`): The rows that attention reads, with offsets in `tables`.
        learned (`list`): The parameters that get a gradient in backward.
        gradients (`GradientBuffers` or None): The buffers of these gradients, once captured.
        snapshot (`Snapshot` or None): The model's state at the capture.
    """

    def __init__(
        self,
        batch: TokenBatch,
        tokens: int,
        bounds: Bounds,
        buffers: SharedBuffers,
        needs_grad: bool,
        keeps_state: bool = False,
        per_layer_needs_grad: bool = False,
    ):
        positions = batch.positions
        device = batch.embeds.device
        self.tokens = tokens
        self.bounds = bounds
        self.buffers = buffers
        self.needs_grad = needs_grad
        self.embeds = buffers.embeds[:, :tokens].requires_grad_(needs_grad)
        self.per_layer_needs_grad = per_layer_needs_grad
        self.per_layer: torch.Tensor | None = None
        if buffers.per_layer is not None:
            self.per_layer = buffers.per_layer[:, :tokens].requires_grad_(per_layer_needs_grad)
        self.positions = positions.new_zeros(*positions.shape[:-1], tokens)
        # Without a mask, transformers would look for packed rows in the values of the positions.
        self.mask = torch.ones(1, tokens, dtype=torch.long, device=device)
        self.tables = [torch.zeros(n, dtype=torch.int32, device=device) for n in _table_sizes(bounds)]
        self.chunks = _static_chunks(bounds, tokens, device) if keeps_state else None
        self.rows = _static_rows(self.tables, tokens, bounds, self.chunks)
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

    @property
    def per_layer_grad(self) -> torch.Tensor:
        """Return the gradient of `per_layer`: (1, T, layers, P)."""
        assert self.buffers.per_layer_grad is not None, "the backward comes first"
        return self.buffers.per_layer_grad[:, : self.tokens]

    def takes(self, batch: TokenBatch) -> bool:
        """Return whether the tables have room for the rows of a batch."""
        return self.bounds.cover(bounds_of(batch, self.tokens))

    def fill(self, batch: TokenBatch) -> None:
        """Copy a batch into the static buffers, and fill the rest with zeros.

        With embeddings of zero, layers compute finite numbers for the filler row, and FP8 scales do not change.
        """
        n = batch.tokens
        with torch.no_grad():
            self.embeds[:, :n].copy_(batch.embeds)
            self.embeds[:, n:].zero_()
            if self.per_layer is not None:
                self.per_layer[:, :n].copy_(batch.per_layer)
                self.per_layer[:, n:].zero_()
            self.positions[..., :n].copy_(batch.positions)
            self.positions[..., n:].zero_()
            for table, ends in zip(self.tables, ends_of(batch, self.tokens), strict=True):
                table.copy_(_filled_table(ends, len(table), self.tokens, table.device), non_blocking=True)
            if self.chunks is not None:
                offsets, indices = self.chunks
                (ends,) = ends_of(batch, self.tokens)
                offsets.copy_(_filled_table(ends, len(offsets), self.tokens, offsets.device), non_blocking=True)
                numbered = numbered_chunks(batch.lengths, self.tokens - n, len(indices), len(offsets) - 2)
                indices.copy_(sent(torch.tensor(numbered, dtype=torch.int32), indices.device), non_blocking=True)


def _zeros_like(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return zeros (1, tokens, ...) for an input (1, N, ...)."""
    return torch.zeros(1, tokens, *x.shape[2:], dtype=x.dtype, device=x.device)


def round_up(tokens: int) -> int:
    """Round a number of tokens up to a size: multiples of `STEP`, each at most 1/8 larger than the one before."""
    power = 1 << max(tokens - 1, 1).bit_length() - 1
    step = max(STEP, power // 8)
    return -(-tokens // step) * step


def bounds_of(batch: TokenBatch, tokens: int) -> Bounds:
    """Return the capacity that a batch needs when it is padded to `tokens` tokens."""
    filling = tokens - batch.tokens
    rows = len(batch.lengths) + 1
    longest = max(*batch.lengths, filling, 1)
    layout = batch.layout
    if layout is None:
        return Bounds(rows, longest)
    ends, _ = lay_across(layout, tokens)
    private = max(end - begin for begin, end in zip([0, *ends], ends, strict=False))
    return Bounds(rows, longest, len(layout.prefixes), private)


def rounded_bounds(needed: Bounds, known: Iterable[Bounds], tokens: int) -> Bounds:
    """Return the capacity for a size of `tokens` tokens: powers of 2 that hold `needed` and all `known` ones.

    Every new size gets at least the largest capacity seen so far, so few sizes are captured twice.
    """
    rows, longest, groups, private = (max(values) for values in zip(needed, *known, strict=True))
    most = power_of_2(tokens)
    return Bounds(
        power_of_2(rows),
        min(max(LEAST_LONGEST, power_of_2(longest)), most),
        groups and power_of_2(groups),
        min(private and power_of_2(private), most),
    )


def _table_sizes(bounds: Bounds) -> list[int]:
    """Return the length of each table of offsets."""
    across = [bounds.groups + 4] * 2 if bounds.groups else []  # a 0, and the groups + 3 ends that `lay_across` returns
    return [bounds.rows + 1, *across]


def _static_rows(tables: list[torch.Tensor], tokens: int, bounds: Bounds, chunks: Chunks | None) -> StaticRows:
    if not bounds.groups:
        (offsets,) = tables
        return StaticRows(offsets, tokens, bounds.longest, chunks)
    offsets, queries, keys = tables
    return StaticSharedRows(offsets, tokens, bounds.longest, queries, keys, bounds.private)


def _static_chunks(bounds: Bounds, tokens: int, device: torch.device) -> Chunks:
    """Return buffers for the chunks of all rows. Each row may end with a partial chunk, so it may need one more."""
    offsets = torch.zeros(bounds.rows + 2, dtype=torch.int32, device=device)
    return Chunks(offsets, torch.zeros(tokens // CHUNK + bounds.rows, 2, dtype=torch.int32, device=device))


def numbered_chunks(lengths: list[int], filling: int, entries: int, empty: int) -> list[tuple[int, int]]:
    """Return the row of each chunk and its number in that row, padded to `entries` with chunks of the row `empty`.

    Args:
        lengths (`list[int]`): The tokens of each row.
        filling (`int`): The tokens of the filler row, which comes last.
        entries (`int`): The length of the result.
        empty (`int`): The index of a row without tokens.
    """
    chunks = []
    for row, length in enumerate((*lengths, filling)):
        for number in range(-(-length // CHUNK)):
            chunks.append((row, number))
    return chunks + [(empty, 0)] * (entries - len(chunks))


def with_other_rows(batch: TokenBatch) -> TokenBatch:
    """Return the same tokens cut into other rows: in the middle of each row. Rows of one token are joined in pairs.

    So nearly every token sees other tokens. No row is longer than the longest one of the batch, or than two tokens.
    """
    if max(batch.lengths) == 1:
        pairs, left = divmod(sum(batch.lengths), 2)
        return batch._replace(lengths=[2] * pairs + [1] * left)
    lengths = []
    left_over = 0  # tokens in the second half of the previous row
    for length in batch.lengths:
        half = length // 2
        lengths.append(left_over + half)
        left_over = length - half
    lengths.append(left_over)
    return batch._replace(lengths=[length for length in lengths if length])


def ends_of(batch: TokenBatch, tokens: int) -> list[list[int]]:
    """Return the ends of the rows for each table of offsets, for a batch that is padded to `tokens` tokens."""
    ends = [*accumulate(batch.lengths)]
    across = [] if batch.layout is None else lay_across(batch.layout, tokens)
    return [ends, *across]


def _filled_table(ends: list[int], entries: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Return the offsets int32 (entries,) on the device. The filler row ends at `tokens`, and later rows are empty."""
    offsets = torch.full((entries,), tokens, dtype=torch.int32, device="cpu")
    offsets[: len(ends) + 1] = torch.tensor([0, *ends], dtype=torch.int32, device="cpu")
    return sent(offsets, device)


def power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
