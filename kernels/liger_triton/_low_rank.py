"""Rank-r products that accompany a frozen matrix product, and the order of reads of the large tensors.

For T rows, a layer (K -> N), and an adapter of rank r with h = x A^T (T, r) and scaling s:

    y  = h (s B)^T, then y += x W^T in the same memory
    dx = dh A, then dx += dy W in the same memory
    dh = s dy B and dB = s dy^T h from one read of dy, and a second kernel for the sums over its programs
    dA = dh^T x

The large product comes second: it can read the sum it adds to while it computes. A small product at the end would wait
for both the read and the write.

Parts   If adapters are fp32 and the layer has 16 bits, an r-wide fp32 factor becomes two 16-bit numbers side by side,
        the rounded value and the rest: [hi | lo]. That doubles r and costs nothing while the products wait for memory.
        h, dh and the gradients of A and B then keep fp32 precision. Under autocast, PEFT's layer rounds them all to 16
        bits, so one part is enough. Two fp16 numbers cannot represent small fp32 values such as gradients, so fp16 with
        fp32 adapters runs on the PyTorch twin.
Shapes  x (T, K), W (N, K), y and dy (T, N); A (r, K), B (N, r), h and dh (T, r). R sums r over a group.
"""

import math
from collections.abc import Iterable
from itertools import chain

import torch

from ._dispatch import INTERPRET, jit, tl, use_triton
from ._launch import cdiv, launch, multiprocessors, next_power_of_2, shared_memory
from ._products import wide_product

Factors = tuple[torch.Tensor, torch.Tensor]

FUSED_RANK = 64  # up to this width of h, dh and dB come from one read of dy; beyond it, from two products
BLOCK_N = 64
SUMS = 512  # elements of dh or dB per program of `_sums_kernel`


@jit(do_not_specialize=["rows"])
def _low_rank_gradients_kernel(
    DY,
    H,
    SB,
    DH,
    DB,
    rows,
    columns,
    rank,
    columns_per_program,
    dy_stride,
    h_stride,
    sb_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Store DH[program_id(1)] = DY SB for a range of columns, and DB[program_id(0)] = DY^T H for a block of rows."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    r = tl.arange(0, BLOCK_R)
    row_mask, r_mask = row < rows, r < rank
    wide_row = row.to(tl.int64)  # int64: 2**17 rows of 16384 are 2**31 elements
    h = tl.load(H + wide_row[:, None] * h_stride + r[None], mask=row_mask[:, None] & r_mask[None], other=0.0)
    if WIDEN:  # Triton's interpreter multiplies the bits of bf16 as integers
        h = h.to(tl.float32)
    dh = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    DB += tl.program_id(0).to(tl.int64) * columns * rank
    first = tl.program_id(1) * columns_per_program
    for start in range(first, min(first + columns_per_program, columns), BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        column_mask = column < columns
        dy_mask = row_mask[:, None] & column_mask[None]
        dy = tl.load(DY + wide_row[:, None] * dy_stride + column[None], mask=dy_mask, other=0.0)
        narrow_mask = column_mask[:, None] & r_mask[None]
        sb = tl.load(SB + column[:, None] * sb_stride + r[None], mask=narrow_mask, other=0.0)
        if WIDEN:
            dy, sb = dy.to(tl.float32), sb.to(tl.float32)
        dh = tl.dot(dy, sb, dh)
        db = tl.dot(tl.trans(dy), h)
        tl.store(DB + column[:, None] * rank + r[None], db, mask=narrow_mask)
    DH += tl.program_id(1).to(tl.int64) * rows * rank
    tl.store(DH + wide_row[:, None] * rank + r[None], dh, mask=row_mask[:, None] & r_mask[None])


def _tile_of(rows: int, block_r: int, device: torch.device) -> tuple[int, int]:
    """Return (BLOCK_T, num_stages): the largest known tile that fits into the shared memory of the device.

    Shared memory holds `num_stages` tiles of dy and of SB and one of H, all with 16 bits, and one tile of DB in fp32.
    """
    memory = shared_memory(device)
    for block_t, stages in ((512, 3), (512, 2), (256, 3), (256, 2), (128, 2), (64, 2), (32, 1)):
        bytes_needed = 2 * (stages * BLOCK_N * (block_t + block_r) + block_t * block_r) + 4 * BLOCK_N * block_r
        if bytes_needed <= memory and (block_t < 512 or block_r <= 32):
            break
    return min(block_t, max(16, next_power_of_2(rows))), stages


@jit
def _total(PARTIAL, row, column, rows, rank, programs, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum PARTIAL (programs, rows, PARTS * rank) over its programs and, with two parts, over both halves of a row."""
    total = tl.zeros((BLOCK,), tl.float32)
    part = PARTIAL + row * (PARTS * rank) + column
    for _ in range(programs):
        total += tl.load(part, mask=row < rows, other=0.0)
        if PARTS == 2:
            total += tl.load(part + rank, mask=row < rows, other=0.0)
        part += rows * (PARTS * rank)
    return total


@jit(do_not_specialize=["rows", "dh_programs", "db_programs", "dh_tiles"])
def _sums_kernel(
    DH,
    DB,
    OUT,
    DB_OUT,
    rows,
    columns,
    rank,
    dh_programs,
    db_programs,
    out_stride,
    rest,
    of_h,
    scaling,
    dh_tiles,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store OUT = of_h * sum of DH, and DB_OUT = scaling * sum of DB. With two parts, OUT also gets the rounding rest,
    `rest` columns further on."""
    pid = tl.program_id(0)
    if pid < dh_tiles:
        place = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        row, column = place // rank, place % rank
        dh = of_h * _total(DH, row, column, rows, rank, dh_programs, PARTS, BLOCK)
        out = OUT + row * out_stride + column
        rounded = dh.to(OUT.dtype.element_ty)
        tl.store(out, rounded, mask=row < rows)
        if PARTS == 2:
            tl.store(out + rest, (dh - rounded.to(tl.float32)).to(OUT.dtype.element_ty), mask=row < rows)
    else:
        place = (pid - dh_tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        row, column = place // rank, place % rank
        db = scaling * _total(DB, row, column, columns, rank, db_programs, PARTS, BLOCK)
        tl.store(DB_OUT + place, db, mask=row < columns)


def low_rank_gradients(
    dy: torch.Tensor, h: torch.Tensor, sb: torch.Tensor, out: torch.Tensor, parts: int, of_h: float, scaling: float
) -> torch.Tensor:
    """Store dh = of_h * dy sb into `out`, and return dB = scaling * dy^T h in fp32.

    Args:
        dy: (T, N), of one dtype with `h` and `sb`. Each has unit stride in rows.
        h, sb: (T, r) and (N, r); with two parts (T, 2 r) and (N, 2 r). The halves are added at the end.
        out: (T, r), a slice of columns of a matrix (T, R); with two parts (T, 2, r) of a (T, 2, R), for the rounded
            values and the rest.
    """
    (rows, columns), width = dy.shape, h.shape[1]
    if not (use_triton(dy) and dy.element_size() == 2 and 0 < width <= FUSED_RANK and dy.numel() > 0):
        dh = sum_of_parts(wide_product(dy, sb), parts, 1)
        dh = dh if of_h == 1.0 else dh.mul_(of_h)
        if parts == 1:
            out.copy_(dh)
        else:
            out.copy_(parts_of(dh, out.dtype, parts, 1).view(out.shape))
        return sum_of_parts(wide_product(dy.t(), h), parts, 1).mul_(scaling)
    rank = width // parts
    block_r = max(16, next_power_of_2(width))
    block_t, stages = _tile_of(rows, block_r, dy.device)
    row_programs = cdiv(rows, block_t)
    # One program for each multiprocessor. Programs with the same rows split the columns among them.
    per_program = cdiv(cdiv(columns, max(1, multiprocessors(dy.device) // row_programs)), BLOCK_N) * BLOCK_N
    column_programs = cdiv(columns, per_program)
    # Each program writes its own sums, and a second kernel adds them: no atomics, so equal inputs give equal bits.
    dh = torch.empty((column_programs, rows, width), dtype=torch.float32, device=dy.device)
    all_db = torch.empty((row_programs, columns, width), dtype=torch.float32, device=dy.device)
    db = torch.empty((columns, rank), dtype=torch.float32, device=dy.device)
    dh_tiles = cdiv(rows * rank, SUMS)
    launch(
        _low_rank_gradients_kernel,
        (row_programs, column_programs),
        dy,
        h,
        sb,
        dh,
        all_db,
        rows,
        columns,
        width,
        per_program,
        dy.stride(0),
        h.stride(0),
        sb.stride(0),
        BLOCK_T=block_t,
        BLOCK_N=BLOCK_N,
        BLOCK_R=block_r,
        WIDEN=INTERPRET,
        num_warps=8,
        num_stages=stages,
    )
    launch(
        _sums_kernel,
        (dh_tiles + cdiv(columns * rank, SUMS),),
        dh,
        all_db,
        out,
        db,
        rows,
        columns,
        rank,
        column_programs,
        row_programs,
        out.stride(0),
        out.stride(1) if parts == 2 else 0,
        float(of_h),
        float(scaling),
        dh_tiles,
        PARTS=parts,
        BLOCK=SUMS,
        num_warps=4,
    )
    return db


def parts_of(wide: torch.Tensor, dtype: torch.dtype, parts: int, dim: int) -> torch.Tensor:
    """Return `wide` in `dtype`; with two parts, [rounded | rest] along `dim`."""
    rounded = wide.to(dtype)
    if parts == 1:
        return rounded
    return torch.cat((rounded, (wide - rounded).to(dtype)), dim)


def sum_of_parts(wide: torch.Tensor, parts: int, dim: int) -> torch.Tensor:
    """Add the two halves along `dim` of a product that had a factor in two parts."""
    if parts == 1:
        return wide
    first, second = wide.chunk(2, dim)
    return first + second


def factors_of(scaling: float, dtype: torch.dtype) -> tuple[float, float]:
    """Split `scaling` into two factors: one for B, one for h and dh.

    The second is 1, except for a small scaling in fp16: there B times the scaling could underflow, so a power of two is
    moved to h and dh. That rounds nothing.
    """
    if dtype != torch.float16 or isinstance(scaling, torch.Tensor) or not 0 < abs(scaling) < 1:
        return scaling, 1.0
    mantissa, exponent = math.frexp(scaling)
    return mantissa, 2.0**exponent


def scaled_b(b: torch.Tensor, scaling: float, dtype: torch.dtype, parts: int) -> torch.Tensor:
    """Return scaling * B (N, r) in `dtype`, multiplied before it is rounded; with two parts (N, 2 r)."""
    if parts == 2:
        return parts_of(b * scaling, dtype, parts, 1)
    return torch.mul(b, scaling, out=torch.empty(b.shape, dtype=dtype, device=b.device))


def sum_of_products(small: Factors | None, large: Iterable[Factors], bias: torch.Tensor | None = None) -> torch.Tensor:
    """Sum the products of the pair `small` (if any) and of the pairs in `large`, plus `bias`."""
    total: torch.Tensor | None = None
    for product in chain(() if small is None else (small,), large):
        if total is not None:
            total.addmm_(*product)
        else:
            total = torch.mm(*product) if bias is None else torch.addmm(bias, *product)
        del product  # free a factor that may be an unpacked weight before the next one is made
    assert total is not None, "there is a product"
    return total
