"""Contexts that change the sizes operations work with: allocate without computing, and cut logits into small chunks."""

import contextlib
import threading
from collections.abc import Iterator


class _Now(threading.local):
    on = False
    most_rows: int | None = None


_now = _Now()


@contextlib.contextmanager
def sizes_only() -> Iterator[None]:
    """While this is open, in this thread, tensors on CPUs count as tensors on a CUDA GPU, and no kernel is launched.

    Every operation allocates what it would allocate on a GPU, and computes nothing. That is for tensors without values,
    those of PyTorch's `FakeTensorMode`: it tells how much memory a step would take.
    """
    before, _now.on = computes_nothing(), True
    try:
        yield
    finally:
        _now.on = before


def computes_nothing() -> bool:
    return _now.on


@contextlib.contextmanager
def chunks_of_at_most(rows: int) -> Iterator[None]:
    """While this is open, in this thread, a chunk of logits has at most `rows` rows.

    The results stay the same but for the order of sums. This is for tests of what happens between chunks: with real
    sizes, a small model's logits are one chunk.

    Raises:
        ValueError: `rows` is below 1.
    """
    if rows < 1:
        raise ValueError(f"rows is {rows}. A chunk has at least one row.")
    before = _now.most_rows
    _now.most_rows = rows
    try:
        yield
    finally:
        _now.most_rows = before


def most_chunk_rows() -> int | None:
    return _now.most_rows
