"""Rows of uneven length, the mask that separates them, and the rows of the running call."""

import contextlib
import contextvars
import functools
from collections.abc import Callable
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

import torch
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from liger_trainer.patching.core.contracts import LimitsAttention
from liger_trainer.varlen.alike import groups_by_length
from liger_trainer.varlen.groups import Layout
from liger_trainer.varlen.host_copies import sent


class NotForRows(Exception):
    """Raised when rows of uneven length cannot run a layer's attention. The message is the reason in the report."""


class AttentionKind(StrEnum):
    """The kinds of attention that layers use. The proof and the report name the kinds that a model has.

    A new kind of mask gets a member here, what it needs in `RowMask`, a branch in `attention.py`, a line in
    `proof/backbone.py` for the report, and a refusal in `shared_rows.py` if rows that share prompts cannot run it.
    """

    CAUSAL = "causal"
    SLIDING_WINDOW = "sliding window"
    CHUNKS = "chunks"
    SINKS = "sinks"
    SOFT_CAP = "soft cap"
    STATE = "state"  # a convolution, linear attention or a state space, which carries a state from token to token


class Rows:
    """Rows that are concatenated in one row of tokens, or the rows of a batch without padding.

    Args:
        lengths (`list[int]`): The tokens of each row.
        device (`torch.device`): The device of the tokens.
        batch (`int`, *optional*, defaults to 1): The rows of the batch that holds them, which have equal lengths.

    Attributes:
        offsets (`torch.Tensor`): int32 (rows + 1,), on the device: the start of each row, and the end.
        tokens (`int`): The tokens of all rows together.
        longest (`int`): The tokens of the longest row.
        is_whole_batch (`bool`): Whether these are the rows of the batch itself, which then has no padding.
        equal (`bool`): Whether all rows have the same length.
        attention_kinds (`set[AttentionKind]`): The kinds of attention that layers have used so far.
        attend (`Callable` or None): Replaces `attention.py` for rows that share prompts.
        layout (`Layout` or None): The layout of rows that share prompts.
    """

    attend: Callable | None = None
    layout: Layout | None = None

    def __init__(self, lengths: list[int], device: torch.device, batch: int = 1):
        self.lengths: list[int] = lengths
        self.tokens = sum(lengths)
        self.longest = max(lengths)
        self.batch = batch
        self.is_whole_batch = len(lengths) == batch
        self.equal = min(lengths) == self.longest
        self.attention_kinds = set[AttentionKind]()
        self._chunks = dict[int, Rows]()
        self.offsets = sent(torch.tensor([0, *lengths], device="cpu").cumsum(0).int(), device)

    @functools.cached_property
    def offsets_on_host(self) -> torch.Tensor:
        """`offsets` on the CPU. All layers get the same tensor, because packages cache results by its identity."""
        return torch.tensor([0, *self.lengths], device="cpu").cumsum(0).int()

    @functools.cached_property
    def side_by_side(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For a batch of these rows, padded on the right: the index of each token in it, int64 (tokens,), and the mask
        of real tokens, int64 (rows, longest). Both are on the device."""
        lengths = torch.tensor(self.lengths, device="cpu")
        real = torch.arange(self.longest, device="cpu") < lengths[:, None]
        places = real.flatten().nonzero()[:, 0]
        return sent(places, self.offsets.device), sent(real.long(), self.offsets.device)

    @functools.cached_property
    def alike(self) -> list["LikeRows"]:
        """The rows in groups of like length. Empty if one group is enough, and nothing is computed for it."""
        groups = groups_by_length(self.lengths)
        if len(groups) == 1:
            return []
        ends = [*accumulate(self.lengths)]
        found = []
        for group in groups:
            places = [torch.arange(ends[row] - self.lengths[row], ends[row], device="cpu") for row in group]
            rows = Rows([self.lengths[row] for row in group], self.offsets.device)
            found.append(LikeRows(rows, sent(torch.cat(places), self.offsets.device)))
        return found

    @functools.cached_property
    def order_of_alike(self) -> torch.Tensor:
        """The place of each token in the groups of `alike`, one after the other: int64 (tokens,), on the device."""
        return torch.cat([group.places for group in self.alike]).argsort()

    def in_chunks(self, size: int) -> "Rows":
        """Split each row into rows of `size` tokens, from its start."""
        if size not in self._chunks:
            cut = []
            for length in self.lengths:
                cut += [min(size, length - done) for done in range(0, length, size)]
            self._chunks[size] = Rows(cut, self.offsets.device, self.batch)
            self._chunks[size].attention_kinds = self.attention_kinds
        return self._chunks[size]


class LikeRows(NamedTuple):
    """Rows of like length.

    Attributes:
        rows (`Rows`): These rows.
        places (`torch.Tensor`): int64 (tokens,), on the device: the places of their tokens among those of all rows.
    """

    rows: Rows
    places: torch.Tensor


class Chunks(NamedTuple):
    """Rows split into chunks, for a rule of linear attention that launches one program for each chunk.

    A replay launches as many programs as the capture. Chunks after the last real one belong to a row that is always
    empty, so nothing is stored for them.

    Attributes:
        offsets (`torch.Tensor`): int32 (rows + 2,), the offsets of the rows, and of one more row, which is empty.
        indices (`torch.Tensor`): int32 (chunks, 2), the row of each chunk, and its number in that row.
    """

    offsets: torch.Tensor
    indices: torch.Tensor


class StaticRows(Rows):
    """The rows of a captured backbone. Their lengths change from replay to replay, up to a largest size.

    Args:
        offsets (`torch.Tensor`): int32 (rows + 1,), a buffer that is written before each replay. Rows after the last
            one are empty.
        tokens (`int`): The tokens of all rows together, the same in every replay.
        longest (`int`): The most tokens that a row may have.
        chunks (`Chunks`, *optional*): For layers that keep a state. It is written before each replay too.
    """

    def __init__(self, offsets: torch.Tensor, tokens: int, longest: int, chunks: "Chunks | None" = None):
        self.offsets = offsets
        self.chunks = chunks
        self.tokens = tokens
        self.longest = longest
        self.batch = 1
        self.is_whole_batch = False
        self.equal = False  # not even if they are now: one kernel attends in all replays
        self.attention_kinds = set[AttentionKind]()
        self._chunks = dict[int, Rows]()

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        """Return the current lengths, on a CPU.

        Raises `NotForRows` on a GPU, where a capture would keep the lengths of its first batch.
        """
        if self.offsets.device.type != "cpu":
            raise NotForRows("its attention needs lengths on the host (dtype, head size or dropout)")
        return self.offsets.diff().tolist()

    def in_chunks(self, size: int) -> Rows:
        raise NotForRows("its layers attend in chunks, and their number depends on the lengths of rows")


class RowMask(LimitsAttention):
    """The mask that layers get: a token sees the tokens of its own row up to itself, at most `window` of them.

    With `chunked`, the rows are chunks. Code that handles a layer's arguments (checkpointing, FSDP, accelerate's hooks)
    passes the mask on as it is. `unknown` is the reason why the model wants a mask of another kind. It matters only if
    a layer uses the mask: some models make masks that no layer uses.
    """

    def __init__(self, rows: Rows, window: int | None = None, unknown: str | None = None, chunked: bool = False):
        self.rows = rows
        self.window = window
        self.unknown = unknown
        self.chunked = chunked
        # Sinks and soft caps are arguments of the attention function.
        self.attention_kind = AttentionKind.CAUSAL if window is None else AttentionKind.SLIDING_WINDOW
        if chunked:
            self.attention_kind = AttentionKind.CHUNKS

    def most_seen(self) -> int:
        longest = self.rows.longest
        return longest if self.window is None else min(longest, self.window)

    def __getitem__(self, index: object) -> "RowMask":
        """Return the mask itself for slices that take all of it, as Gemma 4 asks for before layers that reuse keys.

        Raises `NotForRows` for a part of it.
        """
        parts = index if isinstance(index, tuple) else (index,)
        if all(isinstance(part, slice) and part in (slice(None), slice(0, None)) for part in parts):
            return self
        raise NotForRows("its layers take a part of the mask")


_rows: contextvars.ContextVar[Rows | None] = contextvars.ContextVar("rows of the running call", default=None)


@contextlib.contextmanager
def use_rows(rows: Rows):
    """Context manager: masks that a model asks for are `RowMask`s over `rows`."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def current_rows() -> Rows | None:
    """Return the rows of the running call of a backbone, or None without a plan and in a recomputation."""
    return None if torch.compiler.is_compiling() else _rows.get()


def row_mask(args: tuple, kwargs: dict) -> RowMask | None:
    """Return the mask for the arguments of transformers' `sdpa_mask`, or None if no rows are known."""
    rows = current_rows()
    if rows is None:
        return None
    return RowMask(rows, unknown="its mask is asked for in an unknown way") if args else _row_mask(rows, **kwargs)


def _row_mask(
    rows,
    *,
    q_length,
    kv_length,
    mask_function=causal_mask_function,
    local_size=None,
    allow_is_causal_skip=True,
    use_vmap=False,
    q_offset=0,
    kv_offset=0,
    **_,
) -> RowMask:
    """Return the mask for the arguments of a function in `AttentionMaskInterface`."""
    if not (q_length * rows.batch == kv_length * rows.batch == rows.tokens and q_offset == kv_offset == 0):
        return RowMask(rows, unknown="it attends to more than the tokens of the call")
    if use_vmap or not allow_is_causal_skip or (local_size is None and mask_function is not causal_mask_function):
        return RowMask(rows, unknown="its mask is more than causal")
    if local_size is None:
        return RowMask(rows)
    size, no_padding = int(local_size), torch.zeros(1, dtype=torch.long, device="cpu")
    if _is_same(mask_function, sliding_window_causal_mask_function(size)):
        return RowMask(rows, size)
    if _is_same(mask_function, chunked_causal_mask_function(size, no_padding)):
        return RowMask(rows.in_chunks(size), chunked=True)
    return RowMask(rows, unknown="its local attention is neither a sliding window nor chunks")


def _is_same(given, own) -> bool:
    """Return whether two mask functions have the same code and close over the same functions and numbers.

    A tensor counts as equal: it is the left padding of each row, which chunks read. It is zero in a call with known
    rows, and comparing it would wait for the device.
    """
    if not callable(own):
        return isinstance(own, torch.Tensor) or given == own
    if given is own or getattr(given, "__code__", None) is not own.__code__:
        return given is own
    held = [_held(function) for function in (given, own)]
    return len(held[0]) == len(held[1]) and all(map(_is_same, *held))


def _held(function) -> list:
    """Return what a mask function closes over: the functions of `and_masks`, or the size of a window or chunk."""
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    return [*values[0]] if len(values) == 1 and isinstance(values[0], tuple) else values
