"""What gated MLPs and blocks of experts have in common: both compute act(gate) * up."""

import functools
from collections.abc import Callable, Collection

import torch
from torch import nn

from liger_trainer.instance.hooks import LeftOut
from liger_triton import geglu, swiglu

GATES: dict[tuple[str, str], Callable[..., torch.Tensor]] = {  # (operation, approximate) -> the kernel
    ("swiglu", ""): swiglu,
    ("geglu", "tanh"): functools.partial(geglu, approximate="tanh"),
    ("geglu", "none"): functools.partial(geglu, approximate="none"),
}
SCALES = (1.0, 10.0, 100.0)  # of the random inputs: a clamp at 7 or at 10 does not show at 1


def guessed_operation(module: nn.Module) -> str:
    """The operation under which an MLP is reported that could not be proven, by the name of its activation's class."""
    for name in ("act_fn", "activation_fn", "act", "activation"):
        if "gelu" in type(getattr(module, name, None)).__name__.lower():
            return "geglu"
    return "swiglu"


def children_except(module: nn.Module, names: Collection[str]) -> LeftOut:
    """Name, class and the class's forward of the children of `module` that are not in `names`."""
    return tuple((n, type(c), type(c).forward) for n, c in module._modules.items() if n not in names and c is not None)
