"""The gates of MLPs and of blocks of experts: act(gate) * up, plain or clamped and scaled."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from liger_triton import geglu, swiglu

GATES: dict[tuple[str, str], Callable[..., torch.Tensor]] = {  # (operation, approximate) -> the kernel
    ("swiglu", ""): swiglu,
    ("geglu", "tanh"): functools.partial(geglu, approximate="tanh"),
    ("geglu", "none"): functools.partial(geglu, approximate="none"),
}
SCALES = (1.0, 10.0, 100.0)  # of the random inputs: a clamp at 7 or at 10 does not show at 1


@dataclass(frozen=True)
class Gate:
    """The function of gate and up that a module computes.

    Attributes:
        operation (`str`): `"swiglu"` or `"geglu"`.
        approximate (`str`): Which GELU it is, `"tanh"` or `"none"`; empty for SwiGLU.
        limit, alpha, scale (`str` or `None`): The module's attributes that are the `limit`, `alpha` and `gate_scale` of
            `liger_triton.swiglu`.
        up_offset (`float`): What is added to up.
    """

    operation: str
    approximate: str
    limit: str | None = None
    alpha: str | None = None
    scale: str | None = None
    up_offset: float = 0.0

    def function(self, module: nn.Module) -> Callable[..., torch.Tensor]:
        """The function, with the values that the attributes of `module` have now."""
        if not (self.limit or self.alpha or self.scale or self.up_offset):
            return GATES[self.operation, self.approximate]
        names = {"limit": self.limit, "alpha": self.alpha, "gate_scale": self.scale}
        values = {option: getattr(module, name) for option, name in names.items() if name is not None}
        return functools.partial(swiglu, up_offset=self.up_offset, **values)

    def __str__(self) -> str:
        text = "silu" if self.operation == "swiglu" else f"gelu, approximate={self.approximate!r}"
        text += f", clamped by {self.limit}" if self.limit else ""
        text += f", sigmoid times {self.alpha}" if self.alpha else ""
        text += f", gate times {self.scale}" if self.scale else ""
        return text + (f", up + {self.up_offset:g}" if self.up_offset else "")


def candidates(module: nn.Module) -> list[Gate]:
    """The gates that `module` may compute, the likely ones first: the plain ones, and those with numbers it has."""
    limits, alphas = (numbers(module, word) for word in ("limit", "alpha"))
    scales = scale_names(module)
    found = [Gate(*key) for key in GATES]
    if limits or alphas or scales:
        options = itertools.product((None, *limits), (None, *alphas), (None, *scales), (0.0, 1.0))
        found += [Gate("swiglu", "", *chosen) for chosen in options if any(chosen)]
    return found


def numbers(module: nn.Module, word: str) -> list[str]:
    """The names of the positive numbers among the attributes of `module` that have `word` in them."""
    return [
        name
        for name, value in module.__dict__.items()
        if word in name and isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    ]


def scale_names(module: nn.Module) -> list[str]:
    """The names of the attributes of `module` that may multiply something, and are not 1."""
    names = [name for word in ("multiplier", "scale") for name in numbers(module, word)]
    return [name for name in names if getattr(module, name) != 1]


def guessed_operation(module: nn.Module) -> str:
    """The operation under which an MLP is reported that could not be proven, by the name of its activation's class."""
    for name in ("act_fn", "activation_fn", "act", "activation"):
        if "gelu" in type(getattr(module, name, None)).__name__.lower():
            return "geglu"
    return "swiglu"
