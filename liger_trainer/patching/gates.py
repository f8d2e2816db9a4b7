"""The gates of MLPs and of blocks of experts: act(gate) * up, plain or clamped and scaled."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_triton import geglu, swiglu

GATES: dict[str, Callable[..., torch.Tensor]] = {  # activation, by its name in `liger_triton` -> the kernel
    "silu": swiglu,
    "gelu_tanh": functools.partial(geglu, approximate="tanh"),
    "gelu": functools.partial(geglu, approximate="none"),
}
SCALES = (1.0, 10.0, 100.0)  # of the random inputs: a clamp at 7 or at 10 does not show at 1


@dataclass(frozen=True)
class Gate:
    """The function of gate and up that a module computes.

    Attributes:
        activation (`str`): A key of `GATES`.
        limit, alpha, scale (`str` or `None`): The module's attributes that are the `limit`, `alpha` and `gate_scale` of
            `liger_triton.swiglu`.
        up_offset (`float`): What is added to up.
    """

    activation: str
    limit: str | None = None
    alpha: str | None = None
    scale: str | None = None
    up_offset: float = 0.0

    @property
    def operation(self) -> str:
        return "swiglu" if self.activation == "silu" else "geglu"

    @property
    def is_plain(self) -> bool:
        return not (self.limit or self.alpha or self.scale or self.up_offset)

    def numbers(self, module: nn.Module) -> dict[str, Any]:
        """Return options for `liger_triton.swiglu` from attributes of `module`, with their values now."""
        names = {"limit": self.limit, "alpha": self.alpha, "gate_scale": self.scale}
        return {option: getattr(module, name) for option, name in names.items() if name is not None}

    def function(self, module: nn.Module) -> Callable[..., torch.Tensor]:
        """Return the function, with the values that the attributes of `module` have now."""
        if self.is_plain:
            return GATES[self.activation]
        return functools.partial(swiglu, up_offset=self.up_offset, **self.numbers(module))

    def __str__(self) -> str:
        formulas = {"silu": "silu", "gelu_tanh": "gelu, approximate='tanh'", "gelu": "gelu, approximate='none'"}
        text = formulas[self.activation]
        text += f", clamped by {self.limit}" if self.limit else ""
        text += f", sigmoid times {self.alpha}" if self.alpha else ""
        text += f", gate times {self.scale}" if self.scale else ""
        return text + (f", up + {self.up_offset:g}" if self.up_offset else "")


def candidates(module: nn.Module) -> list[Gate]:
    """List the gates that `module` may compute, the likely ones first: plain ones, then ones with its numbers."""
    limits, alphas = (numbers(module, word) for word in ("limit", "alpha"))
    scales = scale_names(module)
    found = [Gate(activation) for activation in GATES]
    if limits or alphas or scales:
        options = itertools.product((None, *limits), (None, *alphas), (None, *scales), (0.0, 1.0))
        found += [Gate("silu", *chosen) for chosen in options if any(chosen)]
    return found


def numbers(module: nn.Module, word: str) -> list[str]:
    """Return the names of the positive numbers among the attributes of `module` that have `word` in them."""
    return [
        name
        for name, value in module.__dict__.items()
        if word in name and isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    ]


def limits_of(module: nn.Module) -> list[float]:
    """Return the limits of `module` that the random inputs of a proof reach."""
    found = [getattr(module, name) for name in numbers(module, "limit")]
    return [limit for limit in found if limit <= SCALES[-1]]


def with_limits(values: torch.Tensor, module: nn.Module, source: torch.Generator) -> torch.Tensor:
    """Return `values`, a fifth of them replaced by the limits of `module` and by their negatives, if it has any.

    A proof needs them: the gradient of a number that equals a limit depends on how it is cut off, random numbers seldom
    have that value, as in a bf16 model they often do. A limit beyond what the random inputs reach is left
    out, because results are compared with the largest one.
    """
    for limit in limits_of(module):
        chosen = torch.rand(values.shape, generator=source, device="cpu")
        values = values.masked_fill(chosen < 0.1, limit)
        values = values.masked_fill(chosen > 0.9, -limit)
    return values


def scale_names(module: nn.Module) -> list[str]:
    """Return the names of the attributes of `module` that may multiply something, and are not 1."""
    names = [*numbers(module, "multiplier"), *numbers(module, "scale")]
    return [name for name in names if getattr(module, name) != 1]


def guessed_operation(module: nn.Module) -> str:
    """Guess the operation of an MLP that could not be proven, for the report, by its activation's class."""
    for name in ("act_fn", "activation_fn", "act", "activation"):
        if "gelu" in type(getattr(module, name, None)).__name__.lower():
            return "geglu"
    return "swiglu"
