"""A frozen fp8 weight and its two products, y = x W^T + b and dx = dy W, with a scale for each row.

    W ~ w8 * s_n    once, with s_n = max|W_n| / 448 for each output feature n
    y  = (x8 w8^T) * s_t * s_n          x8 is x rounded to e4m3 with a scale s_t for each token
    dx = (d8 w8) * s_t                  d8 is dy * s_n, rounded to e4m3 with a scale for each token

The sum of dx runs over n, so the scales s_n cannot be factored out; they are multiplied into dy before it is rounded.

Shapes  x (..., K), W (N, K), y (..., N), with N and K multiples of 16. Any number of tokens.
Dtypes  x bf16, fp16, fp32. y and dx have the dtype of x, or the autocast dtype; sums are in fp32.
Bytes   b per element of x, besides the products: x is read once or twice (the second time from cache) and written as
        one byte; so is dy. For dx the weight is read and written once, one byte each: matrix units need both factors
        contiguous along the sum. Kept for backward: nothing but the weight.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ._autograd import in_shape, once_differentiable, records_graph
from ._dispatch import KERNEL_DTYPES, is_wrapped, jit, no_autocast, result_dtype, tl, use_triton
from ._float8_product import row_product
from ._launch import as_matrix, cdiv, launch, next_power_of_2
from .float8_cast import E4M3, MOST_PARTS, MULTIPLE, fault_of_device, row_cast, transposed
from .sizes import computes_nothing

# Let the matrix units keep sums in registers with fewer bits than fp32. On an H200, sums of 14336 products are then off
# by 3.3e-3, against 1.7e-3 from rounding the result to bf16. Casting the factors to fp8 costs 3.7e-2 either way.
FAST_SUMS = True


class Float8Weight(NamedTuple):
    """An fp8 weight W (N, K), W ~ bits * scale[:, None].

    Attributes:
        bits: (N, K), e4m3, contiguous.
        scale: (N,), fp32.
    """

    bits: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.bits.shape

    @property
    def ndim(self) -> int:
        return self.bits.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.bits.dtype

    @property
    def device(self) -> torch.device:
        return self.bits.device


class Float8Matrices(NamedTuple):
    """Frozen fp8 matrices W (E, N, K), such as experts: W ~ bits * scale[:, :, None].

    Attributes:
        bits (`torch.Tensor`): (E, N, K), e4m3, contiguous.
        scale (`torch.Tensor`): (E, N), fp32, contiguous.
        dtype (`torch.dtype`): Dtype of the numbers it represents, and of products with them.
    """

    bits: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.bits.shape

    @property
    def ndim(self) -> int:
        return self.bits.ndim

    def to(self, dtype: torch.dtype) -> "Float8Matrices":
        """Return the same weight with another dtype for its products."""
        return self._replace(dtype=dtype)

    def unpack(self) -> torch.Tensor:
        """Return W (E, N, K) in new memory."""
        return dequantized(Float8Weight(self.bits, self.scale), self.dtype)


def quantized(weight: torch.Tensor) -> Float8Weight:
    """Cast W (N, K) to fp8 with a scale for each row.

    Raises:
        ValueError: `weight` is not a matrix of 16- or 32-bit numbers, or a width is not a multiple of 16.
    """
    if weight.ndim != 2 or weight.dtype not in KERNEL_DTYPES or any(width % MULTIPLE for width in weight.shape):
        raise ValueError(
            f"weight is {tuple(weight.shape)} {weight.dtype}; expected a matrix in bfloat16, float16 or float32 with "
            f"widths that are multiples of {MULTIPLE}. Leave such a layer as it is."
        )
    with torch.no_grad():
        bits, inverse = row_cast([weight.detach().contiguous()])
    return Float8Weight(bits, inverse.view(-1))


def quantized_matrices(weight: torch.Tensor, device: torch.device | None = None) -> Float8Matrices:
    """Cast W (E, N, K) to fp8 with a scale for each row, one matrix after another.

    `device` is where the cast runs; unset, on the device of `weight`. The result is on the device of `weight`.
    ValueError as in `quantized`.
    """
    bits = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    scale = torch.empty(weight.shape[:2], dtype=torch.float32, device=weight.device)
    if not weight.is_meta:
        for k, matrix in enumerate(weight.detach()):
            made = quantized(matrix.to(device or weight.device))
            bits[k].copy_(made.bits)
            scale[k].copy_(made.scale)
    return Float8Matrices(bits, scale, weight.dtype)


@jit
def _dequantize_kernel(BITS, SCALE, OUT, k, BLOCK: tl.constexpr):
    across = tl.cdiv(k, BLOCK)
    row = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(BITS + row * k + column, mask=column < k).to(tl.float32) * tl.load(SCALE + row)
    tl.store(OUT + row * k + column, w.to(OUT.dtype.element_ty), mask=column < k)


def dequantized(weight: Float8Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers (..., N, K) of the weight in new memory: multiplied in fp32, rounded once."""
    bits, scale = weight
    fits = bits.is_contiguous() and scale.is_contiguous() and bits.numel() and dtype in KERNEL_DTYPES
    if torch.compiler.is_compiling() or not (fits and use_triton(bits)) or fault_of_device(bits.device) is not None:
        return (bits.to(torch.float32) * scale[..., None]).to(dtype)
    out = torch.empty(bits.shape, dtype=dtype, device=bits.device)
    k = bits.shape[-1]
    block = min(2048, next_power_of_2(k))
    launch(_dequantize_kernel, (scale.numel() * cdiv(k, block),), bits, scale, out, k, BLOCK=block)
    return out


class SharedRows:
    """An input (T, K) of several layers. It is cast to fp8 when the first of them needs that."""

    def __init__(self, rows: torch.Tensor):
        self.rows = rows
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None

    def times(self, weight: Float8Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + b (T, N), in the dtype of the rows."""
        if self.rows.numel() == 0:
            return F.linear(self.rows, dequantized(weight, self.rows.dtype), bias)
        if self._made is None:
            self._made = row_cast([self.rows])
        dtype = self.rows.dtype
        return row_product(*self._made, weight.bits, weight.scale, dtype, bias=bias, fast_sums=FAST_SUMS)


def input_gradient(grads: Sequence[tuple[torch.Tensor, Float8Weight]]) -> torch.Tensor:
    """Sum dy W (T, K) over pairs (dy (T, N_i), W (N_i, K)), in the dtype of the first dy."""
    dy, k = grads[0][0], grads[0][1].shape[1]
    if dy.numel() == 0:
        return dy.new_zeros((dy.shape[0], k))
    total: torch.Tensor | None = None
    for start in range(0, len(grads), MOST_PARTS):
        dys, weights = zip(*grads[start : start + MOST_PARTS], strict=True)
        rows, inverse = row_cast(list(dys), [weight.scale for weight in weights])
        columns = transposed([weight.bits for weight in weights])
        dx = row_product(rows, inverse, columns, _ones(k, rows), dy.dtype, fast_sums=FAST_SUMS)
        total = dx if total is None else total.add_(dx)
    assert total is not None
    return total


_known_ones: dict[tuple[int, torch.device], torch.Tensor] = {}


def _ones(k: int, like: torch.Tensor) -> torch.Tensor:
    """Return fp32 ones (1, k). On a GPU they are cached: a step would make them for each of its products."""
    if not like.is_cuda or computes_nothing() or torch.cuda.is_current_stream_capturing():
        return torch.ones((1, k), dtype=torch.float32, device=like.device)
    if (k, like.device) not in _known_ones:
        _known_ones[k, like.device] = torch.ones((1, k), dtype=torch.float32, device=like.device)
    return _known_ones[k, like.device]


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, dtype):
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        ctx.dtype = dtype
        ctx.x_dtype = x.dtype
        ctx.shape = x.shape
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
    return in_shape(y, x.shape[:-1])


def frozen_float8_linear(x: torch.Tensor, weight: Float8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x W^T + b in fp8, differentiable in x and b. The result differs from a 16-bit linear layer.

    Args:
        x (`torch.Tensor`): (..., K); bf16, fp16 or fp32.
        weight (`Float8Weight`): (N, K), made by `liger_triton.frozen_float8.quantized`.
        bias (`torch.Tensor`, *optional*): (N,).

    Returns:
        `torch.Tensor` (..., N) in the dtype of `x`, or in the autocast dtype. A CPU multiplies the fp8 numbers in fp32;
        under `torch.compile`, x is not cast to fp8.

    Raises:
        ValueError: A shape, dtype or device does not fit, or the GPU has no fp8 matrix units.
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
    if torch.compiler.is_compiling() or dtype == torch.float64 or any(map(is_wrapped, (x, *weight, bias))):
        return F.linear(x.to(dtype), dequantized(weight, dtype), None if bias is None else bias.to(dtype))
    fault = fault_of_device(x.device)
    if fault is not None:
        raise ValueError(f"{fault}. Use torch.nn.functional.linear.")
    with no_autocast(x.device.type):
        if not records_graph():
            return _forward(x, weight, bias, dtype)
        return _Frozen.apply(x, weight, bias, dtype)
