"""Which of our forms a config of torchao's fp8 layers stands for, for its recipes with scales by row."""

from typing import Any

from liger_triton.float8_cast import E4M3
from liger_triton.float8_linear import Float8RowwiseForm

CASTS = (
    "input", "input_for_grad_weight", "weight", "weight_for_grad_input", "grad_output", "grad_output_for_grad_weight",
)  # fmt: skip
_BY_ROW, _WHOLE, _LEFT = ("dynamic", "axiswise"), ("dynamic", "tensorwise"), ("disabled", "tensorwise")
_ROWWISE = dict.fromkeys(CASTS, _BY_ROW)
_GW_HP = _ROWWISE | {
    "input_for_grad_weight": _LEFT, "weight_for_grad_input": _WHOLE, "grad_output_for_grad_weight": _LEFT,
}  # fmt: skip


def casts_of(config: Any) -> dict[str, Any]:
    """The six casts of `config`, by their names."""
    return {name: getattr(config, f"cast_config_{name}") for name in CASTS}


def fast_accum_of(config: Any) -> tuple[bool, bool, bool]:
    """Whether the sums of y, dx and dW may have fewer bits than fp32."""
    output, grad_input, grad_weight = (
        bool(getattr(config, f"gemm_config_{name}").use_fast_accum) for name in ("output", "grad_input", "grad_weight")
    )
    return output, grad_input, grad_weight


def rowwise_form_of(config: Any) -> Float8RowwiseForm | None:
    """The form of the recipes "rowwise" and "rowwise_with_gw_hp"; None if `config` is neither."""
    casts = casts_of(config)
    kinds = {name: (cast.scaling_type.value, cast.scaling_granularity.value) for name, cast in casts.items()}
    known = kinds in (_ROWWISE, _GW_HP)
    if not known or any(cast.target_dtype != E4M3 for name, cast in casts.items() if kinds[name] != _LEFT):
        return None
    return Float8RowwiseForm(bool(config.round_scales_to_power_of_2), kinds == _GW_HP, fast_accum_of(config))
