"""PEFT's LoRA on linear layers, `peft.tuners.lora.Linear`, nominated by its class.

Its formula is the same for all sizes, so it is proven on a small copy with the instance's own adapters, scalings and
dropout. Each call asks PEFT's own state what the layer does, because adapters can be switched, disabled, merged, added
and removed after the swap. If that is anything but plain LoRAs added to a plain linear layer, as with DoRA, the layer's
own code runs for that call.

Our forward reads weights without calling the modules that own them. If one of these has a hook, the user's or one that
gathers its weights (ZeRO-3, `device_map`), the layer runs its own code from then on.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear
from liger_trainer.head.module import CaptureBinding
from liger_trainer.instance import probe
from liger_trainer.instance.binding import Binding, is_bound, own_class
from liger_trainer.instance.guards import code_guards_of
from liger_trainer.instance.hooks import has_hooks, hook_on
from liger_trainer.instance.kind import Kind, Proof, names_of
from liger_trainer.lora.parts import (
    Part,
    Tensors,
    active_parts,
    called_by,
    computes,
    is_base,
    is_plain,
    is_quantized,
    tensors_of,
    without_dropped,
)
from liger_trainer.lora.quantized_bases import kind_of, library_of
from liger_triton import lora_linear

_CLASS = ("peft.tuners.lora.layer", "Linear")
_BASE_CLASS = ("peft.tuners.lora.layer", "LoraLayer")
_WIDTHS, _FLOAT8_WIDTHS, _RANK = (6, 10), (16, 32), 3  # of the small copy

# The least tokens * width * width for which our function runs without autocast: 2048 tokens of a width of 4096. With
# fewer, the GPU waits for the host, and PEFT's own code launches less than ours. Under autocast, which casts each of
# its factors, it launches more: 224 kernels, where ours launches 130, for a layer of a checkpointed Llama with a LoRA
# on everything, forward and backward.
LEAST_WORK = 2**35


@dataclass(frozen=True)
class LoRA:
    """What a layer was proven to compute, with the adapters that it had then."""

    adapters: tuple[str, ...]
    bias: bool
    form: str = ""

    def __str__(self) -> str:
        words = ("linear", *filter(None, (self.form, "with bias" if self.bias else "")))
        return f"{' '.join(words)} + {', '.join(self.adapters)}"


def nominated(module: nn.Module) -> bool:
    """Return whether `module` is PEFT's LoRA on a linear layer, or on a layer with a file of its own in PEFT.

    The latter, such as LoRA on quantised layers, are not proven and keep their code. LoRA on embeddings, convolutions
    and parameters is not nominated.
    """
    cls = own_class(module)
    return names_of(cls) == _CLASS or (
        cls.__module__ != _CLASS[0] and any(names_of(c) == _BASE_CLASS for c in cls.__mro__)
    )


def _attached(modules: list[nn.Module]) -> str | None:
    """Return what is attached to one of `modules` and would be missed if it is not called."""
    for module in modules:
        if not has_hooks(module) and "forward" not in module.__dict__:
            continue
        attached = hook_on(module, CaptureBinding.of(module))
        if attached is not None:
            return f"{attached} on a part of the layer would not be called"
        if has_hooks(module) or CaptureBinding.of(module) is None:
            return "hooks on a part of the layer gather its weights in calls of it"
    return None


def why_not(layer: nn.Module) -> str | None:
    """Return why `layer`, with the adapters that are active now, has to run its own code, or None."""
    active = layer.__dict__["_active_adapter"]
    for name in (active,) if isinstance(active, str) else active:
        if name in layer.__dict__["lora_variant"]:
            return f"its adapter is a LoRA variant ({type(layer.__dict__['lora_variant'][name]).__name__})"
    base = layer._modules["base_layer"]
    if not (type(base) is nn.Linear or is_quantized(base)):
        return f"its base is a {type(base).__name__}, not a linear layer"
    library, parts = library_of(base), active_parts(layer)
    if library is not None and (reason := library.why_not(base)) is not None:
        return reason
    if parts is None:
        return _attached([base])
    if any(part.b.bias is not None for part in parts):
        return "its LoRA has a bias (lora_bias=True)"
    return _attached(called_by(layer, parts))


def prove(layer: nn.Module) -> tuple[Proof | None, str | None]:
    """Return (what this layer computes, None), or (None, why it keeps its code)."""
    cls, base = own_class(layer), layer._modules.get("base_layer")
    library = library_of(base)
    if names_of(cls) != (_CLASS if library is None else library.lora):
        kind = type(base).__name__
        return None, f"its base is a {kind}, for which {cls.__module__}.{cls.__qualname__} has code of its own"
    if (reason := why_not(layer)) is not None:
        return None, reason
    widths = _FLOAT8_WIDTHS if type(base) is FrozenFloat8Linear else _WIDTHS if library is None else library.widths
    form = "in eight bits" if type(base) is FrozenFloat8Linear else "" if library is None else kind_of(base).__name__
    proven = LoRA(tuple(layer._modules["lora_A"]._modules), base.bias is not None, form)
    for training in (True, False):
        for dtype, rtol in ((torch.float32, probe.FP32_RTOL), (torch.bfloat16, 0.02)):
            results = []
            for run in (fused, type(layer).forward):
                source = probe.generator()
                copy = _small_copy(layer, source, dtype, widths)
                probe.set_training(copy, training)
                results.append(probe.trained(run, copy, widths, source, dtype))
            if not all(probe.same(got, want, rtol) for got, want in zip(*results, strict=True)):
                return None, "it is not x W^T + b + the sum of s (x A^T) B^T"
    return Proof("lora", proven, forward), None


def _small_copy(layer: nn.Module, source: torch.Generator, dtype: torch.dtype, widths: tuple[int, int]) -> nn.Module:
    """Return a narrow layer with the attributes of `layer`, and fp32 adapters of a small rank with random weights."""

    def linear(width_in: int, width_out: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
        module = nn.Linear(width_in, width_out, bias=bias, device="meta", dtype=dtype)
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(probe.randn(p.shape, source, dtype))
        return module

    of_layer = layer._modules["base_layer"]
    base = linear(*widths, of_layer.bias is not None, dtype)
    if (library := library_of(of_layer)) is not None:
        base = library.copy(of_layer, base)
    elif type(of_layer) is FrozenFloat8Linear:
        base = FrozenFloat8Linear.of(base)
    children = {name: base for name, child in layer._modules.items() if child is of_layer}  # GPTQ's has two names
    for name, of_adapter in (("lora_A", (widths[0], _RANK)), ("lora_B", (_RANK, widths[1]))):
        adapters = layer._modules[name]._modules
        children[name] = nn.ModuleDict({key: linear(*of_adapter, False, torch.float32) for key in adapters})
    copy = probe.clone(layer, source, children=children)
    copy.__dict__ |= {"_disable_adapters": False, "merged_adapters": []}
    return copy


def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run our forward where the call has enough to do, otherwise PEFT's."""
    if args or kwargs or not _pays(x) or torch.compiler.is_compiling():
        return type(self).forward(self, x, *args, **kwargs)
    return fused(self, x)


def _pays(x: torch.Tensor) -> bool:
    return x.ndim > 0 and (torch.is_autocast_enabled(x.device.type) or x.numel() * x.shape[-1] >= LEAST_WORK)


def _parts_now(layer: nn.Module, x: torch.Tensor, width: int | None = None) -> tuple[list[Part] | None, str | None]:
    """Return (the adapters of `layer` in a call with `x`, None) if it is plain; else (None, why for good, if so)."""
    parts = active_parts(layer)
    if parts is None or not is_plain(layer, parts):
        return None, None
    if (reason := _attached(called_by(layer, parts))) is not None:
        return None, reason
    return (parts if computes(x, layer._modules["base_layer"], parts, width) else None), None


def fused(self, x: torch.Tensor) -> torch.Tensor:
    """Run the layer, with the adapter added to the product in place if the layer is plain now."""
    (parts, reason), dropped, binding = _parts_now(self, x), None, Binding.of(self)
    if reason is not None and binding is not None:
        binding.step_aside(reason)
    if parts is not None and any([part.drops() for part in parts]):
        # Each adapter has a mask of its own; 1 / (1 - p) may be infinite
        alone = len(parts) == 1 and parts[0].dropout.p != 1
        dropped, parts = without_dropped(x, parts[0]) if alone else (None, None)
    if parts is None:
        return type(self).forward(self, x)
    weight, bias, adapter = tensors_of(self._modules["base_layer"], parts, x)
    assert adapter is not None, "there are parts"
    return lora_linear(x, weight, bias, lora=adapter, lora_input=dropped)


def tensors_now(module: nn.Module, x: torch.Tensor, width: int | None = None) -> Tensors | None:
    """Return (weight, bias, adapter or None) of a linear layer or a swapped LoRA, for code that calls neither.

    Return None if a call with `x`, or with something of its dtype and another width, would be anything but the sum of
    their products now, if a user's hook would see it, or if it has too little to do.
    """
    if has_hooks(module) or not _pays(x):
        return None
    if type(module) is nn.Linear or is_quantized(module):
        plain = "forward" not in module.__dict__ and is_base(module) and computes(x, module, [], width)
        return tensors_of(module, [], x) if plain else None
    binding = Binding.of(module)
    if binding is None or binding.function is not forward or binding.aside or not is_bound(module, binding):
        return None
    parts, _ = _parts_now(module, x, width)
    if parts is None or any([part.drops() for part in parts]):
        return None
    return tensors_of(module._modules["base_layer"], parts, x)


KIND = Kind(
    nominated, prove, lambda module: "lora", why_not=why_not,
    guards=lambda module: code_guards_of(
        own_class(module), nn.Linear, nn.Dropout, own_class(module._modules["base_layer"])
    ),
)  # fmt: skip
