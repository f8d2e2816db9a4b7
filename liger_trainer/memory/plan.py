"""From the measurement of a micro-batch to a plan: what each layer keeps within a limit of memory.

A micro-batch is cut into intervals. The first begins with the first layer, each of the others where the backward pass
recomputes a layer. The peak of each interval is known. A layer that keeps its activations adds at most their bytes, and
only to the intervals from its call to its backward pass. So the largest sum is a bound of the new peak. The layer with
the first backward pass is chosen first: its activations are freed before the gradients of the other layers have grown.
All sizes are bytes.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

SLACK = 1.05  # copies to the host may take longer than planned by this factor
ROOM = 0.9  # of the host's memory is planned with: tensors do not fill slabs to the last byte
_Span = tuple[int, int, int]  # (first, last, bytes): allocated in the intervals from `first` to before `last`


@dataclass(frozen=True)
class Size:
    """The size of a tensor (rows, length, ...), such as the hidden states of a layer."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens: nearly all activations grow with it."""
        return self.rows * self.length

    @property
    def pairs(self) -> int:
        """Return the number of pairs of tokens: masks and the scores of eager attention grow with it."""
        return self.rows * self.length**2

    def covers(self, other: "Size") -> bool:
        """Return whether a layer needs no more for `other` than for this."""
        return other.tokens <= self.tokens and other.pairs <= self.pairs

    def share(self, other: "Size") -> float:
        """Return a bound of the activations for `other`, as a share of those for this."""
        return min(1.0, max(other.tokens / max(self.tokens, 1), other.pairs / max(self.pairs, 1)))


Sizes = dict[Hashable, Size]  # of the tensors of a batch by their places in it; at None, of the first layer's input


def sizes_of(batch: Any, place: tuple[Hashable, ...] = ()) -> Sizes:
    """Return the sizes of all tensors in `batch`, which may be nested, by their places in it."""
    if isinstance(batch, torch.Tensor):
        rows = batch.shape[0] if batch.ndim > 1 else 1
        return {place: Size(rows, batch.numel() // max(rows, 1))} if batch.ndim else {}
    items: Iterable[tuple[Hashable, Any]] = ()
    if isinstance(batch, Mapping):
        items = batch.items()
    elif isinstance(batch, (list, tuple)):
        items = enumerate(batch)
    found: Sizes = {}
    for key, part in items:
        found |= sizes_of(part, (*place, key))
    return found


@dataclass
class RecordedCall:
    """One call of a layer."""

    layer: int
    group: Hashable  # equal for layers that are built alike
    size: Size  # of its input
    first: int  # the interval of its call
    last: int | None = None  # the interval that begins when it is recomputed; None: it was not
    extra: int = 0  # the bytes that it holds more if its activations are kept
    casts: int = 0  # the part of `extra` that is copies of weights by autocast, which do not grow with the tokens
    attention: int = 0  # the bytes that it holds more if the results of its attention are kept; 0: it has none
    hidden_bytes: int = 0  # the bytes of its hidden states

    def bytes(self, share: float) -> int:
        """Return `extra` for a share of the tokens."""
        casts = min(self.casts, self.extra)
        return casts + math.ceil((self.extra - casts) * share)

    def span(self, size: int) -> _Span:
        """Return the span of `size` bytes from the call to its backward pass."""
        return self.first, self.last or 0, size


@dataclass(frozen=True)
class ActivationPlan:
    """The layers that keep something. The rest is recomputed."""

    kept: frozenset[int] = frozenset()  # all activations
    attention: frozenset[int] = frozenset()  # the results of attention, of other layers
    on_host: frozenset[int] = frozenset()  # all activations of other layers, in the host's memory
    peak: int = 0  # a bound of the bytes that will be allocated
    offload_lag: int = 0  # how many calls later a copy to the host is waited for

    @property
    def prefetch_depth(self) -> int:
        """Return how many calls before its backward pass a swap-in begins. A backward takes as long as two forwards."""
        return max(1, self.offload_lag // 2)

    @property
    def not_recomputed(self) -> frozenset[int]:
        """Return the layers that are not recomputed."""
        return self.kept | self.on_host

    @property
    def is_empty(self) -> bool:
        return not (self.kept or self.attention or self.on_host)

    @property
    def amount(self) -> tuple[int, int]:
        return len(self.not_recomputed), len(self.attention)


NOTHING = ActivationPlan()


class Link(NamedTuple):
    """The link to the host's memory."""

    host_bytes_free: int
    layers_per_copy: float  # how many layers are computed while the activations of one are copied


@dataclass
class Measurement:
    """A micro-batch that was measured with every layer checkpointed: a bound for all that it covers."""

    sizes: Sizes
    accumulates: bool  # whether it has added to gradients of an earlier one
    long: bool  # whether its rows were long enough to measure the results of attention
    peaks: list[int]  # of the intervals, above what was allocated when the first layer was called
    calls: list[RecordedCall]  # in their order
    seconds: float = 0.0  # of its calls in the forward pass; 0: not measured
    margin: int = 0  # by how many bytes a plan made from this was too low

    @property
    def layers(self) -> dict[int, list[RecordedCall]]:
        """Return the calls of each layer."""
        found: dict[int, list[RecordedCall]] = {}
        for call in self.calls:
            found.setdefault(call.layer, []).append(call)
        return found

    @property
    def choosable(self) -> dict[int, list[RecordedCall]]:
        """Return the layers that may keep something, the one with the first backward pass first.

        Where the batch does not show how much the last layers will get, as without padding, earlier layers with inputs
        of another size keep nothing: their activations would still be there when the last ones need more.
        """
        last = self.calls[-1].size
        shown = any(size == last for place, size in self.sizes.items() if place is not None)
        able = []
        for layer, calls in self.layers.items():
            recomputed = [call.last for call in calls if call.last is not None and (shown or call.size == last)]
            if len(recomputed) == len(calls):
                able.append((min(recomputed), layer, calls))
        able.sort(key=lambda entry: entry[0])
        return {layer: calls for _, layer, calls in able}

    def covers(self, sizes: Sizes, accumulates: bool, long: bool) -> bool:
        """Return whether a micro-batch of `sizes` needs no more than this one."""
        if accumulates != self.accumulates or long > self.long or sizes.keys() != self.sizes.keys():
            return False
        return all(self.sizes[place].covers(size) for place, size in sizes.items())

    def share(self, sizes: Sizes) -> float:
        """Return a bound of the activations for `sizes`, as a share of these."""
        if len({call.size for call in self.calls}) == 1:
            return self.sizes[None].share(sizes[None])
        return max(self.sizes[place].share(size) for place, size in sizes.items())

    def layers_per_copy(self, rate: float) -> float:
        """Return how many calls are computed while a call is copied to the host, at `rate` bytes a second."""
        largest = max(call.extra + call.hidden_bytes for call in self.calls)
        return largest / rate / (self.seconds / len(self.calls)) * SLACK if self.seconds else math.inf


class Measurements:
    """The measurements of one training. None of them covers another."""

    def __init__(self) -> None:
        self._all: list[Measurement] = []

    def covering(self, sizes: Sizes, accumulates: bool, long: bool) -> list[Measurement]:
        """Return the measurements that can plan a micro-batch of `sizes`."""
        return [each for each in self._all if each.covers(sizes, accumulates, long)]

    def add(self, new: Measurement) -> None:
        """Add `new` in place of those that it covers, with their largest margin. Nothing if it is covered itself."""
        smaller = [each for each in self._all if new.covers(each.sizes, each.accumulates, each.long)]
        new.margin = max((each.margin for each in smaller), default=0)
        if smaller or not self.covering(new.sizes, new.accumulates, new.long):
            self._all = [each for each in self._all if each not in smaller]
            self._all.append(new)

    def forget(self, wrong: Measurement) -> None:
        """Remove a measurement that has not foreseen what a micro-batch did."""
        self._all = [each for each in self._all if each is not wrong]


def choose(
    measured: Measurement, base: int, limit: int, sizes: Sizes, long: bool, link: Link | None = None
) -> ActivationPlan:
    """Return the plan that keeps the most. Nothing that is kept adds to an interval that exceeds `limit`.

    Args:
        measured (`Measurement`): A micro-batch that covers `sizes`, the sizes of this one.
        base (`int`): What is allocated when the first layer is called.
        limit (`int`): The most that may be allocated.
        long (`bool`): Whether rows are so long that it pays to keep the results of attention.
        link (`Link`, *optional*): The link to the host's memory.
    """
    share, able = measured.share(sizes), measured.choosable
    peaks = [base + peak for peak in measured.peaks]
    best = _filled(measured, peaks, limit, share, long, NOTHING)
    if link is None or len(best.not_recomputed) == len(able):
        return best
    lag = math.ceil(link.layers_per_copy)
    room = link.host_bytes_free * ROOM
    spots = _spots(measured, lag, link.layers_per_copy)
    for number, i in enumerate(spots, 1):
        call = measured.calls[i]
        room -= call.bytes(share) + call.hidden_bytes
        # After its swap-in its hidden states count a second time: a hook or the caller may still hold the first copy
        swap_in, last = measured.calls[i + max(1, lag // 2)].last or 0, call.last or 0
        grown = _grown(peaks, limit, [(swap_in, last, call.bytes(share)), (swap_in, last + 1, call.hidden_bytes)])
        if room < 0 or grown is None:
            break
        peaks, on_host = grown, frozenset(measured.calls[k].layer for k in spots[:number])
        plan = _filled(measured, peaks, limit, share, long, ActivationPlan(on_host=on_host, offload_lag=lag))
        # While these are copied, they take room that the layers behind them need later only
        behind = {c.layer for c in measured.calls[spots[0] + 1 :]} & plan.kept
        if len(behind) < min(number, int((lag + 1) / max(link.layers_per_copy, 1)) + 1):
            break
        best = plan if plan.amount > best.amount else best
        if len(plan.not_recomputed) == len(able):
            break
    return best


def _grown(peaks: list[int], limit: int, spans: Iterable[_Span]) -> list[int] | None:
    """Return `peaks` with `spans`; None if one of these intervals exceeds `limit` then. Others may exceed it anyhow."""
    grown = list(peaks)
    for first, last, size in spans:
        for i in range(first, last):
            grown[i] += size
            if grown[i] > limit:
                return None
    return grown


def _filled(
    measured: Measurement, peaks: list[int], limit: int, share: float, long: bool, plan: ActivationPlan
) -> ActivationPlan:
    """Return `plan` and what else fits: the results of attention if rows are long, then whole layers."""
    able = {layer: calls for layer, calls in measured.choosable.items() if layer not in plan.on_host}
    attention: dict[int, list[int]] = {}
    kept = set()
    for layer, calls in able.items() if long else ():
        sizes = [math.ceil(call.attention * share) for call in calls]
        if not all(sizes):
            continue
        grown = _grown(peaks, limit, [call.span(size) for call, size in zip(calls, sizes, strict=True)])
        if grown is None:
            break
        peaks, attention[layer] = grown, sizes
    for layer, calls in able.items():
        there = attention.get(layer, [0] * len(calls))
        more = [call.span(call.bytes(share) - size) for call, size in zip(calls, there, strict=True)]
        grown = _grown(peaks, limit, more)
        if grown is None:
            break
        peaks = grown
        kept.add(layer)
    return ActivationPlan(frozenset(kept), frozenset(attention) - kept, plan.on_host, max(peaks), plan.offload_lag)


def _spots(measured: Measurement, lag: int, pace: float) -> list[int]:
    """Return the calls with activations that can be copied to the host and back in time, by number, the last first.

    They are of the largest group of layers, and `pace` calls apart. Enough other calls come after them.
    """
    able = measured.choosable
    ahead = max(1, lag // 2)
    spots: list[int] = []
    groups = Counter(call.group for call in measured.calls if call.layer in able and len(able[call.layer]) == 1)
    below = float(len(measured.calls) - 2 - max(lag, ahead))
    for i in range(int(below), -1, -1) if groups else ():
        call, trigger = measured.calls[i], measured.calls[i + ahead]
        fits = call.layer in able and len(able[call.layer]) == 1 and call.group == groups.most_common(1)[0][0]
        if i <= below and fits and trigger.last is not None and trigger.last < (call.last or 0):
            spots.append(i)
            below = min(below, i + 1) - max(pace, 1)
    return spots
