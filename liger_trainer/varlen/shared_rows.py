"""Attention of rows that share a prompt.

- A token of a prefix, or of a row that shares nothing, attends to the tokens before it in its segment.
- A private token attends to its own part up to itself, in the same causal call, and to the whole prefix in a second
  call, which is not causal. There, all private parts of a group are one row of queries. `shared_attention` of
  `liger_triton` merges the two calls.
- With a window shorter than the longest row, the part of the prefix that a private token sees depends on its position.
  Then each private part gets a copy of the prefix's tail before its own keys, and one call is enough.
"""

import functools
from itertools import accumulate, chain

import torch
import torch.nn.functional as F

from liger_trainer.varlen.attention import flat
from liger_trainer.varlen.groups import Layout
from liger_trainer.varlen.host_copies import sent
from liger_trainer.varlen.rows import AttentionKind, NotForRows, RowMask, Rows, StaticRows
from liger_triton.shared_attention import AttentionCall, shared_attention, why_not


class SharedRows(Rows):
    """The segments of a layout: prefixes, rows that share nothing, and private parts.

    Args:
        layout (`Layout`): The order of the tokens.
        device (`torch.device`): The device of the tokens.
    """

    layout: Layout  # type: ignore[assignment]  # rows that share always have one

    def __init__(self, layout: Layout, device: torch.device):
        private = chain.from_iterable(layout.private)
        super().__init__([*layout.prefixes, *layout.lone, *private], device)
        self.layout = layout
        self.is_whole_batch = False  # not even if there are as many segments as rows
        self.equal = False  # not even if all segments are of one length
        self._windowed: dict[int, tuple[torch.Tensor, AttentionCall]] = {}

    def in_chunks(self, size: int) -> Rows:
        raise NotForRows("its layers attend in chunks")

    @functools.cached_property
    def calls(self) -> list[AttentionCall]:
        """Return the causal call within segments, and the call of private parts on their prefix, which is not."""
        layout = self.layout
        device = self.offsets.device
        of_groups = [sum(parts) for parts in layout.private]
        within = AttentionCall(0, self.offsets, self.longest, self.tokens, self.offsets, self.longest, causal=True)
        across = AttentionCall(
            first_query=self.tokens - sum(of_groups),
            query_offsets=_offsets(of_groups, device),
            most_queries=max(of_groups),
            keys=sum(layout.prefixes),
            key_offsets=_offsets(layout.prefixes, device),
            most_keys=max(layout.prefixes),
            causal=False,
        )
        return [within, across]

    def windowed(self, window: int) -> tuple[torch.Tensor, AttentionCall]:
        """Return the indices of the tokens to use as keys, int64 (keys,) on the device, and one call with `window`."""
        if window not in self._windowed:
            self._windowed[window] = self._with_copied_tails(window)
        return self._windowed[window]

    def _with_copied_tails(self, window: int) -> tuple[torch.Tensor, AttentionCall]:
        ends = [*accumulate(self.lengths)]
        segments = [torch.arange(end - n, end, device="cpu") for end, n in zip(ends, self.lengths, strict=True)]
        count = len(self.layout.prefixes) + len(self.layout.lone)
        keys = segments[:count]
        for prefix, parts in zip(segments, self.layout.private, strict=False):
            tail = prefix[max(0, len(prefix) - window + 1) :]
            for _ in parts:
                keys.append(torch.cat((tail, segments[len(keys)])))
        lengths = [*map(len, keys)]
        device = self.offsets.device
        call = AttentionCall(
            0, self.offsets, self.longest, sum(lengths), _offsets(lengths, device), max(lengths), True, window
        )
        return sent(torch.cat(keys), device), call

    def attend(self, query, key, value, mask: RowMask, dropout, scaling, softcap, sinks):  # type: ignore[override]
        """Return (T, Hq, Dv), from queries (1, Hq, T, D).

        Raises `NotForRows` if rows that share cannot run this attention.
        """
        _refuse(query, key, value, dropout, softcap, sinks)
        window = mask.window
        self.attention_kinds.add(AttentionKind.SINKS if sinks is not None else mask.attention_kind)
        query, key, value, width = _laid_flat(query, key, value)
        calls = self.calls
        if window is not None and window < self.layout.longest_row:
            index, call = self.windowed(window)
            index = index.to(key.device)
            key = Copied.apply(key, index)
            value = Copied.apply(value, index)
            calls = [call]
        return _narrow(shared_attention(query, key, value, calls, scale=scaling, sinks=sinks), width)


class StaticSharedRows(StaticRows):
    """The segments of a captured backbone. Their layout changes from replay to replay, up to a largest size.

    A graph cannot take boundaries from the host, so both calls cover all tokens. In the second call, the tokens before
    the private parts and the filler at the end are rows of queries without keys. The tokens after the prefixes are a
    row of keys without queries.

    Args:
        offsets (`torch.Tensor`): int32 (segments + 1,), a buffer that is written before each replay.
        tokens (`int`): The tokens of all segments together, the same in every replay.
        longest (`int`): The most tokens that a segment may have.
        query_offsets, key_offsets (`torch.Tensor`): int32 (groups + 4,), buffers too. See `lay_across`.
        most_queries (`int`): The most tokens that a row of queries may have in the second call.
    """

    def __init__(
        self,
        offsets: torch.Tensor,
        tokens: int,
        longest: int,
        query_offsets: torch.Tensor,
        key_offsets: torch.Tensor,
        most_queries: int,
    ):
        super().__init__(offsets, tokens, longest)
        within = AttentionCall(0, offsets, longest, tokens, offsets, longest, causal=True)
        across = AttentionCall(0, query_offsets, most_queries, tokens, key_offsets, tokens, causal=False)
        self.calls = [within, across]

    def attend(self, query, key, value, mask: RowMask, dropout, scaling, softcap, sinks):  # type: ignore[override]
        """The same as `SharedRows.attend`, for layers without a window."""
        _refuse(query, key, value, dropout, softcap, sinks)
        if mask.window is not None:
            raise NotForRows("the keys that its windows see of shared prompts change with each batch")
        self.attention_kinds.add(AttentionKind.SINKS if sinks is not None else mask.attention_kind)
        query, key, value, width = _laid_flat(query, key, value)
        return _narrow(shared_attention(query, key, value, self.calls, scale=scaling, sinks=sinks), width)


def lay_across(layout: Layout, tokens: int) -> tuple[list[int], list[int]]:
    """Return the offsets of queries and of keys in the second call, for a layout that is padded to `tokens` tokens.

    Its rows are the tokens before the private parts, the private parts of each group, the filler, and the keys that no
    private part sees.
    """
    begin = sum(layout.prefixes) + sum(layout.lone)
    queries = [*accumulate(map(sum, layout.private), initial=begin)]
    keys = [*accumulate(layout.prefixes, initial=0)]
    return [*queries, tokens, tokens], [*keys, keys[-1], tokens]


def _refuse(query, key, value, dropout, softcap, sinks) -> None:
    """Raise `NotForRows` if rows that share cannot run this attention."""
    reason = why_not(query)
    if softcap is not None:
        reason = "its attention has a soft cap"
    if dropout:
        reason = "its attention has dropout"
    if value.shape[-1] > query.shape[-1] or (sinks is not None and sinks.shape != query.shape[1:2]):
        reason = "its values are wider than its queries, or it has sinks for each token"
    if not query.dtype == key.dtype == value.dtype:
        reason = "its queries, keys and values are of several dtypes"
    if reason is not None:
        raise NotForRows(reason)


def _laid_flat(query, key, value) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return queries, keys and values as (T, heads, D), and the width of the values before padding to D."""
    width = value.shape[-1]
    if width < query.shape[-1]:  # multi-head latent attention; the kernel takes one head size
        value = F.pad(value, (0, query.shape[-1] - width))
    return flat(query), flat(key), flat(value), width


def _narrow(out: torch.Tensor, width: int) -> torch.Tensor:
    return out if width == out.shape[-1] else out[..., :width].contiguous()


class Copied(torch.autograd.Function):
    """`x.index_select(0, index)`, with a backward that sums the gradients of copies in fp32 and rounds once."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.size = x.shape
        return x.index_select(0, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        (index,) = ctx.saved_tensors
        wide = gradient if gradient.dtype == torch.float64 else gradient.float()
        return wide.new_zeros(ctx.size).index_add_(0, index, wide).to(gradient.dtype), None


def _offsets(lengths: list[int], device: torch.device) -> torch.Tensor:
    return sent(torch.tensor([0, *lengths], device="cpu").cumsum(0).int(), device)
