"""A linear layer whose weight is frozen and has eight bits (`frozen_float8.py`): y = x W^T + b and dx = dy W.

Shapes  x (..., K), W (N, K), y (..., N), with N and K multiples of 16. The number of tokens is free.
Dtypes  x bf16, fp16, fp32. y and dx have the dtype of x, under autocast that of autocast.
Bytes   Kept for backward: nothing but the weight.
"""

import torch
import torch.nn.functional as F

from ._dispatch import KERNEL_DTYPES, no_autocast, once_differentiable
from ._lora import as_matrix, in_shape
from .float8_cast import fault_of_device
from .frozen_float8 import Float8Weight, SharedRows, dequantized, input_gradient
from .lora_linear import result_dtype


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, dtype):
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.dtype, ctx.x_dtype, ctx.shape = weight, dtype, x.dtype, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _forward(x, weight, bias, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return None, None, None, None
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        with no_autocast(dy.device.type):
            dy = as_matrix(dy, ctx.dtype)
            dx = input_gradient([(dy, ctx.weight)]).view(ctx.shape).to(ctx.x_dtype) if needs_x else None
            db = dy.sum(0).to(ctx.bias_dtype) if needs_bias else None
        return dx, None, db, None


def _forward(x, weight, bias, dtype) -> torch.Tensor:
    y = SharedRows(as_matrix(x, dtype)).times(weight, None if bias is None else bias.to(dtype))
    return in_shape(y, (*x.shape[:-1], y.shape[1]))


def frozen_float8_linear(x: torch.Tensor, weight: Float8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b, differentiable in x and b. These are not the numbers of a linear layer in 16 bits.

    Args:
        x (`torch.Tensor`): (..., K); bf16, fp16 or fp32.
        weight (`Float8Weight`): (N, K), of `quantized`.
        bias (`torch.Tensor`, *optional*): (N,).

    Returns:
        `torch.Tensor` (..., N) in the dtype of `x`, under autocast in that of autocast. On a CPU the numbers in eight
        bits are multiplied in fp32; traced by `torch.compile`, x is not rounded to eight bits.

    Raises:
        ValueError: A shape, dtype or device does not fit, or the GPU has no matrix units for eight bits.
    """
    if x.ndim == 0 or x.dtype not in (*KERNEL_DTYPES, torch.float64) or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}; expected (..., {weight.shape[1]}) in bfloat16, float16 or float32."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {tuple(bias.shape)}; expected ({weight.shape[0]},) or None.")
    for name, device in (("weight", weight.device), ("bias", x.device if bias is None else bias.device)):
        if device != x.device:
            raise ValueError(f"{name} is on {device}, x on {x.device}; move {name} to {x.device}.")
    dtype = result_dtype(x)
    if torch.compiler.is_compiling() or dtype == torch.float64:
        return F.linear(x.to(dtype), dequantized(weight, dtype), None if bias is None else bias.to(dtype))
    if (fault := fault_of_device(x.device)) is not None:
        raise ValueError(f"{fault}. Use torch.nn.functional.linear.")
    with no_autocast(x.device.type):
        if not torch.is_grad_enabled():
            return _forward(x, weight, bias, dtype)
        return _Frozen.apply(x, weight, bias, dtype)
