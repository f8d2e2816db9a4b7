"""Reads the tensors of a linear layer and of PEFT's LoRA on it, for code that does not call the layer.

The layer has a weight of 16 or 32 bits, of eight bits (`fp8/frozen_layer.py`), or of a library of quantisation
(`quantized_bases.py`). Tensors are read from the dictionaries of the modules, since an attribute of a module takes a
call of Python.
"""

from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear
from liger_trainer.instance.guards import linear_is_torchs
from liger_trainer.instance.kind import PLAIN_TENSORS
from liger_trainer.lora.quantized_bases import library_of, weight_of
from liger_triton.lora_linear import Weight

Tensors: TypeAlias = tuple[Weight, torch.Tensor | None, tuple[torch.Tensor, torch.Tensor, float] | None]

_KNOWN_DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


class Part(NamedTuple):
    """One adapter of a layer."""

    a: nn.Module
    b: nn.Module
    dropout: nn.Module
    scaling: float

    def drops(self) -> bool:
        """Return whether the dropout changes its input now."""
        return type(self.dropout) is nn.Dropout and self.dropout.training and self.dropout.p > 0


def active_parts(layer: nn.Module) -> list[Part] | None:
    """Return the plain adapters whose results `layer` adds to its base's now; None if it does anything else."""
    state = layer.__dict__
    if state["_disable_adapters"] or state["merged_adapters"] or not state.get("cast_input_dtype_enabled", True):
        return None
    modules = state["_modules"]
    a_of, b_of, dropout_of = (modules[name]._modules for name in ("lora_A", "lora_B", "lora_dropout"))
    active = state["_active_adapter"]
    parts = []
    for name in (active,) if isinstance(active, str) else active:
        if name in a_of:
            if name in state["lora_variant"]:
                return None
            scaling = state["scaling"][name]
            if getattr(scaling, "requires_grad", False):  # it is trained
                return None
            parts.append(Part(a_of[name], b_of[name], dropout_of[name], scaling))
    return parts or None


def called_by(layer: nn.Module, parts: list[Part]) -> list[nn.Module]:
    """Return the modules that the layer's own code calls, and ours does not."""
    called = [layer._modules["base_layer"]]
    for part in parts:
        called += part[:3]
    return called


def is_linear(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or not linear_is_torchs():
        return False
    parameters = module._parameters  # `module.weight` takes a call of Python
    weight, bias = parameters.get("weight"), parameters.get("bias")  # FSDP1 takes them away
    return type(weight) in PLAIN_TENSORS and (bias is None or type(bias) in PLAIN_TENSORS)


def is_base(module: nn.Module) -> bool:
    """Return whether this is a linear layer with plain tensors, or with a quantised weight."""
    return is_linear(module) or is_quantized(module)


def is_quantized(module: nn.Module) -> bool:
    """Return whether this is a layer of this package with a weight of eight bits, or one of a known library."""
    return type(module) is FrozenFloat8Linear or library_of(module) is not None


def weight_now(base: nn.Module, x: torch.Tensor) -> Weight | None:
    """Return the weight of a base that multiplies `x`; None where the code of the base has to run."""
    if type(base) is FrozenFloat8Linear:
        return base.float8
    weight = base._parameters.get("weight")
    return weight if type(base) is nn.Linear and type(weight) in PLAIN_TENSORS else weight_of(base, x)


def is_plain(layer: nn.Module, parts: list[Part]) -> bool:
    """Return whether base and adapters are linear layers with plain tensors, adapters without a bias."""
    if not is_base(layer._modules["base_layer"]):
        return False
    for a, b, dropout, _ in parts:
        if not (is_linear(a) and is_linear(b) and type(dropout) in (nn.Identity, nn.Dropout)):
            return False
        if a._parameters["bias"] is not None or b._parameters["bias"] is not None:
            return False
    return True


def computes(x: torch.Tensor, base: nn.Module, parts: list[Part], width: int | None = None) -> bool:
    """Return whether the layer's own code multiplies x, or something of its dtype and another width, without an error.

    If not, that code runs and raises.
    """
    if type(x) not in PLAIN_TENSORS or not x.is_floating_point():
        return False
    device, dtype = x.device, x.dtype
    weight = weight_now(base, x)
    if weight is None or (x.shape[-1] if width is None else width) != weight.shape[1]:
        return False
    packed = not isinstance(weight, torch.Tensor)
    tensors = [] if packed else [weight]
    for part in parts:
        tensors += (part.a._parameters["weight"], part.b._parameters["weight"])
    for t in tensors:
        if t.dtype not in _KNOWN_DTYPES or t.device != device:
            return False
        if t.dtype == torch.float64 != dtype:  # PEFT computes in it, we do not
            return False
    autocast = torch.is_autocast_enabled(device.type)
    if not packed:
        return weight.dtype == dtype or (dtype != torch.float64 and autocast)
    if dtype == torch.float16 and not autocast and any([t.dtype == torch.float32 for t in tensors]):
        return False  # our function computes this in plain PyTorch, which would keep an unpacked weight
    return dtype in _KNOWN_DTYPES and dtype != torch.float64 and weight.device == device


def without_dropped(x: torch.Tensor, part: Part) -> tuple[torch.Tensor, list[Part]]:
    """Return x with zeros where the dropout of `part` puts them, and `part` with a scaling that makes up for them.

    The module itself draws the mask. Its factor for the other numbers goes into the scaling, because x times it would
    be rounded in 16 bits.
    """
    with torch.no_grad():
        kept = part.dropout(torch.ones_like(x, dtype=part.a.weight.dtype)) != 0
    return torch.where(kept, x, 0), [part._replace(scaling=part.scaling / (1 - part.dropout.p))]


def tensors_of(base: nn.Module, parts: list[Part], x: torch.Tensor) -> Tensors:
    """Return what our functions take for `base` and its adapters in a call with `x`. Several adapters are concatenated
    to one."""
    weight, adapter = weight_now(base, x), None
    if len(parts) == 1:
        adapter = parts[0].a._parameters["weight"], parts[0].b._parameters["weight"], parts[0].scaling
    elif parts:
        a = torch.cat([part.a.weight for part in parts])
        adapter = a, torch.cat([part.scaling * part.b.weight for part in parts], 1), 1.0
    bias = base._parameters["bias"] if type(base) is nn.Linear else base.bias  # HQQ's is no parameter
    return weight, bias, adapter  # type: ignore[return-value]  # none of them is None
