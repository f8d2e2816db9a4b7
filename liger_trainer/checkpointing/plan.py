"""What is measured of a micro-batch, and which of its layers keep their activations.

A micro-batch is a sequence of calls of layers, forward and then backward. The starts of all these cut it into moments.
Measured are the most bytes that were allocated in each moment while every layer was checkpointed, and how many bytes
more a call takes up when its activations are kept. All sizes are bytes.
"""

from dataclasses import dataclass, replace
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
        on_host (`int`): All activations, in the host's memory.
    """

    whole: int
    attention: int
    on_host: int = 0


NOTHING = Count(0, 0)


class Spread(NamedTuple):
    """Which calls have their activations on the host.

    Attributes:
        number (`int`): How many. They lie evenly between `start` and the last one that can be.
        start (`int`): The number of the first of them.
        lag (`int`): How many calls later their copies on the host are waited for.
    """

    number: int
    start: int
    lag: int

    @property
    def ahead(self) -> int:
        """How many calls before its backward pass a call is fetched again. A backward pass takes twice as long."""
        return max(1, self.lag // 2)


NOWHERE = Spread(0, 0, 0)


class Seen(NamedTuple):
    """What was seen of a call when its activations had been copied to the host.

    Attributes:
        left (`bool`): Whether the hidden states that it was given are gone from the GPU.
        stays (`int`): How many bytes of its activations are not.
    """

    left: bool
    stays: int


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
        given (`int`): The bytes of the hidden states that it is given, if they stay on the GPU when it is checkpointed.
        away (`int`): Their bytes if they wait on the host then. They are part of `extra`.
        left (`bool`): Whether it was seen that the hidden states are gone from the GPU when its activations are on the
            host. Without that, somebody else may hold them.
        stays (`int`): How many bytes of `extra` were seen to stay on the GPU then.
    """

    size: Size
    extra: int | None
    first: int
    last: int | None
    attention: int | None = None
    given: int = 0
    away: int = 0
    left: bool = False
    stays: int = 0

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
        given, away = max(self.given, other.given), max(self.away, other.away)
        left, stays = self.left or other.left, max(self.stays, other.stays)
        return Call(size, extra, self.first, self.last, attention, given, away, left, stays)


@dataclass(frozen=True)
class Profile:
    """What a micro-batch needs with every layer checkpointed.

    Attributes:
        moments (`tuple[int, ...]`): The most bytes of each moment, beyond those at the start of the micro-batch.
        calls (`tuple[Call, ...]`): In the order in which they are made.
        long (`bool`): Whether it was measured what the results of attention take up, which pays for long rows.
        seconds (`float`): How long the forward pass of the calls has taken. 0 if that was not measured.
    """

    moments: tuple[int, ...]
    calls: tuple[Call, ...]
    long: bool = False
    seconds: float = 0.0

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

    def with_seen(self, seen: dict[int, Seen], size: Size) -> "Profile":
        """With what was seen of calls whose activations were on the host, when the first layer was given `size`.

        Of what stays on the GPU, as much is expected of the calls that hold as much as one of these.
        """
        stays: dict[int | None, int] = {}
        for number, of_call in seen.items():
            extra = self.calls[number].extra
            stays[extra] = max(stays.get(extra, 0), round(of_call.stays / self.share(size)))
        calls = [replace(call, stays=max(call.stays, stays.get(call.extra, 0))) for call in self.calls]
        for number, of_call in seen.items():
            calls[number] = replace(calls[number], left=of_call.left)
        return replace(self, calls=tuple(calls))

    def merged(self, other: "Profile") -> "Profile":
        """What covers both; it is `other` if their calls are not made in the same order."""

        def order(profile: "Profile") -> list[tuple[int, int | None]]:
            return [(call.first, call.last) for call in profile.calls]

        if order(self) != order(other):
            return other
        calls = tuple(a.merged(b) for a, b in zip(self.calls, other.calls, strict=True))
        moments = tuple(map(max, self.moments, other.moments))
        return Profile(moments, calls, self.long or other.long, max(self.seconds, other.seconds))


@dataclass(frozen=True)
class Plan:
    """What is kept.

    Attributes:
        kept (`frozenset[int]`): The numbers of the calls that keep their activations.
        peak (`int`): The most bytes that the micro-batch will have allocated.
        attention (`frozenset[int]`): The numbers of the calls that keep the results of attention, those of `kept` among
            them if they were chosen for that first.
        on_host (`frozenset[int]`): The numbers of the calls whose activations wait on the host.
        spread (`Spread`): How these lie between the others.
    """

    kept: frozenset[int]
    peak: int
    attention: frozenset[int] = frozenset()
    on_host: frozenset[int] = frozenset()
    spread: Spread = NOWHERE

    @property
    def count(self) -> Count:
        return Count(len(self.kept), len(self.attention), len(self.on_host))

    @property
    def attention_only(self) -> int:
        """How many calls keep the results of attention, and nothing else."""
        return len(self.attention - self.kept)
