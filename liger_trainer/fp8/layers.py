"""torchao's `Float8Linear`, nominated by its class: the same products in eight bits with fewer passes over memory.

torchao's code is written for torch.compile, which fuses its casts. In eager code each takes five passes; ours are the
kernels of `liger_triton.float8_cast`. torchao and accelerate still decide what is converted, and own the state dict.

The formula is proven on a small copy with the instance's own config, on the CPU, where torchao multiplies in fp32
(`emulate`). Its recipes "tensorwise" (one scale per tensor), "rowwise" and "rowwise_with_gw_hp" are known. Modules with
another recipe keep their own code.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_trainer.instance import probe
from liger_trainer.instance.binding import Binding, own_class
from liger_trainer.instance.guards import code_guards_of
from liger_trainer.instance.hooks import has_hooks
from liger_trainer.instance.kind import PLAIN_TENSORS, Kind, Proof, names_of
from liger_trainer.memory.rebuild import is_rebuildable
from liger_triton.float8_cast import E4M3, E5M2, MULTIPLE
from liger_triton.float8_linear import Float8Form, Float8RowwiseForm, float8_linear, result_dtype, shared_input

_CLASS = ("torchao.float8.float8_linear", "Float8Linear")
OPERATION = "float8"
_WIDTHS = (32, 48)  # of the small copy
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# How a recipe casts each factor of the three products: (scaling type, granularity) of torchao
_CASTS = (
    "input", "input_for_grad_weight", "weight", "weight_for_grad_input", "grad_output", "grad_output_for_grad_weight",
)  # fmt: skip
_BY_ROW, _WHOLE, _LEFT = ("dynamic", "axiswise"), ("dynamic", "tensorwise"), ("disabled", "tensorwise")
_TENSORWISE, _ROWWISE = dict.fromkeys(_CASTS, _WHOLE), dict.fromkeys(_CASTS, _BY_ROW)
_GW_HP = _ROWWISE | {
    "input_for_grad_weight": _LEFT, "weight_for_grad_input": _WHOLE, "grad_output_for_grad_weight": _LEFT,
}  # fmt: skip


@dataclass(frozen=True)
class Float8:
    """The proven formula of a layer, for all configs of torchao that equal `config`."""

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


def nominated(module: nn.Module) -> bool:
    return names_of(own_class(module)) == _CLASS


def configs_of(model: nn.Module) -> list[Any]:
    """Return torchao's configs of the fp8 layers in `model`."""
    return [module.config for module in model.modules() if nominated(module)]


def form_of(config: Any) -> Float8Form | Float8RowwiseForm | None:
    """Return the form of `config`, or None if it is not "tensorwise", "rowwise" or "rowwise_with_gw_hp"."""
    casts = {name: getattr(config, f"cast_config_{name}") for name in _CASTS}
    kinds = {name: (cast.scaling_type.value, cast.scaling_granularity.value) for name, cast in casts.items()}
    dtypes = {name: cast.target_dtype for name, cast in casts.items() if kinds[name] != _LEFT}
    of_gradients = {dtypes.pop(name) for name in _CASTS[4:] if name in dtypes}
    # Whether the sums of y, dx and dW may have fewer bits than fp32
    products = (getattr(config, f"gemm_config_{name}") for name in ("output", "grad_input", "grad_weight"))
    y, dx, dw = (bool(product.use_fast_accum) for product in products)
    power_of_2 = bool(config.round_scales_to_power_of_2)
    if set(dtypes.values()) != {E4M3}:
        return None
    if kinds == _TENSORWISE and of_gradients in ({E4M3}, {E5M2}):
        return Float8Form(of_gradients.pop(), power_of_2, (y, dx, dw))
    if kinds in (_ROWWISE, _GW_HP) and of_gradients == {E4M3}:
        return Float8RowwiseForm(power_of_2, kinds == _GW_HP, (y, dx, dw))
    return None


def prove(module: nn.Module) -> tuple[Proof | None, str | None]:
    """Return (what this layer computes, None), or (None, why it keeps its code)."""
    form = form_of(module.config)
    if form is None:
        return None, "its recipe is none of torchao's: tensorwise, rowwise, rowwise_with_gw_hp"
    if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
        return None, f"its widths {module.in_features} and {module.out_features} are no multiples of {MULTIPLE}"
    if module.config.enable_fsdp_float8_all_gather:
        return None, "torchao's code multiplies weights gathered in eight bits (enable_fsdp_float8_all_gather)"
    for dtype, rtol in ((torch.float32, probe.FP32_RTOL), (torch.bfloat16, 0.02)):
        if not _computes_alike(module, form, dtype, rtol):
            return None, "it does not compute x8 W8^T, dy8 W8 and dy8^T x8 with the scales of its recipe"
    proven = Float8(form, module.config, module.bias is not None)
    return Proof(OPERATION, proven, build(proven)), None


def _computes_alike(module: nn.Module, form: Float8Form | Float8RowwiseForm, dtype: torch.dtype, rtol: float) -> bool:
    """Return whether our function and the layer's own code give the same output and gradients, in `dtype`."""

    def ours(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return float8_linear(x, layer.weight, layer.bias, form=form)

    results = []
    for forward in (ours, type(module).forward):
        source = probe.generator()
        results.append(probe.trained(forward, _small_copy(module, source, dtype), _WIDTHS, source, dtype))
    return all(probe.same(got, want, rtol) for got, want in zip(*results, strict=True))


def _small_copy(module: nn.Module, source: torch.Generator, dtype: torch.dtype) -> nn.Module:
    """Return a narrow layer with the attributes of `module` and random weights, which multiplies on the CPU in fp32."""
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

    It keeps its input in eight bits. An input that can be rebuilt (`memory/rebuild.py`), or that an attention keeps,
    costs nothing as it is, and stays so.
    """
    form, config = proven.form, proven.config

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        own = args or kwargs or torch.compiler.is_compiling()
        own = own or not (self.config is config or self.config == config)  # a copy has a config of its own
        if own or not (_has_plain_weight(self) and _computes(self, input, self.weight)):
            return type(self).forward(self, input, *args, **kwargs)
        keeps_input = is_rebuildable(input) or _attention_keeps(input)
        given = shared_input(input, form, keeps_input, alone=has_hooks(self))
        return float8_linear(input, self.weight, self.bias, given=given)

    return forward


def _has_plain_weight(module: nn.Module) -> bool:
    """Return whether the weight is a plain tensor. If not, as for a shard, the layer runs its own code from now on."""
    weight = module.weight
    plain = type(weight) in PLAIN_TENSORS
    if not plain and isinstance(weight, torch.Tensor) and (binding := Binding.of(module)) is not None:
        binding.step_aside(f"its weight is a {type(weight).__name__}, and was not gathered for the call")
    return plain


def _attention_keeps(x: torch.Tensor) -> bool:
    """Return whether x is, or is a view of, the output of PyTorch's attention, which keeps it for its backward pass."""
    made_by = (x if x._base is None else x._base).grad_fn
    return hasattr(made_by, "_raw_saved_output")  # `_saved_output` would ask saved-tensor hooks for it


def _computes(module: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether our function takes these tensors. Otherwise torchao's code runs, or raises."""
    if type(x) not in PLAIN_TENSORS or (module.bias is not None and type(module.bias) not in PLAIN_TENSORS):
        return False
    if x.dtype not in _DTYPES or weight.dtype not in _DTYPES or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        return False
    if x.device != weight.device or module.config.emulate is x.is_cuda:  # emulated products are for CPUs
        return False
    return x.is_cuda or result_dtype(x) == x.dtype  # torchao asks for CUDA's autocast alone


KIND = Kind(nominated, prove, lambda module: OPERATION, guards=lambda module: code_guards_of(own_class(module)))
