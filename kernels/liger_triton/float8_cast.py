"""Cast matrices to fp8: q = round(x * s) with s = max(q) / max|x|, so x ~ q / s. Micikevicius et al. 2022,
arXiv:2209.05433, section 3. torchao calls such scales "dynamic".

    float8_cast      one scale for all of x ("tensorwise"): its rows, its transpose, or both
    float8_rows      a scale for each row of x ("rowwise"): the factor of products that sum along rows
    float8_columns   the transpose, with a scale for each of its rows: the factor of products that sum over rows of x
    row_cast         up to three matrices side by side, with one scale for each row of all
    transposed       the transpose of an fp8 matrix: a copy of its bytes, without rounding

Shapes  x (T, K) -> rows (T, K), and columns (K, T'), its transpose with zeros up to the next multiple of 16: matrix
        units multiply along contiguous rows and want 16 bytes at a time.
Dtypes  x bf16, fp16, fp32; results e4m3 (largest number 448) or e5m2 (57344). Arithmetic in fp32, rounded once.
Bytes   b per element of x. One scale: a pass reads x for its maximum, b, unless the maxima are given; another reads it
        and writes one result or both: b + 1 or b + 2. A scale for each row: b + 1 for the rows, which also finds the
        maxima of the columns, and b + 1 for the columns. Moving bits: 2.

A GPU without fp8 matrix units (`fault_of_device`) cannot run these kernels and uses the twins.
"""

import functools
from typing import NamedTuple

import torch

from . import reference
from ._dispatch import INTERPRET, KERNEL_DTYPES, is_wrapped, jit, on_cuda, runs_triton, tl
from ._launch import MAX_COLUMNS, backward_tile, cdiv, launch, next_power_of_2, persistent_grid
from .sizes import computes_nothing

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = 448.0  # the largest number of e4m3
LEAST = 1e-12  # lower bound of max|x|, as in torchao
# The lower bound in `row_cast`. Gradients of a mean over many tokens can be below 1e-12: with that bound, adapters of a
# small Llama had gradients off by 0.64 for a loss times 1e-12, and off by 0.07 with this one.
LEAST_OF_ROWS = 1e-30
MULTIPLE = 16  # fp8 products need both dimensions to be multiples of it
PROGRAMS = 512  # most programs of the maxima pass; each writes one maximum
ROW_PROGRAMS = 2  # programs of `float8_rows` on each multiprocessor; one if it needs more than 8 warps
MOST_PARTS = 3  # matrices that `row_cast` and `transposed` take: the gradients of q, k and v
LARGEST_ROW = 2**16  # elements that a program of `row_cast` keeps in registers
BLOCK = 8192  # elements that a program of the maxima pass or of `_rows_kernel` loads at a time
TILE_ROWS = 128  # this and the next two: the tile of `_columns_kernel`
TILE_COLUMNS = 128
TILE_WARPS = 4
TURNED_TILE = 32  # tile of `transposed`, in words of four numbers, in both directions


class Float8(NamedTuple):
    """An fp8 matrix with one scale.

    Attributes:
        rows: (T, K), or None if it was not requested.
        columns: (K, T'), the transpose with zeros at the end of each row, or None.
        inverse: (), fp32: multiply the numbers by it to get x.
        maxima: (P,), int32: the bits of max|x| over P parts of x, for another cast of the same x.
    """

    rows: torch.Tensor | None
    columns: torch.Tensor | None
    inverse: torch.Tensor
    maxima: torch.Tensor


class Float8Rows(NamedTuple):
    """An e4m3 matrix with a scale for each row.

    Attributes:
        rows: (T, K).
        inverse: (T,), fp32: multiply each row by it to get x.
        maxima: (K,), int32: the bits of max|x| of each column of x, or None if they were not requested.
    """

    rows: torch.Tensor
    inverse: torch.Tensor
    maxima: torch.Tensor | None


Turned = tuple[torch.Tensor, torch.Tensor]  # an fp8 transpose (K, T'), and the factor of it or of each row


@functools.cache
def fault_of_device(device: torch.device) -> str | None:
    """Return why `device` cannot compute fp8 products, or None if it can. A CPU computes them in fp32."""
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip:
        return f"{device} is not an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        name = torch.cuda.get_device_name(device)
        return f"{name} (compute capability {major}.{minor}) has no matrix units for fp8, which begin with 8.9"
    return None


@jit
def _maxima_kernel(X, MAXIMA, numel, rounds, programs, BLOCK: tl.constexpr):
    """Store the bits of max|x| of this program's part of x.

    Compared as integers, the bits have the order of the numbers, and NaN is the largest. A floating-point maximum could
    drop a NaN.
    """
    pid = tl.program_id(0).to(tl.int64)
    most = tl.zeros([BLOCK], tl.int32)
    for k in range(rounds):
        off = (pid + k * programs) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(X + off, mask=off < numel, other=0.0).to(tl.float32)
        most = tl.maximum(most, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(MAXIMA + pid, tl.max(most, 0))


@jit
def _scale_for(bits, LARGEST: tl.constexpr, POWER_OF_2: tl.constexpr, LEAST: tl.constexpr):
    """Return the scales for maxima with these bits.

    These kernels never take a maximum or minimum of floating-point numbers: a NaN has to pass through, and the
    instructions for that made Triton write a transposed tile of single bytes wrongly (triton-lang/triton#11111).
    """
    most = bits.to(tl.float32, bitcast=True)
    most = tl.where(most < LEAST, LEAST, most)
    scale = tl.div_rn(tl.full([], LARGEST, tl.float32), most)
    if POWER_OF_2:
        power = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale == scale, power, scale)
    return scale


@jit
def _scale_of(MAXIMA, LARGEST: tl.constexpr, POWER_OF_2: tl.constexpr, LEAST: tl.constexpr, COUNT: tl.constexpr):
    """Return the one scale of all numbers."""
    return _scale_for(tl.max(tl.load(MAXIMA + tl.arange(0, COUNT)), 0), LARGEST, POWER_OF_2, LEAST)


@jit
def _scaled(x, scale, LARGEST: tl.constexpr):
    """Return x * scale in fp32, clamped to the largest number of the result's dtype."""
    y = x.to(tl.float32) * scale
    return tl.where(y > LARGEST, LARGEST, tl.where(y < -LARGEST, -LARGEST, y))


@jit
def _rows_kernel(
    X,
    MAXIMA,
    ROWS,
    INVERSE,
    numel,
    LARGEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    LEAST: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    off = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + off, mask=off < numel, other=0.0)
    scale = _scale_of(MAXIMA, LARGEST, POWER_OF_2, LEAST, COUNT)
    tl.store(ROWS + off, _scaled(x, scale, LARGEST).to(ROWS.dtype.element_ty), mask=off < numel)
    if pid == 0:
        tl.store(INVERSE, tl.div_rn(tl.full([], 1.0, tl.float32), scale))


@jit
def _quarter(X, ROWS, row, col, t, k, scale, LARGEST: tl.constexpr, KEEP_ROWS: tl.constexpr):
    """Load the rows `row` of a tile, every fourth one, and scale them. Rows past the last one are zeros."""
    inside = (row[:, None] < t) & (col[None, :] < k)
    x = tl.load(X + row[:, None] * k + col[None, :], mask=inside, other=0.0)
    y = _scaled(x, scale, LARGEST)
    if KEEP_ROWS:
        tl.store(ROWS + row[:, None] * k + col[None, :], y.to(ROWS.dtype.element_ty), mask=inside)
    return y


@jit(do_not_specialize=["t"])
def _columns_kernel(
    X,
    MAXIMA,
    ROWS,
    COLUMNS,
    INVERSE,
    t,
    k,
    quarters,
    tiles_per_row,
    LARGEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    LEAST: tl.constexpr,
    COUNT: tl.constexpr,
    KEEP_ROWS: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the transpose of a tile of x and, with KEEP_ROWS, the tile itself. The COUNT numbers in MAXIMA give one
    scale; with COUNT 0, each column has its own.

    COLUMNS is int32: each element, a word, holds four numbers of one column, so they move between threads together. The
    four come from four rows in turn, so a row of COLUMNS has `quarters` = T' / 4 words, and `quarter` counts them.

    With Triton 3.6, moving single bytes or joining them by shifts left registers undefined, and results on an H200 had
    wrong bytes (a bug like triton-lang/triton#11111). Two PTX instructions join them instead.
    """
    pid = tl.program_id(0)
    quarter = (pid // tiles_per_row).to(tl.int64) * (BLOCK_T // 4) + tl.arange(0, BLOCK_T // 4)
    col = (pid % tiles_per_row).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    if COUNT > 0:
        all_scales = _scale_of(MAXIMA, LARGEST, POWER_OF_2, LEAST, COUNT)
        scale = all_scales
    else:
        all_scales = _scale_for(tl.load(MAXIMA + col, mask=col < k, other=0), LARGEST, POWER_OF_2, LEAST)
        scale = all_scales[None, :]
    a = _quarter(X, ROWS, quarter * 4, col, t, k, scale, LARGEST, KEEP_ROWS)
    b = _quarter(X, ROWS, quarter * 4 + 1, col, t, k, scale, LARGEST, KEEP_ROWS)
    c = _quarter(X, ROWS, quarter * 4 + 2, col, t, k, scale, LARGEST, KEEP_ROWS)
    d = _quarter(X, ROWS, quarter * 4 + 3, col, t, k, scale, LARGEST, KEEP_ROWS)
    four = _four(a, b, c, d, ROWS, PACK)
    places = COLUMNS + col[:, None] * quarters + quarter[None, :]
    tl.store(places, tl.trans(four), mask=(quarter[None, :] < quarters) & (col[:, None] < k))
    inverse = tl.div_rn(tl.full([], 1.0, tl.float32), all_scales)
    if COUNT > 0:
        if pid == 0:
            tl.store(INVERSE, inverse)
    else:
        if pid < tiles_per_row:
            tl.store(INVERSE + col, inverse, mask=col < k)


@jit
def _four(a, b, c, d, ROWS, PACK: tl.constexpr):
    """Round four numbers to the dtype of ROWS and return them as one word."""
    if PACK == "":  # for Triton's interpreter
        four = _byte(a, ROWS) | (_byte(b, ROWS) << 8) | (_byte(c, ROWS) << 16) | (_byte(d, ROWS) << 24)
    else:
        four = tl.inline_asm_elementwise(PACK, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    return four


@jit
def _byte(y, ROWS):
    """Round y to the dtype of ROWS and return its bits in the lowest byte."""
    return y.to(ROWS.dtype.element_ty).to(tl.uint8, bitcast=True).to(tl.int32)


def packing(dtype: torch.dtype) -> str:
    """Return PTX that rounds four numbers to e4m3 or e5m2, the first into the lowest byte. It keeps NaN."""
    if INTERPRET:
        return ""
    convert = f"cvt.rn.satfinite.{'e4m3' if dtype == E4M3 else 'e5m2'}x2.f32"
    return f"{{ .reg .b16 low, high; {convert} low, $2, $1; {convert} high, $4, $3; mov.b32 $0, {{low, high}}; }}"


@jit(do_not_specialize=["t", "tiles"])
def _each_row_kernel(
    X,
    ROWS,
    INVERSE,
    MAXIMA,
    stride,
    t,
    k,
    tiles,
    LARGEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    LEAST: tl.constexpr,
    KEEP_MAXIMA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write rows, each with its own scale, and the column maxima of this program's rows as bits."""
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
        scale = _scale_for(tl.max(bits, 1), LARGEST, POWER_OF_2, LEAST)
        tl.store(INVERSE + row, tl.div_rn(tl.full([], 1.0, tl.float32), scale), mask=row < t)
        y = _scaled(x, scale[:, None], LARGEST).to(ROWS.dtype.element_ty)
        tl.store(ROWS + row[:, None] * k + col[None, :], y, mask=inside)
    if KEEP_MAXIMA:
        tl.store(MAXIMA + pid.to(tl.int64) * k + col, tl.max(most, 0), mask=col < k)


@jit
def _part_of_row(X, FACTOR, row, n, stride, BLOCK: tl.constexpr, HAS_FACTOR: tl.constexpr):
    """Load a row of one matrix in fp32, times the factors of its columns."""
    column = tl.arange(0, BLOCK)
    x = tl.load(X + row * stride + column, mask=column < n, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        x *= tl.load(FACTOR + column, mask=column < n, other=0.0)
    return x


@jit
def _most_of(x):
    """Return the bits of max|x|. As integers they have the order of the numbers, with NaN above all."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@jit
def _store_part(x, OUT, scale, n, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Scale a row of one matrix and store it at OUT."""
    column = tl.arange(0, BLOCK)
    tl.store(OUT + column, _scaled(x, scale, LARGEST).to(OUT.dtype.element_ty), mask=column < n)


@jit
def _row_cast_kernel(
    A,
    B,
    C,
    FA,
    FB,
    FC,
    OUT,
    INVERSE,
    na,
    nb,
    nc,
    stride_a,
    stride_b,
    stride_c,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write one row of up to three matrices side by side, with one scale. A block of 0: no such matrix."""
    row = tl.program_id(0).to(tl.int64)
    a = _part_of_row(A, FA, row, na, stride_a, BLOCK_A, HAS_FACTOR)
    bits = _most_of(a)
    if BLOCK_B > 0:
        b = _part_of_row(B, FB, row, nb, stride_b, BLOCK_B, HAS_FACTOR)
        bits = tl.maximum(bits, _most_of(b))
    if BLOCK_C > 0:
        c = _part_of_row(C, FC, row, nc, stride_c, BLOCK_C, HAS_FACTOR)
        bits = tl.maximum(bits, _most_of(c))
    scale = _scale_for(bits, LARGEST, False, LEAST)
    tl.store(INVERSE + row, tl.div_rn(tl.full([], 1.0, tl.float32), scale))
    OUT += row * (na + nb + nc)
    _store_part(a, OUT, scale, na, LARGEST, BLOCK_A)
    if BLOCK_B > 0:
        _store_part(b, OUT + na, scale, nb, LARGEST, BLOCK_B)
    if BLOCK_C > 0:
        _store_part(c, OUT + na + nb, scale, nc, LARGEST, BLOCK_C)


@jit
def _transposed_kernel(
    A,
    B,
    C,
    COLUMNS,
    quarters_a,
    quarters_b,
    quarters_c,
    words,
    stride,
    tiles_per_row,
    tiles_a,
    tiles_b,
    TURN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the transpose of a tile of one of up to three fp8 matrices (N_i, K), side by side.

    The matrices (N_i, K / 4) and COLUMNS (K, stride) are int32, words of four numbers. A row of a matrix has `words` =
    K / 4 words, and a matrix has `quarters` = N_i / 4 groups of four rows. The words of four rows are sixteen numbers,
    which `TURN` transposes within a thread, since single bytes must not move between threads (see `_columns_kernel`).
    """
    pid = tl.program_id(0)
    tile = pid // tiles_per_row
    in_b, in_c = tile >= tiles_a, tile >= tiles_a + tiles_b
    W = tl.where(in_c, C, tl.where(in_b, B, A))
    quarters = tl.where(in_c, quarters_c, tl.where(in_b, quarters_b, quarters_a))
    first = tl.where(in_c, quarters_a + quarters_b, tl.where(in_b, quarters_a, 0))
    tile -= tl.where(in_c, tiles_a + tiles_b, tl.where(in_b, tiles_a, 0))
    quarter = tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    word = (pid % tiles_per_row).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (quarter[:, None] < quarters) & (word[None, :] < words)
    places = W + quarter[:, None] * 4 * words + word[None, :]
    a = tl.load(places, mask=inside, other=0)
    b = tl.load(places + words, mask=inside, other=0)
    c = tl.load(places + 2 * words, mask=inside, other=0)
    d = tl.load(places + 3 * words, mask=inside, other=0)
    a, b, c, d = tl.inline_asm_elementwise(
        TURN, "=r,=r,=r,=r,r,r,r,r", [a, b, c, d], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )
    turned = COLUMNS + word[:, None] * 4 * stride + first + quarter[None, :]
    mask = (quarter[None, :] < quarters) & (word[:, None] < words)
    tl.store(turned, tl.trans(a), mask=mask)
    tl.store(turned + stride, tl.trans(b), mask=mask)
    tl.store(turned + 2 * stride, tl.trans(c), mask=mask)
    tl.store(turned + 3 * stride, tl.trans(d), mask=mask)


# PTX that transposes 4 x 4 bytes: the first four instructions pair the bytes of two rows, the others pair these pairs.
_TURN = """{
    .reg .b32 ab, cd, ef, gh;
    prmt.b32 ab, $4, $5, 0x5140; prmt.b32 cd, $6, $7, 0x5140;
    prmt.b32 ef, $4, $5, 0x7362; prmt.b32 gh, $6, $7, 0x7362;
    prmt.b32 $0, ab, cd, 0x5410; prmt.b32 $1, ab, cd, 0x7632;
    prmt.b32 $2, ef, gh, 0x5410; prmt.b32 $3, ef, gh, 0x7632;
}"""


def padded(rows: int) -> int:
    """Round `rows` up to a multiple of 16."""
    return cdiv(rows, MULTIPLE) * MULTIPLE


def _casts(*tensors: torch.Tensor) -> bool:
    """Return whether the kernels cast these tensors to fp8."""
    return runs_triton(*tensors) and fault_of_device(tensors[0].device) is None


def maxima_of(x: torch.Tensor) -> torch.Tensor:
    """Return (P,), int32: the bits of max|x| over P parts of a contiguous x. The largest gives max|x|."""
    if not runs_triton(x):
        return reference.float8_maxima(x)
    programs = min(PROGRAMS, next_power_of_2(cdiv(x.numel(), BLOCK)))
    maxima = torch.empty(programs, dtype=torch.int32, device=x.device)
    rounds = cdiv(x.numel(), BLOCK * programs)
    launch(_maxima_kernel, (programs,), x, maxima, x.numel(), rounds, programs, BLOCK=BLOCK, num_warps=8)
    return maxima


def float8_cast(
    x: torch.Tensor,
    dtype: torch.dtype = E4M3,
    *,
    rows: bool = True,
    columns: bool = False,
    power_of_2: bool = False,
    maxima: torch.Tensor | None = None,
) -> Float8:
    """Cast x to fp8 with one scale: as it is, transposed, or both. Without gradient.

    Args:
        x (`torch.Tensor`): (T, K), contiguous; bf16, fp16 or fp32.
        dtype (`torch.dtype`, *optional*): `torch.float8_e4m3fn`, the default, or `torch.float8_e5m2`.
        rows, columns (`bool`, *optional*): Which of the two results to return, at least one.
        power_of_2 (`bool`, *optional*, defaults to `False`): Round the scale down to a power of two.
        maxima (`torch.Tensor`, *optional*): `maxima` of an earlier cast of the same x, which saves a pass.

    Returns:
        `Float8`. Zeros stay zeros. A NaN in `x` makes everything NaN; an infinity makes everything but zeros NaN.

    Raises:
        ValueError: `x` is not a contiguous matrix of these dtypes, `dtype` is another, or no result is requested.
    """
    if x.ndim != 2 or not x.is_contiguous() or x.dtype not in KERNEL_DTYPES:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype} with strides {x.stride()}; expected a contiguous matrix in bfloat16, "
            "float16 or float32."
        )
    if dtype not in (E4M3, E5M2):
        raise ValueError(f"dtype is {dtype}; expected torch.float8_e4m3fn or torch.float8_e5m2.")
    if not (rows or columns):
        raise ValueError("rows and columns are both False; ask for one of them, or for both.")
    if maxima is not None and (maxima.dtype != torch.int32 or not maxima.is_contiguous() or maxima.device != x.device):
        raise ValueError(f"maxima is {maxima.dtype} on {maxima.device}; expected the maxima of an earlier cast of x.")
    if not _casts(x) or (columns and _is_short(x)):
        return Float8(*reference.float8_cast(x, dtype, rows, columns, power_of_2, maxima))
    if maxima is None:
        maxima = maxima_of(x)
    inverse = torch.empty((), dtype=torch.float32, device=x.device)
    as_rows = torch.empty_like(x, dtype=dtype) if rows else None
    if columns:
        as_columns = _columns_of(x, maxima, as_rows, inverse, dtype, power_of_2, maxima.shape[0])
        return Float8(as_rows, as_columns, inverse, maxima)
    launch(
        _rows_kernel,
        (cdiv(x.numel(), BLOCK),),
        x,
        maxima,
        as_rows,
        inverse,
        x.numel(),
        LARGEST=torch.finfo(dtype).max,
        POWER_OF_2=power_of_2,
        LEAST=LEAST,
        COUNT=maxima.shape[0],
        BLOCK=BLOCK,
        num_warps=8,
    )
    return Float8(as_rows, None, inverse, maxima)


def _is_short(x: torch.Tensor) -> bool:
    """Return whether x has under 16 rows, for which the twin transposes.

    With one fp32 row, the transpose alone had wrong bytes (H200, Triton 3.6). Inside `sizes_only` nothing is launched.
    """
    return x.shape[0] < MULTIPLE and not computes_nothing()


def _columns_of(
    x: torch.Tensor,
    maxima: torch.Tensor,
    as_rows: torch.Tensor | None,
    inverse: torch.Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    count: int,
) -> torch.Tensor:
    """Return the transpose of x. The kernel fills `inverse` too and, if given, `as_rows`.

    `count` is the number of `maxima` if all numbers get one scale, or 0 if each column has a maximum and a scale.
    """
    t, k = x.shape
    as_columns = torch.empty((k, padded(t)), dtype=dtype, device=x.device)
    tiles_per_row = cdiv(k, TILE_COLUMNS)
    launch(
        _columns_kernel,
        (cdiv(padded(t), TILE_ROWS) * tiles_per_row,),
        x,
        maxima,
        as_columns if as_rows is None else as_rows,
        as_columns.view(torch.int32),
        inverse,
        t,
        k,
        padded(t) // 4,
        tiles_per_row,
        LARGEST=torch.finfo(dtype).max,
        POWER_OF_2=power_of_2,
        LEAST=LEAST,
        COUNT=count,
        KEEP_ROWS=as_rows is not None,
        PACK=packing(dtype),
        BLOCK_T=TILE_ROWS,
        BLOCK_K=TILE_COLUMNS,
        num_warps=TILE_WARPS,
    )
    return as_columns


def float8_rows(x: torch.Tensor, power_of_2: bool = True, maxima: bool = False) -> Float8Rows:
    """Cast x to e4m3 with a scale for each row. Without gradient.

    Args:
        x (`torch.Tensor`): (T, K), with unit stride in rows; bf16, fp16 or fp32.
        power_of_2 (`bool`, *optional*, defaults to `True`): Round the scales down to powers of two.
        maxima (`bool`, *optional*, defaults to `False`): Find the maxima of the columns too.

    Returns:
        `Float8Rows`. A row with a NaN or an infinity gets non-finite numbers and a non-finite inverse.
    """
    t, k = x.shape
    if not _casts(x) or k > MAX_COLUMNS:
        return Float8Rows(*reference.float8_rows(x, power_of_2, maxima))
    block_t, block_k, num_warps, stages = backward_tile(k, x.device, x)
    tiles = cdiv(t, block_t)
    each = ROW_PROGRAMS if num_warps <= 8 else 1
    programs = each * persistent_grid(cdiv(tiles, each), x.device)
    rows = torch.empty((t, k), dtype=E4M3, device=x.device)
    inverse = torch.empty(t, dtype=torch.float32, device=x.device)
    most = torch.empty((programs, k), dtype=torch.int32, device=x.device) if maxima else None
    launch(
        _each_row_kernel,
        (programs,),
        x,
        rows,
        inverse,
        inverse if most is None else most,
        x.stride(0),
        t,
        k,
        tiles,
        LARGEST=LARGEST,
        POWER_OF_2=power_of_2,
        LEAST=LEAST,
        KEEP_MAXIMA=maxima,
        BLOCK_T=block_t,
        BLOCK_K=block_k,
        STAGES=stages,
        num_warps=num_warps,
    )
    return Float8Rows(rows, inverse, None if most is None else most.amax(0))


def float8_columns(x: torch.Tensor, maxima: torch.Tensor, power_of_2: bool = True) -> Turned:
    """Return the fp8 transpose (K, T') of x, and the factor (K,) of each of its rows. Without gradient.

    Args:
        x (`torch.Tensor`): (T, K), contiguous; bf16, fp16 or fp32.
        maxima (`torch.Tensor`): (K,), int32, from `float8_rows` of this x.
        power_of_2 (`bool`, *optional*, defaults to `True`): Round the scales down to powers of two.
    """
    if not _casts(x) or _is_short(x):
        return reference.float8_columns(x, maxima, power_of_2)
    inverse = torch.empty(x.shape[1], dtype=torch.float32, device=x.device)
    return _columns_of(x, maxima, None, inverse, E4M3, power_of_2, 0), inverse


def row_cast(parts: list[torch.Tensor], factors: list[torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast matrices side by side to e4m3, with one scale for each row.

    Args:
        parts (`list`): At most three matrices (T, N_i), with unit stride in rows; bf16, fp16 or fp32.
        factors (`list`, *optional*): (N_i,), fp32, multiplied into the columns before the cast.

    Returns:
        (T, N) in e4m3, and the factor (T, 1) of each row in fp32. A row with a NaN or an infinity is NaN.
    """
    rows = parts[0].shape[0]
    total = sum(part.shape[1] for part in parts)
    blocks = [next_power_of_2(part.shape[1]) for part in parts] + [0] * (MOST_PARTS - len(parts))
    if not (on_cuda(parts[0]) and _casts(*parts)) or sum(blocks) > LARGEST_ROW:
        return reference.float8_row_cast(parts, factors)
    out = torch.empty((rows, total), dtype=E4M3, device=parts[0].device)
    inverse = torch.empty((rows, 1), dtype=torch.float32, device=parts[0].device)
    missing = MOST_PARTS - len(parts)
    given = [*parts, *parts[:1] * missing]
    widths = [part.shape[1] for part in parts] + [0] * missing
    if factors is None:
        scales = [inverse] * MOST_PARTS  # never read
    else:
        scales = [f.contiguous() for f in (*factors, *factors[:1] * missing)]
    # The whole row is in registers: more warps for wider rows.
    block = sum(blocks)
    if block <= 2048:
        warps = 4
    elif block <= 8192:
        warps = 8
    elif block <= 2**15:
        warps = 16
    else:
        warps = 32
    launch(
        _row_cast_kernel,
        (rows,),
        *given,
        *scales,
        out,
        inverse,
        *widths,
        *[part.stride(0) for part in given],
        LARGEST=LARGEST,
        LEAST=LEAST_OF_ROWS,
        HAS_FACTOR=factors is not None,
        BLOCK_A=blocks[0],
        BLOCK_B=blocks[1],
        BLOCK_C=blocks[2],
        num_warps=warps,
    )
    return out, inverse


def transposed(all_bits: list[torch.Tensor]) -> torch.Tensor:
    """Return the transposes of at most three fp8 matrices (N_i, K), side by side: (K, N)."""
    if not on_cuda(all_bits[0]) or fault_of_device(all_bits[0].device) or any(map(is_wrapped, all_bits)):
        return torch.cat([bits.view(torch.uint8).t() for bits in all_bits], 1).contiguous().view(E4M3)
    k = all_bits[0].shape[1]
    total = sum(bits.shape[0] for bits in all_bits)
    columns = torch.empty((k, total), dtype=E4M3, device=all_bits[0].device)
    missing = MOST_PARTS - len(all_bits)
    quarters = [bits.shape[0] // 4 for bits in all_bits] + [0] * missing
    tiles_per_row = cdiv(k // 4, TURNED_TILE)
    tiles = [cdiv(q, TURNED_TILE) for q in quarters]
    words = [bits.contiguous().view(torch.int32) for bits in all_bits]
    launch(
        _transposed_kernel,
        (sum(tiles) * tiles_per_row,),
        *words,
        *words[:1] * missing,
        columns.view(torch.int32),
        *quarters,
        k // 4,
        total // 4,
        tiles_per_row,
        tiles[0],
        tiles[1],
        TURN=_TURN,
        BLOCK_N=TURNED_TILE,
        BLOCK_K=TURNED_TILE,
        num_warps=4,
    )
    return columns
