"""Running the operations for the sizes of their tensors alone, on a machine without a GPU."""

import contextlib
import threading
from collections.abc import Iterator


class _Now(threading.local):
    on = False


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
