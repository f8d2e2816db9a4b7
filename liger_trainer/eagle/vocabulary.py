"""Chooses the draft vocabulary: the most frequent labels in the data.

Draft ids keep the order of the target's ids. `d2t` (Vd,) int64 is the target's id minus the draft id. `t2d` (V,) bool
marks the target's tokens that are in the draft vocabulary.
"""

from collections.abc import Iterable
from typing import Any

import torch


def count_labels(rows: Iterable[dict[str, Any]], collate: Any, vocab_size: int, at_once: int = 64) -> torch.Tensor:
    """Return how often each token is a label, int64 (V,), in the batches that `collate` makes of `rows`."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    batch: list[dict[str, Any]] = []

    def count() -> None:
        labels = collate([dict(row) for row in batch])["labels"]
        counts.add_(torch.bincount(labels[labels != -100].flatten(), minlength=vocab_size))
        batch.clear()

    for row in rows:
        batch.append(row)
        if len(batch) == at_once:
            count()
    if batch:
        count()
    return counts


def draft_vocabulary(counts: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (d2t, t2d) of the `size` most frequent tokens. Ties go to the lower id.

    Raises:
        ValueError: There are fewer tokens than `size`.
    """
    if not 0 < size <= len(counts):
        raise ValueError(f"The draft vocabulary has {size} tokens; expected 1 to {len(counts)}, all of the target's.")
    ids = counts.sort(descending=True, stable=True).indices[:size].sort().values
    t2d = torch.zeros(len(counts), dtype=torch.bool)
    t2d[ids] = True
    return ids - torch.arange(size), t2d
