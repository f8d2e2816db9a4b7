"""Runs PEFT's LoRA on linear layers (`peft.tuners.lora.Linear`) as one function of base and adapters.

Candidates are found by class. The formula does not depend on sizes, so it is proven on a small copy that has the
adapters, scalings and dropout of the layer. Adapters can be switched, disabled, merged, added and removed after the
swap, so each call reads PEFT's state. A call that is not a sum of plain LoRAs on a plain linear layer (DoRA, for
example) runs PEFT's code.

The fused forward reads weights without calling the modules that own them. If one of those modules has a hook, set by
the user or by something that gathers weights (ZeRO-3, `device_map`), the layer runs PEFT's code from then on.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear
from liger_trainer.head.module import InterceptBinding
from liger_trainer.lora.peft_state import (
    LoraAdapter,
    Tensors,
    active_adapters,
    apply_dropout_mask,
    called_by,
    is_base,
    is_plain,
    is_quantized,
    matches_peft,
    tensors_of,
)
from liger_trainer.lora.quantized_bases import library_of, quantized_class
from liger_trainer.patching.core import probe
from liger_trainer.patching.core.binding import Binding, is_bound, own_class
from liger_trainer.patching.core.guards import code_guards_of
from liger_trainer.patching.core.hooks import has_hooks, hook_on
from liger_trainer.patching.core.pattern import PatchPattern, Proof, names_of
from liger_triton import lora_linear

_CLASS = ("peft.tuners.lora.layer", "Linear")
_BASE_CLASS = ("peft.tuners.lora.layer", "LoraLayer")

# Sizes of the small copy. The fp8 kernels take multiples of 16.
_WIDTHS = (6, 10)
_FP8_WIDTHS = (16, 32)
_RANK = 3

# Without autocast the fused function runs from this many tokens * width * width: 2048 tokens of width 4096. Below it
# the GPU waits for the host, and PEFT launches fewer kernels. Under autocast PEFT casts every factor and launches more:
# 224 kernels against 130 (a checkpointed Llama layer with a LoRA on everything, forward and backward).
LEAST_WORK = 2**35


@dataclass(frozen=True)
class LoRA:
    """The proven formula of a layer, with the adapters it had at the time."""

    adapters: tuple[str, ...]
    bias: bool
    form: str = ""

    def __str__(self) -> str:
        parts = ["linear"]
        if self.form:
            parts.append(self.form)
        if self.bias:
            parts.append("with bias")
        return f"{' '.join(parts)} + {', '.join(self.adapters)}"


def is_candidate(module: nn.Module) -> bool:
    """Return whether `module` is a LoRA on a linear layer, or one that PEFT defines in a file of its own.

    PEFT has such files for quantized bases. LoRA on embeddings, convolutions and parameters is not a candidate.
    """
    cls = own_class(module)
    if names_of(cls) == _CLASS:
        return True
    return cls.__module__ != _CLASS[0] and any(names_of(parent) == _BASE_CLASS for parent in cls.__mro__)


def _hook_reason(modules: list[nn.Module]) -> str | None:
    """Return why `modules` have to be called, or None if nothing is lost by reading their weights instead."""
    for module in modules:
        if not has_hooks(module) and "forward" not in module.__dict__:
            continue
        attached = hook_on(module, InterceptBinding.of(module))
        if attached is not None:
            return f"{attached} on a part of the layer would not be called"
        if has_hooks(module) or InterceptBinding.of(module) is None:
            return "hooks gather the weights of a part of the layer when that part is called"
    return None


def why_not(layer: nn.Module) -> str | None:
    """Return why `layer` has to run PEFT's code with its active adapters, or None."""
    variants = layer.__dict__["lora_variant"]
    active = layer.__dict__["_active_adapter"]
    for name in (active,) if isinstance(active, str) else active:
        if name in variants:
            return f"its adapter is a LoRA variant ({type(variants[name]).__name__})"
    base = layer._modules["base_layer"]
    if not (type(base) is nn.Linear or is_quantized(base)):
        return f"its base is a {type(base).__name__}, not a linear layer"
    library = library_of(base)
    reason = None if library is None else library.why_not(base)
    if reason is not None:
        return reason
    adapters = active_adapters(layer)
    if adapters is None:
        return _hook_reason([base])
    if any(adapter.b.bias is not None for adapter in adapters):
        return "its LoRA has a bias (lora_bias=True)"
    return _hook_reason(called_by(layer, adapters))


def prove(layer: nn.Module) -> tuple[Proof | None, str | None]:
    """Return (what this layer computes, None), or (None, why it keeps PEFT's code)."""
    cls = own_class(layer)
    base = layer._modules.get("base_layer")
    library = library_of(base)
    if names_of(cls) != (_CLASS if library is None else library.lora):
        base_name = type(base).__name__
        return None, f"its base is a {base_name}, and {cls.__module__}.{cls.__qualname__} has its own code for it"
    reason = why_not(layer)
    if reason is not None:
        return None, reason
    widths = _WIDTHS
    form = ""
    if type(base) is FrozenFloat8Linear:
        widths = _FP8_WIDTHS
        form = "in fp8"
    elif library is not None:
        widths = library.widths
        form = quantized_class(base).__name__
    proven = LoRA(tuple(layer._modules["lora_A"]._modules), base.bias is not None, form)
    for training in (True, False):
        for dtype, rtol in ((torch.float32, probe.FP32_RTOL), (torch.bfloat16, 0.02)):
            results = []
            for run in (fused, type(layer).forward):
                source = probe.generator()  # the same numbers for both
                copy = _small_copy(layer, source, dtype, widths)
                probe.set_training(copy, training)
                results.append(probe.trained(run, copy, widths, source, dtype))
            if not all(probe.allclose_to_max(got, want, rtol) for got, want in zip(*results, strict=True)):
                return None, "it is not x W^T + b + the sum of s (x A^T) B^T"
    return Proof("lora", proven, forward), None


def _small_copy(layer: nn.Module, source: torch.Generator, dtype: torch.dtype, widths: tuple[int, int]) -> nn.Module:
    """Return a narrow layer with the attributes of `layer`, random weights, and fp32 adapters of a small rank."""

    def linear(width_in: int, width_out: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
        module = nn.Linear(width_in, width_out, bias=bias, device="meta", dtype=dtype)
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(probe.randn(p.shape, source, dtype))
        return module

    full_base = layer._modules["base_layer"]
    base = linear(*widths, full_base.bias is not None, dtype)
    library = library_of(full_base)
    if library is not None:
        base = library.copy(full_base, base)
    elif type(full_base) is FrozenFloat8Linear:
        base = FrozenFloat8Linear.of(base)
    children = {name: base for name, child in layer._modules.items() if child is full_base}  # GPTQ's has two names
    for name, adapter_widths in (("lora_A", (widths[0], _RANK)), ("lora_B", (_RANK, widths[1]))):
        adapters = layer._modules[name]._modules
        children[name] = nn.ModuleDict({key: linear(*adapter_widths, False, torch.float32) for key in adapters})
    copy = probe.clone(layer, source, children=children)
    copy.__dict__ |= {"_disable_adapters": False, "merged_adapters": []}
    return copy


def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the fused function if the call is large enough for it, else PEFT's forward."""
    if args or kwargs or not _is_large_enough(x) or torch.compiler.is_compiling():
        return type(self).forward(self, x, *args, **kwargs)
    return fused(self, x)


def _is_large_enough(x: torch.Tensor) -> bool:
    return x.ndim > 0 and (torch.is_autocast_enabled(x.device.type) or x.numel() * x.shape[-1] >= LEAST_WORK)


def _plain_adapters(
    layer: nn.Module, x: torch.Tensor, width: int | None = None
) -> tuple[list[LoraAdapter] | None, str | None]:
    """Return (adapters, None), or (None, reason). The reason is None if only this call must run PEFT's code."""
    adapters = active_adapters(layer)
    if adapters is None or not is_plain(layer, adapters):
        return None, None
    reason = _hook_reason(called_by(layer, adapters))
    if reason is not None:
        return None, reason
    if not matches_peft(x, layer._modules["base_layer"], adapters, width):
        return None, None
    return adapters, None


def fused(self, x: torch.Tensor) -> torch.Tensor:
    """Run base and adapters as one function if this call is plain, else PEFT's forward."""
    adapters, reason = _plain_adapters(self, x)
    binding = Binding.of(self)
    if reason is not None and binding is not None:
        binding.fall_back(reason)
    lora_input = None
    if adapters is not None and any([adapter.drops() for adapter in adapters]):
        # PEFT draws one mask per adapter, but the function takes one input. With p = 1 the scaling would be infinite.
        if len(adapters) == 1 and adapters[0].dropout.p != 1:
            lora_input, adapters = apply_dropout_mask(x, adapters[0])
        else:
            adapters = None
    if adapters is None:
        return type(self).forward(self, x)
    weight, bias, lora = tensors_of(self._modules["base_layer"], adapters, x)
    assert lora is not None, "there are adapters"
    return lora_linear(x, weight, bias, lora=lora, lora_input=lora_input)


def current_tensors(module: nn.Module, x: torch.Tensor, width: int | None = None) -> Tensors | None:
    """Return (weight, bias, adapter or None) of a linear layer or a swapped LoRA, for code that does not call it.

    Return None if a call now would not be the plain sum of their products, if a user's hook would see the call, or if
    the call is too small. `width` replaces the last dimension of `x` in these checks.
    """
    if has_hooks(module) or not _is_large_enough(x):
        return None
    if type(module) is nn.Linear or is_quantized(module):
        plain = "forward" not in module.__dict__ and is_base(module) and matches_peft(x, module, [], width)
        return tensors_of(module, [], x) if plain else None
    binding = Binding.of(module)
    if binding is None or binding.function is not forward or binding.fallback_active or not is_bound(module, binding):
        return None
    adapters, _ = _plain_adapters(module, x, width)
    if adapters is None or any([adapter.drops() for adapter in adapters]):
        return None
    return tensors_of(module._modules["base_layer"], adapters, x)


def _guards(module: nn.Module) -> Any:
    return code_guards_of(own_class(module), nn.Linear, nn.Dropout, own_class(module._modules["base_layer"]))


PATTERN = PatchPattern(is_candidate, prove, lambda module: "lora", why_not=why_not, guards=_guards)
