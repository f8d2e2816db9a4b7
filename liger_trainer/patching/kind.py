"""One kind of module that is swapped: what a file of patterns hands to `apply_liger`."""

from collections.abc import Callable
from typing import NamedTuple


class Kind(NamedTuple):
    """How modules of one kind are found, proven and replaced.

    Attributes:
        nominated: Module -> whether it looks like one.
        prove: Module -> (what it computes, None), or (None, why it is none of ours). What it computes is hashable, has
            an `operation` (a key of the report), `left_out` (children that our forward does not call, each with its
            class), and a `str()` for the report.
        build: What was proven, and the bytes above which a result is rebuilt -> the method to bind.
        guessed_operation: Module -> the operation under which one without proof is reported.
        method: Name of the method that is replaced; None: the forward.
    """

    nominated: Callable
    prove: Callable
    build: Callable
    guessed_operation: Callable
    method: str | None = None
