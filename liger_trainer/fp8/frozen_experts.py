"""Quantizes the routed experts of a frozen base to FP8: every block class that follows transformers' layout."""

import functools
from typing import Any

import torch
from torch import nn

from liger_trainer.fp8.frozen_layer import FrozenFP8Module, ReadOnly
from liger_trainer.patching.core.binding import own_class
from liger_trainer.patching.core.contracts import PackedExperts
from liger_triton import Float8Matrices
from liger_triton.frozen_float8 import quantized_matrices

WEIGHTS = ("gate_up_proj", "down_proj")


class FrozenFloat8Experts(FrozenFP8Module, PackedExperts):
    """Mixin that stores the weights of a block of experts in FP8. The forward is still the one of the block's class.

    Each weight has bits (E, N, K) and a scale (E, N), one per output of an expert, whether or not the block stores its
    weights transposed. Weights are dequantized to 16-bit at every use.
    """

    weights = {name: (f"{name}_bits", f"{name}_scale") for name in WEIGHTS}

    def packed(self, name: str) -> Float8Matrices:
        """Return `gate_up_proj` (E, 2 I, H) or `down_proj` (E, H, I)."""
        return Float8Matrices(*self.stored(name), self.compute_dtype)

    def _dequantized(self, name: str) -> torch.Tensor:
        weight = self.packed(name).unpack()
        weight = weight.mT if self.is_transposed else weight
        return weight if torch.compiler.is_compiling() else weight.as_subclass(ReadOnly)

    @property
    def gate_up_proj(self) -> torch.Tensor:
        return self._dequantized("gate_up_proj")

    @property
    def down_proj(self) -> torch.Tensor:
        return self._dequantized("down_proj")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy and pickle by the transformers class: the generated class is not importable."""
        return _new, (self.unpacked_class,), self.__getstate__()


@functools.cache
def _class_of(cls: Any) -> type[nn.Module]:
    return type(f"Float8{cls.__name__}", (FrozenFloat8Experts, cls), {"unpacked_class": cls})


def _new(cls: Any) -> nn.Module:
    return object.__new__(_class_of(cls))


def is_block(module: nn.Module) -> bool:
    """Return whether `module` is one of transformers' blocks of experts with stacked (3-D) weights."""
    weights = [module._parameters.get(name) for name in WEIGHTS]
    are_stacked = all(weight is not None and weight.ndim == 3 for weight in weights)
    return are_stacked and hasattr(own_class(module).forward, "__wrapped__")


def quantize_block(block: nn.Module, device: torch.device | None = None) -> None:
    """Quantize the weights of `block` to FP8 in place, on `device` if it is given."""
    for name, names in FrozenFloat8Experts.weights.items():
        weight = block._parameters.pop(name)
        float8 = quantized_matrices(weight.mT if block.is_transposed else weight, device)
        block.__dict__["compute_dtype"] = weight.dtype
        for part, tensor in zip(names, (float8.bits.view(torch.uint8), float8.scale), strict=True):
            block.register_parameter(part, nn.Parameter(tensor, requires_grad=False))
    cls: Any = type(block)
    block.__class__ = _class_of(cls)
