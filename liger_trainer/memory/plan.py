"""What was seen of a micro-batch, and from that the layers that keep their activations within a limit.

A micro-batch is cut into moments. The first begins with its first layer, each of the others where the backward pass
computes a layer again. Known of a moment is the most bytes that were allocated in it. A layer that keeps its
activations instead of computing them again adds no more than their bytes, and only to the moments from its call to
where its backward pass begins. So the largest sum is a bound of the new peak. The layer whose backward pass is first is
chosen first: its activations are gone again before the gradients of the other layers have grown. All sizes are bytes.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

SLACK = 1.05  # how much longer copies to the host may take than they should
ROOM = 0.9  # of the host's memory: tensors do not fill slabs to the last byte
_Spans = Iterable[tuple[int, int, int]]  # (first, last, bytes): they are there from a moment to before another


@dataclass(frozen=True)
class Size:
    """The size of a tensor (rows, length, ...), such as what a layer is given."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """With these, nearly all activations grow."""
        return self.rows * self.length

    @property
    def pairs(self) -> int:
        """With these, masks and the scores of eager attention grow."""
        return self.rows * self.length**2

    def covers(self, other: "Size") -> bool:
        """Whether a layer that is given `other` needs no more than one that is given this."""
        return other.tokens <= self.tokens and other.pairs <= self.pairs

    def share(self, other: "Size") -> float:
        """At most this share of the activations of this size are those of `other`."""
        return min(1.0, max(other.tokens / max(self.tokens, 1), other.pairs / max(self.pairs, 1)))


Sizes = dict[Hashable, Size]  # of the tensors of a batch by their places in it, and of what the first layer is given


def sizes_of(batch: Any, place: tuple[Hashable, ...] = ()) -> Sizes:
    """The sizes of all tensors in `batch`, which may be nested containers, by where they are in it."""
    if isinstance(batch, torch.Tensor):
        rows = batch.shape[0] if batch.ndim > 1 else 1
        return {place: Size(rows, batch.numel() // max(rows, 1))} if batch.ndim else {}
    items: Iterable[tuple[Hashable, Any]] = ()
    if isinstance(batch, Mapping):
        items = batch.items()
    elif isinstance(batch, (list, tuple)):
        items = enumerate(batch)
    return {where: size for key, part in items for where, size in sizes_of(part, (*place, key)).items()}


@dataclass
class Call:
    """One call of a layer."""

    layer: int
    group: Hashable  # layers of one group are built alike
    size: Size  # of what it is given
    first: int  # the moment in which it is called
    last: int | None = None  # the moment that begins when it is computed again; None: it was not
    extra: int = 0  # how many bytes more it holds if its activations are kept
    casts: int = 0  # of these, weights that autocast has cast, which are as many for few tokens
    attention: int = 0  # how many bytes more it holds if the results of its attention are kept; 0: it has none
    given: int = 0  # the bytes of the hidden states that it is given

    def bytes(self, share: float) -> int:
        """`extra` of so large a share of the tokens."""
        casts = min(self.casts, self.extra)
        return casts + math.ceil((self.extra - casts) * share)

    def held(self, size: int) -> tuple[int, int, int]:
        """So many bytes, from the call to its backward pass."""
        return self.first, self.last or 0, size


@dataclass(frozen=True)
class Plan:
    """What is kept of which layers. The rest is computed again."""

    kept: frozenset[int] = frozenset()  # all activations
    attention: frozenset[int] = frozenset()  # the results of attention, of other layers
    on_host: frozenset[int] = frozenset()  # all activations of other layers, on the host
    peak: int = 0  # the most bytes that the micro-batch will have allocated
    lag: int = 0  # how many calls later copies to the host are waited for

    @property
    def ahead(self) -> int:
        """How many calls before its backward pass a call is fetched again. A backward pass takes twice as long."""
        return max(1, self.lag // 2)

    @property
    def once(self) -> frozenset[int]:
        """The layers that are computed once."""
        return self.kept | self.on_host

    @property
    def is_empty(self) -> bool:
        return not (self.kept or self.attention or self.on_host)

    @property
    def amount(self) -> tuple[int, int]:
        return len(self.once), len(self.attention)


NOTHING = Plan()


class Link(NamedTuple):
    """The way to the host's memory."""

    room: int  # how many bytes of activations the host takes at most
    pace: float  # how many layers are computed while the activations of one are copied


@dataclass
class Seen:
    """A micro-batch with every layer checkpointed that was measured. It is a bound for all that it covers."""

    sizes: Sizes  # of its tensors and of its first layer, which is at None
    adds: bool  # whether it has added to gradients that were there
    long: bool  # whether its rows were long enough to measure the results of attention
    moments: list[int]  # the most bytes of each, beyond those that were there when the first layer was called
    calls: list[Call]  # in their order
    seconds: float = 0.0  # how long the forward pass of the calls has taken; 0 if that was not measured
    margin: int = 0  # by how many bytes a prediction was too low that was made from this

    @property
    def layers(self) -> dict[int, list[Call]]:
        found: dict[int, list[Call]] = {}
        for call in self.calls:
            found.setdefault(call.layer, []).append(call)
        return found

    @property
    def choosable(self) -> dict[int, list[Call]]:
        """The layers that may keep something, that with the first backward pass first.

        Where the batch does not show how much the last layers will be given, as without padding, the layers before
        those that are given as much keep nothing: what they hold would be there when the last ones need more.
        """
        last = self.calls[-1].size
        shown = any(size == last for place, size in self.sizes.items() if place is not None)
        able = {
            layer: calls
            for layer, calls in self.layers.items()
            if all(call.last is not None and (shown or call.size == last) for call in calls)
        }
        return dict(sorted(able.items(), key=lambda item: min(call.last or 0 for call in item[1])))

    def covers(self, sizes: Sizes, adds: bool, long: bool) -> bool:
        """Whether a micro-batch of `sizes` needs no more than this one."""
        if adds != self.adds or long > self.long or sizes.keys() != self.sizes.keys():
            return False
        return all(self.sizes[place].covers(size) for place, size in sizes.items())

    def share(self, sizes: Sizes) -> float:
        """How large a share of the activations there are with `sizes`."""
        if len({call.size for call in self.calls}) == 1:
            return self.sizes[None].share(sizes[None])
        return max(self.sizes[place].share(size) for place, size in sizes.items())

    def pace(self, rate: float) -> float:
        """How many calls are computed while a call is copied to the host, at `rate` bytes a second."""
        largest = max(call.extra + call.given for call in self.calls)
        return largest / rate / (self.seconds / len(self.calls)) * SLACK if self.seconds else math.inf


def choose(seen: Seen, base: int, limit: int, sizes: Sizes, long: bool, link: Link | None = None) -> Plan:
    """The plan that keeps the most. Nothing that is kept adds to a moment that exceeds `limit`.

    Args:
        seen (`Seen`): A micro-batch that covers `sizes`, those of this one.
        base (`int`): What is allocated when the first layer is called.
        limit (`int`): The most that may be allocated.
        long (`bool`): Whether rows are so long that it pays to keep the results of attention.
        link (`Link`, *optional*): To the host's memory.
    """
    filling = _Filling(seen, [base + moment for moment in seen.moments], limit, seen.share(sizes))
    best, able = filling.plan(NOTHING, long), seen.choosable
    if link is None or len(best.once) == len(able):
        return best
    lag, room = math.ceil(link.pace), link.room * ROOM
    spots = _spots(seen, lag, link.pace)
    for number, i in enumerate(spots, 1):
        call = seen.calls[i]
        room -= call.bytes(filling.share) + call.given
        if room < 0 or not filling.add(filling.on_host(i, max(1, lag // 2))):
            break
        plan = filling.plan(Plan(on_host=frozenset(seen.calls[k].layer for k in spots[:number]), lag=lag), long)
        # While these are copied, they take room that the layers behind them need later only
        behind = {c.layer for c in seen.calls[spots[0] + 1 :]} & plan.kept
        if len(behind) < min(number, int((lag + 1) / max(link.pace, 1)) + 1):
            break
        best = plan if plan.amount > best.amount else best
        if len(plan.once) == len(able):
            break
    return best


class _Filling:
    """The bytes of each moment, to which layers are added as long as they fit."""

    def __init__(self, seen: Seen, moments: list[int], limit: int, share: float):
        self.seen, self.moments, self.limit, self.share = seen, moments, limit, share

    def add(self, spans: _Spans) -> bool:
        """Add bytes if they fit, each in its moments: others may exceed the limit anyhow."""
        grown, fits = list(self.moments), True
        for first, last, size in spans:
            for moment in range(first, last):
                grown[moment] += size
                fits = fits and grown[moment] <= self.limit
        if fits:
            self.moments = grown
        return fits

    def plan(self, plan: Plan, long: bool) -> Plan:
        """`plan` and what else fits: the results of attention if rows are long, then whole layers."""
        rest = _Filling(self.seen, self.moments, self.limit, self.share)
        able = {layer: calls for layer, calls in self.seen.choosable.items() if layer not in plan.on_host}
        attention: dict[int, dict[int, int]] = {}
        kept = set()
        for layer, calls in able.items() if long else ():
            sizes = [math.ceil(call.attention * self.share) for call in calls]
            if not all(sizes):
                continue
            if not rest.add(call.held(size) for call, size in zip(calls, sizes, strict=True)):
                break
            attention[layer] = dict(enumerate(sizes))
        for layer, calls in able.items():
            there = attention.get(layer, {})
            if not rest.add(call.held(call.bytes(self.share) - there.get(n, 0)) for n, call in enumerate(calls)):
                break
            kept.add(layer)
        return Plan(frozenset(kept), frozenset(attention) - kept, plan.on_host, max(rest.moments), plan.lag)

    def on_host(self, i: int, ahead: int) -> _Spans:
        """What call `i` adds to the moments of the backward pass when its activations are on the host.

        They are there from when they are fetched, and with them a copy of what the call was given, which may be held
        elsewhere as well.
        """
        call, trigger = self.seen.calls[i], self.seen.calls[i + ahead]
        fetched, last = trigger.last or 0, call.last or 0
        return [(fetched, last, call.bytes(self.share)), (fetched, last + 1, call.given)]


def _spots(seen: Seen, lag: int, pace: float) -> list[int]:
    """The numbers of the calls whose activations can be copied to the host and back in time, the last one first.

    They are of the largest group of layers, and `pace` calls apart. Enough other calls come after them.
    """
    able, ahead, spots = seen.choosable, max(1, lag // 2), []
    groups = Counter(call.group for call in seen.calls if call.layer in able and len(able[call.layer]) == 1)
    below = float(len(seen.calls) - 2 - max(lag, ahead))
    for i in range(int(below), -1, -1) if groups else ():
        call, trigger = seen.calls[i], seen.calls[i + ahead]
        fits = call.layer in able and len(able[call.layer]) == 1 and call.group == groups.most_common(1)[0][0]
        if i <= below and fits and trigger.last is not None and trigger.last < (call.last or 0):
            spots.append(i)
            below = min(below, i + 1) - max(pace, 1)
    return spots
