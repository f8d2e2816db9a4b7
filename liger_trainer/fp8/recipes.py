"""Which of our forms a config of torchao's fp8 layers stands for. Its recipes are known, and no others."""

from typing import Any

from liger_triton.float8_cast import E4M3, E5M2
from liger_triton.float8_linear import Float8Form, Float8RowwiseForm

CASTS = (
    "input", "input_for_grad_weight", "weight", "weight_for_grad_input", "grad_output", "grad_output_for_grad_weight",
)  # fmt: skip
_BY_ROW, _WHOLE, _LEFT = ("dynamic", "axiswise"), ("dynamic", "tensorwise"), ("disabled", "tensorwise")
_TENSORWISE, _ROWWISE = dict.fromkeys(CASTS, _WHOLE), dict.fromkeys(CASTS, _BY_ROW)
_GW_HP = _ROWWISE | {
    "input_for_grad_weight": _LEFT, "weight_for_grad_input": _WHOLE, "grad_output_for_grad_weight": _LEFT,
}  # fmt: skip


def form_of(config: Any) -> Float8Form | Float8RowwiseForm | None:
    """The form of the recipes "tensorwise", "rowwise" and "rowwise_with_gw_hp"; None if `config` is none of them."""
    casts = {name: getattr(config, f"cast_config_{name}") for name in CASTS}
    kinds = {name: (cast.scaling_type.value, cast.scaling_granularity.value) for name, cast in casts.items()}
    dtypes = {name: cast.target_dtype for name, cast in casts.items() if kinds[name] != _LEFT}
    of_gradients = {dtypes.pop(name) for name in CASTS[4:] if name in dtypes}
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
