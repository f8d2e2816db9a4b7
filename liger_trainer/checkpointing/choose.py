"""From the measured sizes of one micro-batch to the layers that may keep their activations.

The bytes of a call that keeps its activations are there from the start of the call to the start of its backward pass,
in which a checkpointed layer has computed its activations again and holds as much. So they are added to the moments in
between, and the largest of the sums is the new peak. The call whose backward pass is first is chosen first: its
activations are gone again before the gradients of the other layers have grown. Where rows are long, the results of
attention come before all other activations, since a byte of them saves more time.

A call whose activations wait on the host takes up their bytes twice for a short while: until they have been copied, and
from when they are fetched again. In between it does not even hold its hidden states. But somebody else may hold them: a
hook, or, those of the first call, the function that calls the layers. Until it was seen that nobody does, they are
counted all the while, and a second time from when they are fetched. These calls lie evenly between the others, so that
the copies keep up with what is computed, and there are no more of them than it takes for nothing to be computed again.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from liger_trainer.checkpointing.plan import NOWHERE, Count, Plan, Profile, Size, Spread

_Span = tuple[int, int, int]  # (first, last, bytes): they are there from the moment `first` to before `last`
SLACK = 1.05  # how much longer copies may take than they should
ROOM = 0.9  # of the host's memory: tensors do not fill slabs to the last byte


class Carrier(NamedTuple):
    """How much the host's memory takes, and how fast it is reached: what a plan needs to know of a `Transport`.

    Attributes:
        room (`int`): How many bytes of activations it takes at most.
        rate (`float`): Bytes a second, in the slower direction.
    """

    room: int
    rate: float


def choose(
    profile: Profile, base: int, limit: int, size: Size, most: Count | None = None, long: bool = False,
    carrier: Carrier | None = None, agreed: tuple[Count, Spread] | None = None,
) -> Plan:  # fmt: skip
    """The plan that keeps the most within `limit`: first the results of attention if rows are long, then whole calls.

    Args:
        profile (`Profile`): What was measured, for a size that covers `size`.
        base (`int`): What is allocated when the micro-batch starts.
        limit (`int`): The most that may be allocated. If it is less than what the micro-batch needs with every layer
            checkpointed, it is that: what adds nothing to the peak may be kept.
        size (`Size`): What the first layer is given this time. All sizes of activations shrink with it.
        most (`Count`, *optional*): Keep no more calls than these.
        long (`bool`): Whether it pays to keep the results of attention.
        carrier (`Carrier`, *optional*): Of the host's memory; without it, no activations wait there.
        agreed (`tuple`, *optional*): Keep just so many calls, even beyond `limit`: several processes have agreed on
            them.
    """
    if agreed is not None:
        choice = _Choice(profile, base, math.inf, size, agreed[0], long)
        plan = choice.with_on_host(agreed[1]) or choice.with_on_host(NOWHERE)
        assert plan is not None
        return plan
    choice = _Choice(profile, base, limit, size, most, long)
    plan = choice.with_on_host(NOWHERE)
    assert plan is not None  # there is nothing that would have to fit
    if carrier is None or not choice.again(plan):
        return plan
    spread = choice.widest(carrier, None if most is None else most.on_host)
    found = None
    while spread.number and found is None:
        found = choice.with_on_host(spread)
        spread = spread._replace(number=spread.number - 1)
    if found is None or choice.again(found) >= choice.again(plan):
        return plan
    least, fewest = 1, found.spread.number
    while not choice.again(found) and least < fewest:  # look for the fewest with which nothing is computed again
        middle = (least + fewest) // 2
        fewer = choice.with_on_host(spread._replace(number=middle))
        if fewer is not None and not choice.again(fewer):
            found, fewest = fewer, middle
        else:
            least = middle + 1
    return found


class _Choice:
    """What `choose` knows of one micro-batch, from which it makes plans and compares them.

    Attributes:
        share (`float`): How much of the measured activations there are this time.
        moments (`list[int]`): The most bytes of each moment with every layer checkpointed.
        limit (`float`): The most bytes of any moment of a plan.
        choosable (`list[int]`): The numbers of the calls that may keep something, by their backward passes.
    """

    def __init__(self, profile: Profile, base: int, limit: float, size: Size, most: Count | None, long: bool):
        self.profile, self.calls, self.most, self.long = profile, profile.calls, most, long
        self.share = profile.share(size)
        self.moments = [base + moment for moment in profile.moments]
        self.limit = max(limit, max(self.moments))
        self.choosable = profile.choosable

    def again(self, plan: Plan) -> int:
        """How many calls are computed again."""
        return len(self.choosable) - len(plan.kept | plan.on_host)

    def with_on_host(self, spread: Spread) -> Plan | None:
        """The plan that keeps the most beside these calls on the host; None if they do not fit."""
        moments, calls, most = list(self.moments), self.calls, self.most

        def fill(wanted: Iterable[tuple[int, int]]) -> frozenset[int]:
            """Add calls with their bytes, one after the other, as long as they fit."""
            chosen = []
            for i, extra in wanted:
                if not self._add(moments, [(calls[i].first, calls[i].last or 0, extra)]):
                    break
                chosen.append(i)
            return frozenset(chosen)

        on_host = self._spread_out(spread)
        if on_host is None or not all(self._add(moments, self._spans(i, spread)) for i in on_host):
            return None
        rest = [i for i in self.choosable if i not in on_host]
        of_attention = {i: calls[i].attention or 0 for i in rest if self.long and calls[i].attention}
        attention = fill(list(of_attention.items())[: None if most is None else most.attention])
        whole = {i: (calls[i].extra or 0) - (of_attention[i] if i in attention else 0) for i in rest}
        kept = fill(list(whole.items())[: None if most is None else most.whole])
        return Plan(kept, max(moments), attention, on_host, spread)

    def _add(self, moments: list[int], spans: Iterable[_Span]) -> bool:
        """Add bytes to `moments` if they fit."""
        grown = list(moments)
        for first, last, extra in spans:
            extra = round(extra * self.share)
            for moment in range(first, last):
                grown[moment] += extra
        fits = max(grown) <= self.limit
        if fits:
            moments[:] = grown
        return fits

    # On the host

    def widest(self, carrier: Carrier, most: int | None) -> Spread:
        """The spread with the most calls with which the copies keep up, and for which the host has room."""
        sizes = [(self.calls[i].extra or 0) + self.calls[i].given for i in self.choosable]
        if not sizes or not self.profile.seconds:
            return NOWHERE
        of_call = max(max(sizes), 1)
        # While one call is copied, so many are computed
        computed = of_call / carrier.rate / (self.profile.seconds / len(self.calls)) * SLACK
        lag = math.ceil(computed)
        able = self._able(Spread(1, 0, lag))
        start = next((i for i in able if self._add(list(self.moments), self._spans(i, Spread(1, 0, lag)))), None)
        if start is None:
            return NOWHERE
        room = carrier.room * ROOM - sum(call.away for call in self.calls) * self.share
        number = min(
            len(able) - able.index(start) if computed <= 1 else int((able[-1] - start + 1) / computed),
            max(0, int(room / (of_call * self.share))),
        )
        return Spread(number if most is None else min(number, most), start, lag)

    def _able(self, spread: Spread) -> list[int]:
        """The calls after which enough others come for a copy to be done meanwhile."""
        end = len(self.calls) - 1 - max(spread.lag, spread.ahead)
        able = []
        for i in sorted(self.choosable):
            if spread.start <= i < end:
                fetched, last = self.calls[i + spread.ahead].last, self.calls[i].last
                if fetched is not None and last is not None and fetched < last:
                    able.append(i)
        return able

    def _spread_out(self, spread: Spread) -> frozenset[int] | None:
        """`spread.number` calls that lie evenly between those that are able; None if there are not so many."""
        able = self._able(spread)
        if spread.number > len(able):
            return None
        return frozenset(able[k * len(able) // spread.number] for k in range(spread.number))

    def _spans(self, i: int, spread: Spread) -> list[_Span]:
        """What call `i` adds to the moments when its activations are on the host."""
        call, extra = self.calls[i], self.calls[i].extra or 0
        copied, fetched, last = self.calls[i + 1 + spread.lag].first, self.calls[i + spread.ahead].last, call.last
        assert fetched is not None and last is not None
        gone = call.given if call.left else 0
        return [
            (call.first, copied, extra),
            (copied, fetched, call.stays - gone),
            (fetched, last, extra + call.given - gone),
        ]
