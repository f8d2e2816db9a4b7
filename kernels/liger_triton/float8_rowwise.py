"""A matrix in e4m3 with a scale for each row, and its transpose with a scale for each of its rows, the columns of x.

    rows    ~ x_tk * s_t,  s_t = 448 / max_k |x_tk|      the factor of products that sum over k
    columns ~ x_tk * s_k,  s_k = 448 / max_t |x_tk|      the factor of products that sum over t

The scales are rounded down to powers of two, unless told otherwise, and "rowwise" in torchao's words.

Shapes  x (T, K) -> rows (T, K), columns (K, T') with zeros up to the next multiple of 16, as in `float8_cast.py`.
Dtypes  x bf16, fp16, fp32. The arithmetic is in fp32, with one rounding to the nearest.
Bytes   b per element of x. One pass reads x, a row in the registers of a program, writes rows and finds the maxima of
        the columns: b + 1, and K numbers for each program. Another one reads x and writes columns: b + 1. In PyTorch,
        for each of the two: |x|, the maxima, the product, the clamp and the rounding, and a transpose for one.
"""

from typing import NamedTuple

import torch

from . import reference
from ._dispatch import _device_guard, jit, tl
from ._launch import MAX_COLUMNS, backward_tile, cdiv, launch, persistent_grid, runs_triton
from .float8_cast import (
    E4M3,
    MULTIPLE,
    TILE_COLUMNS,
    TILE_ROWS,
    TILE_WARPS,
    _four,
    _packing,
    _quarter,
    _scale_for,
    _scaled,
    padded,
)
from .sizes import computes_nothing

LARGEST = 448.0  # of e4m3
PROGRAMS = 2  # on each multiprocessor, of the pass over rows; one where it has more than 8 warps and their registers


class Float8Rows(NamedTuple):
    """A matrix in eight bits.

    Attributes:
        rows: (T, K), e4m3.
        inverse: (T,), fp32: what each row has to be multiplied by.
        maxima: (K,), int32: the bits of max|x| of each column of x, or None if they were not asked for.
    """

    rows: torch.Tensor
    inverse: torch.Tensor
    maxima: torch.Tensor | None


class Float8Columns(NamedTuple):
    """The transpose of a matrix in eight bits.

    Attributes:
        columns: (K, T'), e4m3, with zeros at the end of each row.
        inverse: (K,), fp32: what each of its rows has to be multiplied by.
    """

    columns: torch.Tensor
    inverse: torch.Tensor


@jit
def _rows_kernel(
    X, ROWS, INVERSE, MAXIMA, stride, t, k, tiles,
    LARGEST: tl.constexpr, POWER_OF_2: tl.constexpr, KEEP_MAXIMA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Whole rows, each with a scale of its own, and the maxima of the columns of those that this program reads. They
    are those of the bits, as in `_maxima_kernel`."""
    pid = tl.program_id(0)
    col = tl.arange(0, BLOCK_K)
    most = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    for tile in tl.range(pid, tiles, tl.num_programs(0), num_stages=STAGES):
        row = tile * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
        inside = (row < t)[:, None] & (col < k)[None, :]
        x = tl.load(X + row[:, None] * stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if KEEP_MAXIMA:
            most = tl.maximum(most, bits)
        scale = _scale_for(tl.max(bits, 1), LARGEST, POWER_OF_2)
        tl.store(INVERSE + row, tl.div_rn(tl.full([], 1.0, tl.float32), scale), mask=row < t)
        y = _scaled(x, scale[:, None], LARGEST).to(ROWS.dtype.element_ty)
        tl.store(ROWS + row[:, None] * k + col[None, :], y, mask=inside)
    if KEEP_MAXIMA:
        tl.store(MAXIMA + pid.to(tl.int64) * k + col, tl.max(most, 0), mask=col < k)


@jit
def _columns_kernel(
    X, MAXIMA, ROWS, COLUMNS, INVERSE, t, k, quarters, tiles_per_row,
    LARGEST: tl.constexpr, POWER_OF_2: tl.constexpr, PACK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of x, written as its transpose in words of four numbers: see the kernel of this name in `float8_cast.py`.
    ROWS is a pointer and gives the dtype."""
    pid = tl.program_id(0)
    quarter = (pid // tiles_per_row).to(tl.int64) * (BLOCK_T // 4) + tl.arange(0, BLOCK_T // 4)
    col = (pid % tiles_per_row).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    of_columns = _scale_for(tl.load(MAXIMA + col, mask=col < k, other=0), LARGEST, POWER_OF_2)
    scale = of_columns[None, :]
    a = _quarter(X, ROWS, quarter * 4, col, t, k, scale, LARGEST, False)
    b = _quarter(X, ROWS, quarter * 4 + 1, col, t, k, scale, LARGEST, False)
    c = _quarter(X, ROWS, quarter * 4 + 2, col, t, k, scale, LARGEST, False)
    d = _quarter(X, ROWS, quarter * 4 + 3, col, t, k, scale, LARGEST, False)
    four = _four(a, b, c, d, ROWS, PACK)
    places = COLUMNS + col[:, None] * quarters + quarter[None, :]
    tl.store(places, tl.trans(four), mask=(quarter[None, :] < quarters) & (col[:, None] < k))
    if pid < tiles_per_row:
        tl.store(INVERSE + col, tl.div_rn(tl.full([], 1.0, tl.float32), of_columns), mask=col < k)


def float8_rows(x: torch.Tensor, power_of_2: bool = True, maxima: bool = False) -> Float8Rows:
    """x in eight bits, with a scale for each row. No gradient.

    Args:
        x (`torch.Tensor`): (T, K), with unit stride in rows; bf16, fp16 or fp32.
        power_of_2 (`bool`, *optional*, defaults to `True`): Round the scales down to powers of two.
        maxima (`bool`, *optional*, defaults to `False`): Find those of the columns too.

    Returns:
        `Float8Rows`. A row with a NaN or an infinity has neither rows nor an inverse that are finite.
    """
    t, k = x.shape
    if not runs_triton(x) or k > MAX_COLUMNS:
        return Float8Rows(*reference.float8_rows(x, power_of_2, maxima))
    block_t, block_k, num_warps, stages = backward_tile(k, x.element_size(), 1, x.device)
    tiles, each = cdiv(t, block_t), PROGRAMS if num_warps <= 8 else 1
    programs = each * persistent_grid(cdiv(tiles, each), x.device)
    rows = torch.empty((t, k), dtype=E4M3, device=x.device)
    inverse = torch.empty(t, dtype=torch.float32, device=x.device)
    most = torch.empty((programs, k), dtype=torch.int32, device=x.device) if maxima else None
    with _device_guard(x):
        launch(
            _rows_kernel, (programs,), x, rows, inverse, inverse if most is None else most, x.stride(0), t, k, tiles,
            LARGEST=LARGEST, POWER_OF_2=power_of_2, KEEP_MAXIMA=maxima, BLOCK_T=block_t, BLOCK_K=block_k,
            STAGES=stages, num_warps=num_warps,
        )  # fmt: skip
    return Float8Rows(rows, inverse, None if most is None else most.amax(0))


def float8_columns(x: torch.Tensor, maxima: torch.Tensor, power_of_2: bool = True) -> Float8Columns:
    """The transpose of x in eight bits, with a scale for each of its rows. No gradient.

    Args:
        x (`torch.Tensor`): (T, K), contiguous; bf16, fp16 or fp32.
        maxima (`torch.Tensor`): (K,), int32, of `float8_rows` of this x.
        power_of_2 (`bool`, *optional*, defaults to `True`): Round the scales down to powers of two.
    """
    t, k = x.shape
    if not runs_triton(x) or (t < MULTIPLE and not computes_nothing()):  # as in `float8_cast`
        return Float8Columns(*reference.float8_columns(x, maxima, power_of_2))
    columns = torch.empty((k, padded(t)), dtype=E4M3, device=x.device)
    inverse = torch.empty(k, dtype=torch.float32, device=x.device)
    tiles_per_row = cdiv(k, TILE_COLUMNS)
    with _device_guard(x):
        launch(
            _columns_kernel, (cdiv(padded(t), TILE_ROWS) * tiles_per_row,),
            x, maxima, columns, columns.view(torch.int32), inverse, t, k, padded(t) // 4, tiles_per_row,
            LARGEST=LARGEST, POWER_OF_2=power_of_2, PACK=_packing(E4M3), BLOCK_T=TILE_ROWS, BLOCK_K=TILE_COLUMNS,
            num_warps=TILE_WARPS,
        )  # fmt: skip
    return Float8Columns(columns, inverse)
