"""Blocks of routed experts of a frozen base in eight bits: those of transformers, whatever their class."""

import functools
from typing import Any

import torch
from torch import nn

from liger_trainer.fp8.frozen_layer import InEightBits, ReadOnly
from liger_trainer.instance.binding import own_class
from liger_triton import Float8Matrices
from liger_triton.frozen_float8 import quantized_matrices

WEIGHTS = ("gate_up_proj", "down_proj")


class FrozenFloat8Experts(InEightBits):
    """What a block of experts in eight bits has besides the code of its class, which computes with its weights.

    Each weight has bits (E, N, K) and a scale (E, N), one for each output of an expert, in whichever order the block
    stored it before. The weights are made in 16 bits each time that they are used.
    """

    weights = {name: (f"{name}_bits", f"{name}_scale") for name in WEIGHTS}
    unpacked_class: type[nn.Module]

    def packed(self, name: str) -> Float8Matrices:
        """Return `gate_up_proj` (E, 2 I, H) or `down_proj` (E, H, I)."""
        return Float8Matrices(*self.stored(name), self.compute_dtype)

    def _made(self, name: str) -> torch.Tensor:
        weight = self.packed(name).unpack()
        weight = weight.mT if self.is_transposed else weight
        return weight if torch.compiler.is_compiling() else weight.as_subclass(ReadOnly)

    @property
    def gate_up_proj(self) -> torch.Tensor:
        return self._made("gate_up_proj")

    @property
    def down_proj(self) -> torch.Tensor:
        return self._made("down_proj")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy and pickle a block by its class of transformers, since its own class has no place in a module."""
        return _new, (self.unpacked_class,), self.__getstate__()


@functools.cache
def _class_of(cls: Any) -> type[nn.Module]:
    return type(f"Float8{cls.__name__}", (FrozenFloat8Experts, cls), {"unpacked_class": cls})


def _new(cls: Any) -> nn.Module:
    return object.__new__(_class_of(cls))


def is_block(module: nn.Module) -> bool:
    """Return whether `module` is a block of experts of transformers with weights of three dimensions."""
    own = (module._parameters.get(name) for name in WEIGHTS)
    return hasattr(own_class(module).forward, "__wrapped__") and all(p is not None and p.ndim == 3 for p in own)


def put_into_eight_bits(block: nn.Module, device: torch.device | None = None) -> None:
    """Put the weights of `block` into eight bits in their place, on `device` if it is given."""
    for name, names in FrozenFloat8Experts.weights.items():
        weight = block._parameters.pop(name)
        float8 = quantized_matrices(weight.mT if block.is_transposed else weight, device)
        block.__dict__["compute_dtype"] = weight.dtype
        for part, tensor in zip(names, (float8.bits.view(torch.uint8), float8.scale), strict=True):
            block.register_parameter(part, nn.Parameter(tensor, requires_grad=False))
    cls: Any = type(block)
    block.__class__ = _class_of(cls)
