"""Runs torchao's `Float8Linear` on our kernels: the same FP8 matmuls with fewer passes over memory.

torchao's code is written for torch.compile, which fuses its casts. In eager mode each cast takes five passes over
memory; `liger_triton.float8_cast` replaces them. torchao and accelerate still choose the layers and own the state dict.

Candidates are found by class. The formula is proven on a small copy with the config of the layer, on the CPU, where
torchao multiplies in fp32 (`emulate`). The recipes "tensorwise" (one scale per tensor), "rowwise" and
"rowwise_with_gw_hp" are known. Layers with another recipe keep torchao's code.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_trainer.memory.rebuild import is_rebuildable
from liger_trainer.patching.core import probe
from liger_trainer.patching.core.binding import Binding, own_class
from liger_trainer.patching.core.guards import code_guards_of
from liger_trainer.patching.core.hooks import has_hooks
from liger_trainer.patching.core.pattern import PLAIN_TENSORS, PatchPattern, Proof, names_of
from liger_triton.float8_cast import E4M3, E5M2, MULTIPLE
from liger_triton.float8_linear import Float8Form, Float8RowwiseForm, float8_linear, result_dtype, shared_input

_CLASS = ("torchao.float8.float8_linear", "Float8Linear")
OPERATION = "float8"
_WIDTHS = (32, 48)  # of the small copy
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# torchao's names for the casts of both factors of the three matmuls
_GRADIENT_CASTS = ("grad_output", "grad_output_for_grad_weight")
_CASTS = ("input", "input_for_grad_weight", "weight", "weight_for_grad_input", *_GRADIENT_CASTS)

# (scaling type, granularity) of a cast
_PER_ROW = ("dynamic", "axiswise")
_PER_TENSOR = ("dynamic", "tensorwise")
_NOT_CAST = ("disabled", "tensorwise")

# The casts of each recipe
_TENSORWISE = dict.fromkeys(_CASTS, _PER_TENSOR)
_ROWWISE = dict.fromkeys(_CASTS, _PER_ROW)
_ROWWISE_WITH_GW_HP = _ROWWISE | {
    "input_for_grad_weight": _NOT_CAST,
    "weight_for_grad_input": _PER_TENSOR,
    "grad_output_for_grad_weight": _NOT_CAST,
}


@dataclass(frozen=True)
class Float8:
    """The proven formula of a layer. It holds for every torchao config that equals `config`."""

    form: Float8Form | Float8RowwiseForm
    config: Any
    bias: bool

    def __str__(self) -> str:
        if isinstance(self.form, Float8RowwiseForm):
            recipe = "rowwise_with_gw_hp" if self.form.gw_hp else "rowwise"
        else:
            recipe = f"tensorwise, gradients in {'e4m3' if self.form.grad_dtype == E4M3 else 'e5m2'}"
        scale = ", scales in powers of 2" if self.form.power_of_2 else ""
        return f"{recipe}{scale}{', with bias' if self.bias else ''}"


def is_candidate(module: nn.Module) -> bool:
    """Return whether `module` is torchao's `Float8Linear`."""
    return names_of(own_class(module)) == _CLASS


def configs_of(model: nn.Module) -> list[Any]:
    """Return torchao's configs of the FP8 layers in `model`."""
    return [module.config for module in model.modules() if is_candidate(module)]


def form_of(config: Any) -> Float8Form | Float8RowwiseForm | None:
    """Return the form of `config`, or None if it is not "tensorwise", "rowwise" or "rowwise_with_gw_hp"."""
    scalings = {}
    value_dtypes: set[torch.dtype] = set()  # of inputs and weights
    gradient_dtypes: set[torch.dtype] = set()
    for name in _CASTS:
        cast = getattr(config, f"cast_config_{name}")
        scalings[name] = (cast.scaling_type.value, cast.scaling_granularity.value)
        if scalings[name] != _NOT_CAST:
            dtypes = gradient_dtypes if name in _GRADIENT_CASTS else value_dtypes
            dtypes.add(cast.target_dtype)
    if value_dtypes != {E4M3}:
        return None
    matmuls = (getattr(config, f"gemm_config_{name}") for name in ("output", "grad_input", "grad_weight"))
    y, dx, dw = (bool(matmul.use_fast_accum) for matmul in matmuls)  # may accumulate with less than fp32
    power_of_2 = bool(config.round_scales_to_power_of_2)
    if scalings == _TENSORWISE and gradient_dtypes in ({E4M3}, {E5M2}):
        return Float8Form(gradient_dtypes.pop(), power_of_2, (y, dx, dw))
    if scalings in (_ROWWISE, _ROWWISE_WITH_GW_HP) and gradient_dtypes == {E4M3}:
        return Float8RowwiseForm(power_of_2, scalings == _ROWWISE_WITH_GW_HP, (y, dx, dw))
    return None


def prove(module: nn.Module) -> tuple[Proof | None, str | None]:
    """Return (what this layer computes, None), or (None, why it keeps torchao's code)."""
    form = form_of(module.config)
    if form is None:
        return None, "its recipe is not one of tensorwise, rowwise, rowwise_with_gw_hp"
    if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
        return None, f"its widths {module.in_features} and {module.out_features} are not multiples of {MULTIPLE}"
    if module.config.enable_fsdp_float8_all_gather:
        return None, "FSDP2 gathers its weights in fp8 (enable_fsdp_float8_all_gather), which only torchao's code reads"
    for dtype, rtol in ((torch.float32, probe.FP32_RTOL), (torch.bfloat16, 0.02)):
        if not _matches_torchao(module, form, dtype, rtol):
            return None, "it does not compute x8 W8^T, dy8 W8 and dy8^T x8 with the scales of its recipe"
    proven = Float8(form, module.config, module.bias is not None)
    return Proof(OPERATION, proven, build(proven)), None


def _matches_torchao(module: nn.Module, form: Float8Form | Float8RowwiseForm, dtype: torch.dtype, rtol: float) -> bool:
    """Return whether the fused function and torchao's code give the same output and gradients in `dtype`."""

    def fused(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return float8_linear(x, layer.weight, layer.bias, form=form)

    results = []
    for forward in (fused, type(module).forward):
        source = probe.generator()
        results.append(probe.trained(forward, _small_copy(module, source, dtype), _WIDTHS, source, dtype))
    return all(probe.allclose_to_max(got, want, rtol) for got, want in zip(*results, strict=True))


def _small_copy(module: nn.Module, source: torch.Generator, dtype: torch.dtype) -> nn.Module:
    """Return a narrow copy of `module` with random weights. Its matmuls are emulated in fp32, so it runs on the CPU."""
    copy = probe.clone(module, source, parameters=False)
    shapes = {"weight": (_WIDTHS[1], _WIDTHS[0]), "bias": None if module.bias is None else (_WIDTHS[1],)}
    copy.__dict__["_parameters"] = {
        name: None if shape is None else nn.Parameter(probe.randn(shape, source, dtype))
        for name, shape in shapes.items()
    }
    products = module.linear_mm_config
    copy.__dict__["linear_mm_config"] = type(products)(*(product._replace(emulate=True) for product in products))
    return copy


@functools.cache
def build(proven: Float8) -> Callable:
    """Return the `forward` to bind to a layer.

    It saves its input in FP8 for backward. If the 16-bit input is in memory anyway, because it can be recomputed
    (`memory/rebuild.py`) or an attention saves it, that tensor is saved instead.
    """
    form = proven.form
    config = proven.config

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        has_proven_config = self.config is config or self.config == config  # a copied layer has an equal config
        if args or kwargs or torch.compiler.is_compiling() or not has_proven_config:
            return type(self).forward(self, input, *args, **kwargs)
        if not _has_plain_weight(self) or not _takes(self, input, self.weight):
            return type(self).forward(self, input, *args, **kwargs)
        saves_input = is_rebuildable(input) or _attention_saves(input)
        shared = shared_input(input, form, saves_input, alone=has_hooks(self))
        return float8_linear(input, self.weight, self.bias, given=shared)

    return forward


def _has_plain_weight(module: nn.Module) -> bool:
    """Return whether the weight is a plain tensor. If it is a shard, for example, torchao's code runs from now on."""
    weight = module.weight
    if type(weight) in PLAIN_TENSORS:
        return True
    binding = Binding.of(module)
    if binding is not None and isinstance(weight, torch.Tensor):
        binding.fall_back(f"its weight is a {type(weight).__name__}, and was not gathered for the call")
    return False


def _attention_saves(x: torch.Tensor) -> bool:
    """Return whether x is the output of PyTorch's attention, or a view of it. Attention saves its output anyway."""
    made_by = (x if x._base is None else x._base).grad_fn
    return hasattr(made_by, "_raw_saved_output")  # reading `_saved_output` would run the saved-tensor hooks


def _takes(module: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the fused function takes these tensors. Otherwise torchao's code runs, or raises."""
    if type(x) not in PLAIN_TENSORS or (module.bias is not None and type(module.bias) not in PLAIN_TENSORS):
        return False
    if x.dtype not in _DTYPES or weight.dtype not in _DTYPES or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        return False
    if x.device != weight.device or module.config.emulate is x.is_cuda:  # emulated matmuls are for CPUs
        return False
    return x.is_cuda or result_dtype(x) == x.dtype  # torchao only reads CUDA's autocast


PATTERN = PatchPattern(
    is_candidate, prove, lambda module: OPERATION, guards=lambda module: code_guards_of(own_class(module))
)
