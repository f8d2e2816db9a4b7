"""A frozen weight of eight bits and its two products, y = x W^T + b and dx = dy W, with a scale for each row.

    W ~ w8 * s_n    once, with s_n = max|W_n| / 448 for each output feature n
    y  = (x8 w8^T) * s_t * s_n          x8 is x rounded to e4m3 with a scale s_t for each token
    dx = (d8 w8) * s_t                  d8 is dy * s_n, rounded to e4m3 with a scale for each token

The sum of dx runs over the features n, so that their scales cannot be taken out of it. They are put into dy before it
is rounded. Scales by row are those of torchao's recipe "rowwise", for which dy is scaled in the same direction.

Shapes  x (..., K), W (N, K), y (..., N), with N and K multiples of 16. The number of tokens is free.
Dtypes  x bf16, fp16, fp32. y and dx have the dtype of x, under autocast that of autocast; sums are in fp32.
Bytes   b per element of x, beside the products: x is read once or twice, the second time from the cache, and written in
        one byte. The same for dy. The weight is read and written in one byte for dx, since the matrix units want both
        factors contiguous along the sum. Kept for backward: nothing but the weight.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from . import reference
from ._dispatch import KERNEL_DTYPES, _device_guard, jit, on_cuda, tl
from ._float8_product import row_product
from ._launch import launch, next_power_of_2, runs_triton
from .float8_cast import E4M3, MULTIPLE, _scaled
from .float8_transpose import MOST_PARTS, transposed
from .sizes import computes_nothing

LARGEST = 448.0  # of e4m3
LEAST = 1e-30  # what a row of zeros counts as. Gradients of a mean over many tokens may well be below 1e-12
LARGEST_ROW = 2**16  # numbers that a program keeps in its registers
# Whether the matrix units may keep sums in registers of fewer bits than fp32. On an H200 sums of 14336 products are off
# by 3.3e-3 then, and by 1.7e-3 otherwise, from rounding the result to bf16. Rounding the factors makes 3.7e-2 of both.
FAST_SUMS = True


class Float8Weight(NamedTuple):
    """A weight W (N, K) in eight bits, W ~ bits * scale[:, None].

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


@jit
def _part_of_row(X, FACTOR, row, n, stride, BLOCK: tl.constexpr, HAS_FACTOR: tl.constexpr):
    column = tl.arange(0, BLOCK)
    x = tl.load(X + row * stride + column, mask=column < n, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        x *= tl.load(FACTOR + column, mask=column < n, other=0.0)
    return x


@jit
def _most_of(x):
    """The bits of max|x|, which as integers are in the order of the numbers, NaN above all of them."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@jit
def _store_part(x, OUT, scale, n, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    tl.store(OUT + column, _scaled(x, scale, LARGEST).to(OUT.dtype.element_ty), mask=column < n)


@jit
def _row_cast_kernel(
    A, B, C, FA, FB, FC, OUT, INVERSE, na, nb, nc, stride_a, stride_b, stride_c,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, HAS_FACTOR: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One row of up to three matrices, side by side, with one scale for all of it. A block of 0: there is no such
    matrix."""
    row = tl.program_id(0).to(tl.int64)
    a = _part_of_row(A, FA, row, na, stride_a, BLOCK_A, HAS_FACTOR)
    bits = _most_of(a)
    if BLOCK_B > 0:
        b = _part_of_row(B, FB, row, nb, stride_b, BLOCK_B, HAS_FACTOR)
        bits = tl.maximum(bits, _most_of(b))
    if BLOCK_C > 0:
        c = _part_of_row(C, FC, row, nc, stride_c, BLOCK_C, HAS_FACTOR)
        bits = tl.maximum(bits, _most_of(c))
    most = bits.to(tl.float32, bitcast=True)
    most = tl.where(most < LEAST, LEAST, most)
    scale = tl.div_rn(tl.full([], LARGEST, tl.float32), most)
    tl.store(INVERSE + row, tl.div_rn(tl.full([], 1.0, tl.float32), scale))
    OUT += row * (na + nb + nc)
    _store_part(a, OUT, scale, na, LARGEST, BLOCK_A)
    if BLOCK_B > 0:
        _store_part(b, OUT + na, scale, nb, LARGEST, BLOCK_B)
    if BLOCK_C > 0:
        _store_part(c, OUT + na + nb, scale, nc, LARGEST, BLOCK_C)


def row_cast(parts: list[torch.Tensor], factors: list[torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices side by side in e4m3, with one scale for each row.

    Args:
        parts (`list`): At most three of (T, N_i), with unit stride in rows; bf16, fp16 or fp32.
        factors (`list`, *optional*): (N_i,), fp32, by which the columns are multiplied before.

    Returns:
        (T, N) in e4m3, and (T, 1) in fp32: what its rows have to be multiplied by. A row with a NaN or an infinity is
        NaN.
    """
    rows, total = parts[0].shape[0], sum(part.shape[1] for part in parts)
    blocks = [next_power_of_2(part.shape[1]) for part in parts] + [0] * (MOST_PARTS - len(parts))
    if not (on_cuda(parts[0]) and runs_triton(*parts)) or sum(blocks) > LARGEST_ROW:
        return reference.float8_row_cast(parts, factors)
    out = torch.empty((rows, total), dtype=E4M3, device=parts[0].device)
    inverse = torch.empty((rows, 1), dtype=torch.float32, device=parts[0].device)
    missing = MOST_PARTS - len(parts)
    given = [*parts, *parts[:1] * missing]
    widths = [part.shape[1] for part in parts] + [0] * missing
    of_columns = [inverse] * MOST_PARTS if factors is None else [*factors, *factors[:1] * missing]
    with _device_guard(out):
        launch(
            _row_cast_kernel, (rows,), *given, *of_columns, out, inverse, *widths,
            *[part.stride(0) for part in given], LARGEST=LARGEST, LEAST=LEAST, HAS_FACTOR=factors is not None,
            BLOCK_A=blocks[0], BLOCK_B=blocks[1], BLOCK_C=blocks[2], num_warps=_warps(sum(blocks)),
        )  # fmt: skip
    return out, inverse


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8 if block <= 8192 else 16 if block <= 2**15 else 32


def quantized(weight: torch.Tensor) -> Float8Weight:
    """W (N, K) in eight bits, with a scale for each of its rows.

    Raises:
        ValueError: `weight` is no matrix of 16- or 32-bit numbers, or a width is no multiple of 16.
    """
    if weight.ndim != 2 or weight.dtype not in KERNEL_DTYPES or any(width % MULTIPLE for width in weight.shape):
        raise ValueError(
            f"weight is {tuple(weight.shape)} {weight.dtype}; expected a matrix in bfloat16, float16 or float32 whose "
            f"widths are multiples of {MULTIPLE}. Leave such a layer as it is."
        )
    with torch.no_grad():
        bits, inverse = row_cast([weight.detach().contiguous()])
    return Float8Weight(bits, inverse.view(-1))


def dequantized(weight: Float8Weight, dtype: torch.dtype) -> torch.Tensor:
    """The numbers (N, K) that the eight bits stand for."""
    return (weight.bits.to(torch.float32) * weight.scale[:, None]).to(dtype)


class SharedRows:
    """An input (T, K) of layers, which is rounded to eight bits when the first of them asks for it."""

    def __init__(self, rows: torch.Tensor):
        self.rows = rows
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None

    def times(self, weight: Float8Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """x W^T + b (T, N), in the dtype of the rows."""
        if self.rows.numel() == 0:
            return F.linear(self.rows, dequantized(weight, self.rows.dtype), bias)
        if self._made is None:
            self._made = row_cast([self.rows])
        dtype = self.rows.dtype
        return row_product(*self._made, weight.bits, weight.scale, dtype, bias=bias, fast_sums=FAST_SUMS)


def input_gradient(grads: Sequence[tuple[torch.Tensor, Float8Weight]]) -> torch.Tensor:
    """The sum of dy W (T, K) over (dy (T, N_i), W (N_i, K)), in the dtype of the first dy."""
    total: torch.Tensor | None = None
    for start in range(0, len(grads), MOST_PARTS):
        some = grads[start : start + MOST_PARTS]
        dx = _input_gradient([dy for dy, _ in some], [weight for _, weight in some])
        total = dx if total is None else total.add_(dx)
    assert total is not None, "grads is empty"
    return total


def _input_gradient(dys: list[torch.Tensor], weights: list[Float8Weight]) -> torch.Tensor:
    k = weights[0].shape[1]
    if dys[0].numel() == 0:
        return dys[0].new_zeros((dys[0].shape[0], k))
    rows, inverse = row_cast(dys, [weight.scale for weight in weights])
    columns = transposed([weight.bits for weight in weights])
    return row_product(rows, inverse, columns, _ones(k, rows), dys[0].dtype, fast_sums=FAST_SUMS)


_known_ones: dict[tuple[int, torch.device], torch.Tensor] = {}


def _ones(k: int, like: torch.Tensor) -> torch.Tensor:
    """(1, k) in fp32. On a GPU they are made once, since a step would make them for each of its products."""
    if not like.is_cuda or computes_nothing() or torch.cuda.is_current_stream_capturing():
        return torch.ones((1, k), dtype=torch.float32, device=like.device)
    if (k, like.device) not in _known_ones:
        _known_ones[k, like.device] = torch.ones((1, k), dtype=torch.float32, device=like.device)
    return _known_ones[k, like.device]
