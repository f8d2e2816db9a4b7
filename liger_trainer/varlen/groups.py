"""Finds rows of a batch that start with the same tokens, and lays them out so that a shared prefix is computed once.

    [ prefix 1 .. prefix n | rows that share nothing | private parts of group 1, group 2, ... ]

The rows of a group have equal tokens, in the same columns, up to the first scored position. They share all of these
tokens except the last one: its state predicts the first token of each row's private part. So every token has at most
one label.
"""

from itertools import chain
from typing import NamedTuple

import torch


class SharingRule(NamedTuple):
    """When sharing pays off. It costs a fixed time per layer: attention to the prefix, and the merge.

    Attributes:
        least_prefix (`int`): Fewest tokens that a group shares. Flash attention's backward is parallel over keys, so a
            short prefix is a single block of keys that loops over all private tokens.
        least_saved (`int`): Fewest tokens that a call saves.
        least_part (`float`): Smallest fraction of its tokens that a call saves.
        least_uncaptured (`int`): Fewest tokens of a call, counted without sharing, if it could be replayed as a CUDA
            graph only without sharing. A smaller call is limited by the host, where sharing saves no time.
        halves (`bool`, *optional*): The batch holds pairs, with the first row of each pair in its first half and the
            second row in its second half. The rows of a pair share every leading token before the scored position.
    """

    least_prefix: int
    least_saved: int
    least_part: float
    least_uncaptured: int
    halves: bool = False


# Derived from counts of launches and passes. On one H200, an 8B with LoRA took 0.81 of the time when sharing left 5,610
# of 9,187 tokens. An earlier rule shared only if 4,096 tokens were left, and computed 17,700 where 3,300 were enough.
PAYS = SharingRule(least_prefix=128, least_saved=256, least_part=1 / 32, least_uncaptured=4096)
ALWAYS = SharingRule(1, 1, 0.0, 0)


class Group(NamedTuple):
    """Rows that start with the same tokens.

    Attributes:
        rows (`list[int]`): Their indices in the batch, ascending.
        first (`int`): The column of their first token.
        shared (`int`): The number of tokens that they share.
    """

    rows: list[int]
    first: int
    shared: int


def find_groups(ids: torch.Tensor, real: torch.Tensor, scored: torch.Tensor) -> list[Group]:
    """Find rows that start with the same tokens.

    Args:
        ids (`torch.Tensor`): int64 (B, S), on a CPU.
        real (`torch.Tensor`): bool (B, S), False for padding. The tokens of a row are contiguous.
        scored (`torch.Tensor`): bool (B, S), the states that predict a label.

    Returns:
        `list[Group]`: The groups of at least two rows that share at least one token.
    """
    columns = torch.arange(ids.shape[1], device="cpu")
    firsts = torch.where(real, columns, ids.shape[1]).amin(1).tolist()
    lasts = torch.where(real, columns, -1).amax(1)
    scores = torch.where(scored, columns, ids.shape[1]).amin(1)
    until = scores.minimum(lasts).tolist()  # the last token, if the row is not scored
    values = ids.contiguous().numpy()
    alike: dict[tuple[int, int, bytes], list[int]] = {}
    for row, (first, last) in enumerate(zip(firsts, until, strict=True)):
        if last > first:  # at least one token before the one that stays private
            beginning = values[row, first : last + 1].tobytes()
            alike.setdefault((first, last, beginning), []).append(row)
    return [Group(rows, first, last - first) for (first, last, _), rows in alike.items() if len(rows) > 1]


def find_pairs(ids: torch.Tensor, real: torch.Tensor, scored: torch.Tensor) -> list[Group]:
    """Find the leading tokens that both rows of each pair have. Takes the arguments of `find_groups`.

    None of these tokens predicts a label, so the last one is shared too. Each row keeps its scored position.
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
    alike = (same | before).long().cumprod(1).sum(1)  # counts the padding before the first token too
    shared = torch.where(firsts[:half] == firsts[half:], alike - firsts[:half], 0).tolist()
    return [Group([i, i + half], int(firsts[i]), n) for i, n in enumerate(shared) if n > 0]


def worthwhile(groups: list[Group], tokens: int, rule: SharingRule) -> list[Group]:
    """Return the groups worth sharing in a batch of `tokens` tokens. Empty if they save too little together."""
    large = [group for group in groups if group.shared >= rule.least_prefix]
    saved = saved_by(large)
    return large if large and saved >= max(rule.least_saved, rule.least_part * tokens) else []


def saved_by(groups: list[Group]) -> int:
    """Return how many tokens are not computed when these groups share."""
    return sum((len(group.rows) - 1) * group.shared for group in groups)


class Layout(NamedTuple):
    """Indices between a flattened batch and its layout, on a CPU.

    Attributes:
        places (`torch.Tensor`): int64 (T,), the index in the flattened batch of each token of the layout. A prefix is
            taken from the first row of its group.
        real (`torch.Tensor`): int64 (N,), the index in the flattened batch of each real token, ascending.
        source (`torch.Tensor`): int64 (N,), the index in the layout of each real token.
        copies (`torch.Tensor`): int64 (prefix tokens, rows of the largest group), the indices in the flattened batch of
            each token of a prefix. Filled with -1 for smaller groups.
        prefixes (`list[int]`): The length of each prefix.
        lone (`list[int]`): The length of each row that shares nothing.
        private (`list[list[int]]`): For each group, the length of each private part.
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
        """Return the length of the longest row, its prefix included."""
        whole = [n + max(parts) for n, parts in zip(self.prefixes, self.private, strict=True)]
        return max([*whole, *self.lone])


def lay_out(real: torch.Tensor, groups: list[Group]) -> Layout:
    """Lay out the real tokens of a batch with one prefix for each group. `real` is bool (B, S) on a CPU."""
    width = real.shape[1]
    counts = real.sum(1).tolist()
    firsts = real.int().argmax(1).tolist()
    grouped = set(chain.from_iterable(group.rows for group in groups))
    lone = [row for row, count in enumerate(counts) if count and row not in grouped]

    def tokens_of(row: int) -> range:
        """The indices of a row's tokens in the flattened batch."""
        start = row * width + firsts[row]
        return range(start, start + counts[row])

    prefixes = [tokens_of(group.rows[0])[: group.shared] for group in groups]
    alone = [tokens_of(row) for row in lone]
    private = [[tokens_of(row)[group.shared :] for row in group.rows] for group in groups]
    parts = [*prefixes, *alone, *chain.from_iterable(private)]

    source = torch.full((real.numel(),), -1, device="cpu")
    begin = 0
    for part in parts:
        end = begin + len(part)
        source[part.start : part.stop] = _indices(range(begin, end))
        begin = end
    most = max(len(group.rows) for group in groups)
    copies = torch.full((sum(map(len, prefixes)), most), -1, device="cpu")
    begin = 0
    for group in groups:
        end = begin + group.shared
        for copy, row in enumerate(group.rows):
            there = tokens_of(row)[: group.shared]
            copies[begin:end, copy] = _indices(there)
            source[there.start : there.stop] = _indices(range(begin, end))
        begin = end
    flat = real.flatten()
    return Layout(
        places=torch.cat([*map(_indices, parts)]),
        real=flat.nonzero()[:, 0],
        source=source.masked_select(flat),
        copies=copies,
        prefixes=[*map(len, prefixes)],
        lone=[*map(len, alone)],
        private=[[*map(len, rows)] for rows in private],
    )


def _indices(tokens: range) -> torch.Tensor:
    return torch.arange(tokens.start, tokens.stop, device="cpu")
