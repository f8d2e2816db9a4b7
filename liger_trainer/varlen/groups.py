"""Rows of a batch that begin alike, and how they are laid out so that what they share is computed once.

    [ prefix 1 .. prefix n | rows that share nothing | private parts of group 1, group 2, ... ]

A group is a set of rows with equal tokens, in the same columns, up to the first position that is scored. They share all
of these tokens but the last, because its state predicts the first token of each row's own part. So every token has at
most one label.
"""

from typing import NamedTuple

import torch


class SharingRule(NamedTuple):
    """When it pays to share: the attention of private parts to their prefix and the merge cost a fixed time a layer.

    Attributes:
        least_prefix (`int`): Tokens that a group has to share. The backward pass of flash attention is parallel over
            keys, so a short prefix is one block of keys that walks over all private tokens.
        least_saved (`int`): Tokens that a call has to save.
        least_part (`float`): What part of its tokens a call has to save.
        least_uncaptured (`int`): Tokens that a call has to have before sharing, where it could be replayed as a CUDA
            graph without sharing only. With fewer, the host sets the pace, and sharing saves it nothing.
        halves (`bool`, *optional*): Whether the rows are pairs, the first of each in the first half of the batch and
            the second in the other half. They share all that they begin with before the position that is scored.
    """

    least_prefix: int
    least_saved: int
    least_part: float
    least_uncaptured: int
    halves: bool = False


# Derived from counts of launches and passes. On one H200, an 8B with LoRA takes 0.81 of the time where 5,610 of 9,187
# tokens are left. A first rule asked for 4,096 to be left, so 17,700 tokens were computed where 3,300 were enough.
PAYS = SharingRule(least_prefix=128, least_saved=256, least_part=1 / 32, least_uncaptured=4096)
ALWAYS = SharingRule(1, 1, 0.0, 0)


class Group(NamedTuple):
    """Rows that begin alike.

    Attributes:
        rows (`list[int]`): Which rows of the batch, in rising order.
        first (`int`): The column of their first token.
        shared (`int`): Tokens that they share.
    """

    rows: list[int]
    first: int
    shared: int


def find_groups(ids: torch.Tensor, real: torch.Tensor, scored: torch.Tensor) -> list[Group]:
    """Find the rows that begin alike.

    Args:
        ids (`torch.Tensor`): int64 (B, S), on a CPU.
        real (`torch.Tensor`): bool (B, S), which are tokens. Those of a row follow one another.
        scored (`torch.Tensor`): bool (B, S), the states that predict a label.

    Returns:
        `list[Group]`: Those of two rows or more that share a token or more.
    """
    columns = torch.arange(ids.shape[1], device="cpu")
    firsts = torch.where(real, columns, ids.shape[1]).amin(1).tolist()
    lasts = torch.where(real, columns, -1).amax(1)
    scores = torch.where(scored, columns, ids.shape[1]).amin(1)
    until = scores.minimum(lasts).tolist()  # of a row that is not scored: its last token
    values = ids.contiguous().numpy()
    alike: dict[tuple[int, int, bytes], list[int]] = {}
    for row, (first, last) in enumerate(zip(firsts, until, strict=True)):
        if last > first:  # at least one token before the one that stays private
            beginning = values[row, first : last + 1].tobytes()
            alike.setdefault((first, last, beginning), []).append(row)
    return [Group(rows, first, last - first) for (first, last, _), rows in alike.items() if len(rows) > 1]


def find_pairs(ids: torch.Tensor, real: torch.Tensor, scored: torch.Tensor) -> list[Group]:
    """Find what both rows of each pair begin with. It takes the arguments of `find_groups`.

    No token of it predicts a label, so the last one may be shared too. Each row keeps the position that is scored.
    """
    half = len(ids) // 2
    if len(ids) % 2:
        return []
    columns = torch.arange(ids.shape[1], device="cpu")
    firsts = torch.where(real, columns, ids.shape[1]).amin(1)
    lasts = torch.where(real, columns, -1).amax(1)
    ends = torch.where(scored, columns, ids.shape[1]).amin(1).minimum(lasts)
    same = (ids[:half] == ids[half:]) & (columns < ends[:half, None]) & (columns < ends[half:, None])
    before = columns < firsts[:half, None]
    alike = (same | before).long().cumprod(1).sum(1)  # columns, those before the first token included
    shared = torch.where(firsts[:half] == firsts[half:], alike - firsts[:half], 0).tolist()
    return [Group([i, i + half], int(firsts[i]), n) for i, n in enumerate(shared) if n > 0]


def worthwhile(groups: list[Group], tokens: int, rule: SharingRule) -> list[Group]:
    """Return the groups that it pays to share, of a batch with so many tokens. None of them or enough of them."""
    large = [group for group in groups if group.shared >= rule.least_prefix]
    saved = saved_by(large)
    return large if large and saved >= max(rule.least_saved, rule.least_part * tokens) else []


def saved_by(groups: list[Group]) -> int:
    """Return how many tokens are not computed if these groups share."""
    return sum((len(group.rows) - 1) * group.shared for group in groups)


class Layout(NamedTuple):
    """Where the tokens of a batch lie, on a CPU.

    Attributes:
        places (`torch.Tensor`): int64 (T,): where in the flattened batch each token of the layout is. A prefix is taken
            from the first row of its group.
        real (`torch.Tensor`): int64 (N,): where in the flattened batch a real token is, in rising order.
        source (`torch.Tensor`): int64 (N,): where in the layout it is.
        copies (`torch.Tensor`): int64 (prefix tokens, rows of the largest group): where in the flattened batch a token
            of a prefix is; -1 in smaller groups.
        prefixes (`list[int]`): Tokens of each prefix.
        lone (`list[int]`): Tokens of each row that shares nothing.
        private (`list[list[int]]`): For each group, the tokens of each private part.
    """

    places: torch.Tensor
    real: torch.Tensor
    source: torch.Tensor
    copies: torch.Tensor
    prefixes: list[int]
    lone: list[int]
    private: list[list[int]]

    @property
    def longest_row(self) -> int:
        """Return the tokens of the longest row, prefix and private part together."""
        whole = [n + max(parts) for n, parts in zip(self.prefixes, self.private, strict=True)]
        return max([*whole, *self.lone])


def lay_out(real: torch.Tensor, groups: list[Group]) -> Layout:
    """Lay out the tokens `real` of a batch, bool (B, S) on a CPU, so that each group has its prefix once."""
    width = real.shape[1]
    counts = real.sum(1).tolist()
    firsts = real.int().argmax(1).tolist()
    grouped = {row for group in groups for row in group.rows}
    lone = [row for row, count in enumerate(counts) if count and row not in grouped]

    def tokens_of(row: int, skipped: int = 0) -> torch.Tensor:
        start = row * width + firsts[row]
        return torch.arange(start + skipped, start + counts[row], device="cpu")

    prefixes = [tokens_of(group.rows[0])[: group.shared] for group in groups]
    own = [tokens_of(row) for row in lone]
    private = [[tokens_of(row, group.shared) for row in group.rows] for group in groups]
    places = torch.cat([*prefixes, *own, *(part for parts in private for part in parts)])

    source = torch.full((real.numel(),), -1, device="cpu")
    source[places] = torch.arange(len(places), device="cpu")
    most = max(len(group.rows) for group in groups)
    copies = torch.full((sum(map(len, prefixes)), most), -1, device="cpu")
    begin = 0
    for group, prefix in zip(groups, prefixes, strict=True):
        end = begin + len(prefix)
        for copy, row in enumerate(group.rows):
            there = tokens_of(row)[: group.shared]
            copies[begin:end, copy] = there
            source[there] = torch.arange(begin, end, device="cpu")
        begin = end
    flat = real.flatten().nonzero()[:, 0]
    lengths = [[len(part) for part in parts] for parts in private]
    return Layout(places, flat, source[flat], copies, [*map(len, prefixes)], [*map(len, own)], lengths)
