"""From the measured sizes of one micro-batch to the layers that may keep their activations.

A micro-batch is a sequence of calls of layers, forward and then backward. The starts of all these cut it into moments.
Measured are the most bytes that were allocated in each moment while every layer was checkpointed, and how many bytes
more a call takes up when its activations are kept. Those bytes are there from the start of the call to the start of its
backward pass, in which a checkpointed layer has computed its activations again and holds as much. So the bytes of a
call that keeps its activations are added to the moments in between, and the largest of the sums is the new peak.

The call whose backward pass is first is chosen first: its activations are gone again before the gradients of the other
layers have grown. Where rows are long, the results of attention come before all other activations, since a byte of them
saves more time. All sizes are bytes.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Size:
    """The size of what a layer is given: (rows, length, ...).

    Attributes:
        tokens (`int`): rows * length, with which nearly all activations grow.
        pairs (`int`): rows * length * length, with which masks and the scores of eager attention grow.
    """

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def pairs(self) -> int:
        return self.rows * self.length**2

    def covers(self, other: "Size") -> bool:
        """Whether a layer that is given `other` needs no more than one that is given this."""
        return other.tokens <= self.tokens and other.pairs <= self.pairs

    def share(self, other: "Size") -> float:
        """At most this share of the activations of this size are those of `other`."""
        return max(other.tokens / self.tokens, other.pairs / self.pairs)


class Count(NamedTuple):
    """How many calls keep something.

    Attributes:
        whole (`int`): All activations.
        attention (`int`): The results of attention, those that keep all activations among them.
    """

    whole: int
    attention: int


NOTHING = Count(0, 0)


@dataclass(frozen=True)
class Call:
    """One call of a layer.

    Attributes:
        size (`Size`): Of what it is given.
        extra (`int` or `None`): How many bytes more it holds if its activations are kept. None: not known.
        first (`int`): The moment that begins with the call.
        last (`int` or `None`): The moment that begins with its backward pass; None if it has none.
        attention (`int` or `None`): How many bytes more it holds if the results of its attention are kept. None: not
            known, or it has none that could be kept.
    """

    size: Size
    extra: int | None
    first: int
    last: int | None
    attention: int | None = None

    def merged(self, other: "Call") -> "Call":
        """What covers both. Extras grow with the tokens."""
        size = self.size if self.size.covers(other.size) else other.size
        if not size.covers(self.size):  # neither covers the other
            length = max(self.size.length, other.size.length)
            size = Size(-(-max(self.size.tokens, other.size.tokens) // length), length)

        def grown(*measured: tuple[int | None, Size]) -> int | None:
            return max((round(b * size.tokens / of.tokens) for b, of in measured if b is not None), default=None)

        extra = grown((self.extra, self.size), (other.extra, other.size))
        attention = grown((self.attention, self.size), (other.attention, other.size))
        return Call(size, extra, self.first, self.last, attention)


@dataclass(frozen=True)
class Profile:
    """What a micro-batch needs with every layer checkpointed.

    Attributes:
        moments (`tuple[int, ...]`): The most bytes of each moment, beyond those at the start of the micro-batch.
        calls (`tuple[Call, ...]`): In the order in which they are made.
        long (`bool`): Whether it was measured what the results of attention take up, which pays for long rows.
    """

    moments: tuple[int, ...]
    calls: tuple[Call, ...]
    long: bool = False

    @property
    def peak(self) -> int:
        return max(self.moments)

    @property
    def choosable(self) -> list[int]:
        """The calls that may keep their activations, that with the first backward pass first."""
        known = [(call.last, i) for i, call in enumerate(self.calls) if call.extra is not None and call.last]
        return [i for _, i in sorted(known, key=lambda pair: pair[0])]

    def covers(self, size: Size, number: int = 0) -> bool:
        """Whether call `number` was measured with something at least as large as `size`."""
        return number < len(self.calls) and self.calls[number].size.covers(size)

    def share(self, size: Size) -> float:
        """How much of the activations there are when the first layer is given `size`. 1 if layers differ in size."""
        of_all = {call.size for call in self.calls}
        return min(1.0, of_all.pop().share(size)) if len(of_all) == 1 else 1.0

    def merged(self, other: "Profile") -> "Profile":
        """What covers both; it is `other` if their calls are not made in the same order."""

        def order(profile: "Profile") -> list[tuple[int, int | None]]:
            return [(call.first, call.last) for call in profile.calls]

        if order(self) != order(other):
            return other
        calls = tuple(a.merged(b) for a, b in zip(self.calls, other.calls, strict=True))
        return Profile(tuple(map(max, self.moments, other.moments)), calls, self.long or other.long)


@dataclass(frozen=True)
class Plan:
    """What is kept.

    Attributes:
        kept (`frozenset[int]`): The numbers of the calls that keep their activations.
        peak (`int`): The most bytes that the micro-batch will have allocated.
        attention (`frozenset[int]`): The numbers of the calls that keep the results of attention, those of `kept` among
            them if they were chosen for that first.
    """

    kept: frozenset[int]
    peak: int
    attention: frozenset[int] = frozenset()

    @property
    def count(self) -> Count:
        return Count(len(self.kept), len(self.attention))

    @property
    def attention_only(self) -> int:
        """How many calls keep the results of attention, and nothing else."""
        return len(self.attention - self.kept)


def choose(
    profile: Profile, base: int, limit: int, size: Size, most: Count | None = None, long: bool = False
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
    """
    share = profile.share(size)
    moments = [base + moment for moment in profile.moments]
    limit = max(limit, max(moments))
    calls = profile.calls

    def fill(wanted: list[tuple[int, int]]) -> frozenset[int]:
        """Add calls with their bytes to the moments, one after the other, as long as they fit."""
        nonlocal moments
        chosen = []
        for i, extra in wanted:
            grown = list(moments)
            for moment in range(calls[i].first, calls[i].last or 0):
                grown[moment] += round(extra * share)
            if max(grown) > limit:
                break
            moments = grown
            chosen.append(i)
        return frozenset(chosen)

    of_attention = {i: calls[i].attention or 0 for i in profile.choosable if long and calls[i].attention}
    attention = fill(list(of_attention.items())[: None if most is None else most.attention])
    rest = {i: (calls[i].extra or 0) - (of_attention[i] if i in attention else 0) for i in profile.choosable}
    kept = fill(list(rest.items())[: None if most is None else most.whole])
    return Plan(kept, max(moments), attention)
