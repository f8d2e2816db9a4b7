"""What gated MLPs and blocks of experts have in common: act(gate) * up."""

import functools
from collections.abc import Callable

from torch import nn

from liger_triton import geglu, swiglu

GATES = {
    ("swiglu", ""): swiglu,
    ("geglu", "tanh"): functools.partial(geglu, approximate="tanh"),
    ("geglu", "none"): functools.partial(geglu, approximate="none"),
}
SCALES = (1.0, 10.0, 100.0)  # clamps of 7 and 10 are not seen at 1


def guessed_operation(module: nn.Module) -> str:
    """Under which operation an MLP without proof is reported: by what its activation is called."""
    for name in ("act_fn", "activation_fn", "act", "activation"):
        if "gelu" in type(getattr(module, name, None)).__name__.lower():
            return "geglu"
    return "swiglu"


def children_but(module, names) -> tuple[tuple[str, type, Callable], ...]:
    """Name, class and the class's forward of the children of `module` that are not in `names`."""
    return tuple((n, type(c), type(c).forward) for n, c in module._modules.items() if n not in names and c is not None)
