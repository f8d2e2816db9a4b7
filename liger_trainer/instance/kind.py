"""One kind of module that is swapped: what the file of a pattern hands to `apply_liger`."""

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch._subclasses import FakeTensor

from liger_trainer.instance.binding import Binding
from liger_trainer.instance.guards import Guards, guards_of

PLAIN_TENSORS = (nn.Parameter, torch.Tensor, FakeTensor)  # no DTensor, and nothing quantised


class Proven(Hashable, Protocol):
    """The formula that a module was proven to compute. Its `str()` is the variant that the report names."""

    @property
    def operation(self) -> str:
        """A key of the report."""


class Kind(NamedTuple):
    """The way to find, prove and replace modules of one kind.

    Attributes:
        nominated: Tells whether a module looks like one of this kind.
        prove: Returns (what the module computes, None), or (None, the reason why we have no kernel for it).
        build: Makes the method to bind from what was proven, and where `rebuilds`, from the bytes above which a result
            is computed again.
        guessed_operation: Names the operation under which a module is reported that could not be proven.
        why_not: Tells why one module, whose formula is proven, has to keep its own code, or returns None.
        binding: What is bound, `Binding` or a subclass that remembers more.
        guards: Makes the guards of a proof of the module, or raises `NotProven`.
        rebuilds (`bool`): Whether results are computed again in the backward pass.
    """

    nominated: Callable[[nn.Module], bool]
    prove: Callable[[nn.Module], tuple[Proven | None, str | None]]
    build: Callable[..., Callable]
    guessed_operation: Callable[[nn.Module], str]
    why_not: Callable[[nn.Module], str | None] = lambda module: None
    binding: type[Binding] = Binding
    guards: Callable[[nn.Module], Guards] = guards_of
    rebuilds: bool = False


def names_of(cls: type) -> tuple[str, str]:
    """By which a class of a library is known that need not be installed."""
    return cls.__module__, cls.__qualname__
