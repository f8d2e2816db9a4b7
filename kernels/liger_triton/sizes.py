"""Contexts that change how operations run: allocate without computing, or cut logits into small chunks."""

import contextlib
import threading
from collections.abc import Iterator


class _Now(threading.local):
    on = False
    most_rows: int | None = None


_now = _Now()


@contextlib.contextmanager
def sizes_only() -> Iterator[None]:
    """Make operations allocate what they would allocate on a GPU, and compute nothing.

    While the context is open, in this thread, CPU tensors count as CUDA tensors and no kernel is launched. Use it with
    the tensors of PyTorch's `FakeTensorMode`, which have no values, to learn how much memory a step would take.
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
    """Limit a chunk of logits to `rows` rows while the context is open, in this thread.

    The results stay the same but for the order of sums. Tests use it to see what happens between chunks: with real
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
