"""Reads the tensors of a linear layer and of PEFT's LoRA on it, for code that does not call the layer.

The weight is 16-bit or 32-bit, fp8 (`fp8/frozen_layer.py`), or belongs to a quantization library
(`quantized_bases.py`). These functions run in every call, so they read `__dict__`: `module.weight` goes through
`nn.Module.__getattr__`.
"""

from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear
from liger_trainer.lora.quantized_bases import library_of, weight_of
from liger_trainer.patching.core.guards import linear_is_torchs
from liger_trainer.patching.core.pattern import PLAIN_TENSORS
from liger_triton.lora_linear import Weight

Tensors: TypeAlias = tuple[Weight, torch.Tensor | None, tuple[torch.Tensor, torch.Tensor, float] | None]

_KNOWN_DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


class LoraAdapter(NamedTuple):
    """One adapter of a layer: scaling * b(a(dropout(x)))."""

    a: nn.Module
    b: nn.Module
    dropout: nn.Module
    scaling: float

    def drops(self) -> bool:
        """Return whether the dropout is active."""
        return type(self.dropout) is nn.Dropout and self.dropout.training and self.dropout.p > 0


def active_adapters(layer: nn.Module) -> list[LoraAdapter] | None:
    """Return the adapters that `layer` adds to its base, or None if it computes anything but that sum."""
    state = layer.__dict__
    if state["_disable_adapters"] or state["merged_adapters"] or not state.get("cast_input_dtype_enabled", True):
        return None
    modules = state["_modules"]
    a_of, b_of, dropout_of = (modules[name]._modules for name in ("lora_A", "lora_B", "lora_dropout"))
    active = state["_active_adapter"]
    adapters = []
    for name in (active,) if isinstance(active, str) else active:
        if name not in a_of:
            continue
        if name in state["lora_variant"]:
            return None
        scaling = state["scaling"][name]
        if getattr(scaling, "requires_grad", False):  # a trained scaling needs a gradient, which ours does not return
            return None
        adapters.append(LoraAdapter(a_of[name], b_of[name], dropout_of[name], scaling))
    return adapters or None


def called_by(layer: nn.Module, adapters: list[LoraAdapter]) -> list[nn.Module]:
    """Return the modules that PEFT's forward calls. The fused function only reads their weights."""
    called = [layer._modules["base_layer"]]
    for adapter in adapters:
        called += (adapter.a, adapter.b, adapter.dropout)
    return called


def is_linear(module: nn.Module) -> bool:
    """Return whether `module` is PyTorch's own linear layer with plain tensors."""
    if type(module) is not nn.Linear or not linear_is_torchs():
        return False
    weight = module._parameters.get("weight")  # FSDP1 takes it away
    bias = module._parameters.get("bias")
    return type(weight) in PLAIN_TENSORS and (bias is None or type(bias) in PLAIN_TENSORS)


def is_base(module: nn.Module) -> bool:
    """Return whether `module` is a linear layer with plain tensors or with a quantized weight."""
    return is_linear(module) or is_quantized(module)


def is_quantized(module: nn.Module) -> bool:
    """Return whether `module` is this package's frozen fp8 layer, or a layer of a known quantization library."""
    return type(module) is FrozenFloat8Linear or library_of(module) is not None


def current_weight(base: nn.Module, x: torch.Tensor) -> Weight | None:
    """Return the weight that multiplies `x` in `base`, or None if the code of `base` has to run."""
    if type(base) is FrozenFloat8Linear:
        return base.float8
    weight = base._parameters.get("weight")
    if type(base) is nn.Linear and type(weight) in PLAIN_TENSORS:
        return weight
    return weight_of(base, x)


def is_plain(layer: nn.Module, adapters: list[LoraAdapter]) -> bool:
    """Return whether base and adapters are linear layers with plain tensors, and no adapter has a bias."""
    if not is_base(layer._modules["base_layer"]):
        return False
    for a, b, dropout, _ in adapters:
        if not (is_linear(a) and is_linear(b) and type(dropout) in (nn.Identity, nn.Dropout)):
            return False
        if a._parameters["bias"] is not None or b._parameters["bias"] is not None:
            return False
    return True


def matches_peft(x: torch.Tensor, base: nn.Module, adapters: list[LoraAdapter], width: int | None = None) -> bool:
    """Return whether the fused function computes what PEFT's code computes for `x`.

    `width` replaces the last dimension of `x`. If shapes or dtypes do not fit, PEFT's code runs, so its error appears.
    """
    if type(x) not in PLAIN_TENSORS or not x.is_floating_point():
        return False
    device = x.device
    dtype = x.dtype
    weight = current_weight(base, x)
    if weight is None or (x.shape[-1] if width is None else width) != weight.shape[1]:
        return False
    is_packed = not isinstance(weight, torch.Tensor)
    tensors = [] if is_packed else [weight]
    for adapter in adapters:
        tensors += (adapter.a._parameters["weight"], adapter.b._parameters["weight"])
    for t in tensors:
        if t.dtype not in _KNOWN_DTYPES or t.device != device:
            return False
        if t.dtype == torch.float64 != dtype:  # PEFT computes in float64, the fused function in the dtype of x
            return False
    autocast = torch.is_autocast_enabled(device.type)
    if not is_packed:
        return weight.dtype == dtype or (dtype != torch.float64 and autocast)
    if dtype == torch.float16 and not autocast and any([t.dtype == torch.float32 for t in tensors]):
        return False  # this case runs in plain PyTorch, and autograd would save the unpacked weight
    return dtype in _KNOWN_DTYPES and dtype != torch.float64 and weight.device == device


def apply_dropout_mask(x: torch.Tensor, adapter: LoraAdapter) -> tuple[torch.Tensor, list[LoraAdapter]]:
    """Return x with the zeros of the adapter's dropout, and the adapter with its scaling divided by 1 - p.

    The dropout module draws the mask, so the random state advances as in PEFT. The factor 1 / (1 - p) goes into the
    scaling: multiplied into a 16-bit x it would be rounded.
    """
    with torch.no_grad():
        survives = adapter.dropout(torch.ones_like(x, dtype=adapter.a.weight.dtype)) != 0
    rescaled = adapter._replace(scaling=adapter.scaling / (1 - adapter.dropout.p))
    return torch.where(survives, x, 0), [rescaled]


def tensors_of(base: nn.Module, adapters: list[LoraAdapter], x: torch.Tensor) -> Tensors:
    """Return (weight, bias, adapter) for a call with `x`. Several adapters are concatenated along the rank."""
    weight = current_weight(base, x)
    bias = base._parameters["bias"] if type(base) is nn.Linear else base.bias  # HQQ's bias is not a parameter
    lora = None
    if len(adapters) == 1:
        adapter = adapters[0]
        lora = (adapter.a._parameters["weight"], adapter.b._parameters["weight"], adapter.scaling)
    elif adapters:
        a = torch.cat([adapter.a.weight for adapter in adapters])
        scaled_b = torch.cat([adapter.scaling * adapter.b.weight for adapter in adapters], 1)
        lora = (a, scaled_b, 1.0)
    return weight, bias, lora  # type: ignore[return-value]  # `matches_peft` has checked that the weight is not None
