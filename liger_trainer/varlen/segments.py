"""Attention within segments of one sequence: the images and windows of a vision tower, the clips of an audio tower.

Towers of transformers lay the patches of all images one after the other and say where each one ends (`cu_seqlens`).
Without flash-attn they split queries, keys and values there and call SDPA once for each segment. Here one kernel under
`torch.nn.attention.varlen` attends in all of them. Where it cannot (CPUs, fp32, dropout, other head sizes), SDPA is
called once for each length that segments have: windows have the same one but at the edges of an image.
"""

import contextlib
import contextvars
import functools
import itertools

import torch
import torch.nn.functional as F

from liger_trainer.varlen.attention import as_autocast, by_kernel, kernel_takes
from liger_trainer.varlen.host_copies import sent, values_of

_ATTRIBUTE = "_liger_segments"
_NOT_KNOWN = ("position_bias", "softcap", "s_aux", "cache")  # arguments that it cannot answer


class Segments:
    """Where the segments of a sequence end.

    Args:
        offsets (`torch.Tensor`): Integers (segments + 1,): where each begins, and the end.

    Attributes:
        lengths (`list[int]`): Tokens of each segment.
        tokens (`int`): Of all segments together.
        calls (`int`): How often attention has been asked for within `use_segments`.
    """

    def __init__(self, offsets: torch.Tensor):
        values = values_of(offsets)[0].cpu()  # waits for the device, where the values are not known on the host
        self.offsets, self.lengths = offsets.to(torch.int32, copy=True), values.diff().tolist()
        self.tokens, self.longest = int(values[-1]), max(self.lengths, default=0)
        self.whole = torch.tensor([0, self.tokens], dtype=offsets.dtype, device="cpu")
        self.calls = 0

    @functools.cached_property
    def by_length(self) -> tuple[list[tuple[int, int]], torch.Tensor | None, torch.Tensor | None]:
        """Return (length, how many segments have it) in rising order.

        The tokens in this order, and back, if they change.
        """
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        runs = [(n, len(list(same))) for n, same in itertools.groupby(order, self.lengths.__getitem__) if n]
        if order == sorted(order):
            return runs, None, None
        ends = [*itertools.accumulate(self.lengths)]
        there = torch.cat([torch.arange(ends[i] - self.lengths[i], ends[i], device="cpu") for i in order])
        return runs, sent(there, self.offsets.device), sent(there.argsort(), self.offsets.device)


def segments_of(offsets: torch.Tensor) -> Segments:
    """Return the segments that begin at `offsets`.

    All layers of a tower are given the same tensor, which remembers them.
    """
    if offsets.is_inference():  # whether it has been written to since cannot be seen
        return Segments(offsets)
    known = getattr(offsets, _ATTRIBUTE, None)
    if known is None or known[0] != offsets._version:
        known = offsets._version, Segments(offsets)
        setattr(offsets, _ATTRIBUTE, known)
    return known[1]


_segments: contextvars.ContextVar[Segments | None] = contextvars.ContextVar("segments of the call", default=None)


@contextlib.contextmanager
def use_segments(segments: Segments | None):
    """Context manager: attention over the whole sequence is attention within `segments`."""
    token = _segments.set(segments)
    if segments is not None:
        segments.calls = 0
    try:
        yield
    finally:
        _segments.reset(token)


def current_segments() -> Segments | None:
    """Return the segments of the running attention of a tower. None elsewhere, and in traced code."""
    return None if torch.compiler.is_compiling() else _segments.get()


def attend_in_segments(
    segments: Segments,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attend within segments.

    Args:
        segments (`Segments`): Where the segments of the sequence end.
        query (`torch.Tensor`): (1, Hq, T, D).
        key (`torch.Tensor`): (1, Hkv, T, D), Hq a multiple of Hkv.
        value (`torch.Tensor`): (1, Hkv, T, D).
        attention_mask (*optional*): Has to be None.
        dropout (`float`, *optional*, defaults to 0.0): Of the weights of attention.
        scaling (`float`, *optional*): Factor of the scores; 1 / sqrt(D) by default.

    Returns:
        `tuple`: (1, T, Hq, D), and None for the weights of attention.

    Raises:
        NotInSegments: The layer asks for a mask, a causal order, scores that are changed, or other tokens.
    """
    segments.calls += 1
    if attention_mask is not None or kwargs.get("is_causal") or any(kwargs.get(n) is not None for n in _NOT_KNOWN):
        raise NotInSegments("its attention is more than that within segments")
    if query.shape[0] != 1 or not query.shape[2] == key.shape[2] == value.shape[2] == segments.tokens:
        raise NotInSegments("it attends to more than the tokens of its segments")
    query, key, value = as_autocast(query, key, value)
    if not kernel_takes(query, key, value, dropout):
        return _length_by_length(query, key, value, segments, dropout, scaling), None
    out = by_kernel(query, key, value, segments.offsets, segments.longest, scaling, causal=False)
    return out.unsqueeze(0), None


class NotInSegments(Exception):
    """A layer wants attention that is more than that within the segments of a sequence."""


def _length_by_length(query, key, value, segments: Segments, dropout, scaling):
    runs, there, back = segments.by_length
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if there is not None:
        query, key, value = (x.index_select(0, there.to(x.device)) for x in (query, key, value))
    done, start = [], 0
    for length, count in runs:
        q, k, v = (
            x[start : start + length * count].unflatten(0, (count, length)).transpose(1, 2) for x in (query, key, value)
        )
        start += length * count
        out = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        done.append(out.transpose(1, 2).flatten(0, 1))
    out = torch.cat(done)
    return (out if back is None else out.index_select(0, back.to(out.device))).unsqueeze(0)
