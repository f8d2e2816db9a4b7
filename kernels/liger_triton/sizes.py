"""Contexts that change how operations run: allocate without computing, or cut logits into small chunks."""

import contextlib
import threading
from collections.abc import Iterator


class _Now(threading.local):
    """The state that the contexts of this file set in this thread. Operations read it without a call."""

    computes_nothing = False
    most_rows: int | None = None


now = _Now()


@contextlib.contextmanager
def sizes_only() -> Iterator[None]:
    """Make operations allocate what they would allocate on a GPU, and compute nothing.

    While the context is open, in this thread, CPU tensors count as CUDA tensors and no kernel is launched. Use it with
    the tensors of PyTorch's `FakeTensorMode`, which have no values, to learn how much memory a step would take.
    """
    before, now.computes_nothing = now.computes_nothing, True
    try:
        yield
    finally:
        now.computes_nothing = before


def computes_nothing() -> bool:
    return now.computes_nothing


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
    before = now.most_rows
    now.most_rows = rows
    try:
        yield
    finally:
        now.most_rows = before
