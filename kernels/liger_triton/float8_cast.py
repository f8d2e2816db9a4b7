"""A matrix in eight bits with one scale for all of it: q = round(x * s) with s = max(q) / max|x|, and x ~ q / s.
Micikevicius et al. 2022, arXiv:2209.05433, section 3; the scale is "dynamic, tensorwise" in torchao's words.

Shapes  x (T, K) -> rows (T, K), and columns (K, T'), its transpose with zeros up to the next multiple of 16, since the
        matrix units multiply along contiguous rows and want 16 bytes at a time. x is the factor of two products: of one
        along K, and of one along T.
Dtypes  x bf16, fp16, fp32; results e4m3 (448 is its largest number, three bits behind the leading one) or e5m2 (57344,
        two bits). The arithmetic is in fp32, with one rounding to the nearest.
Bytes   b per element of x. One pass reads x for its maximum: b. One pass reads it again and writes one of the two
        results or both: b + 1 or b + 2. Where the maxima are given, the first pass is left out. In PyTorch: |x| b + b,
        its maximum b, x * s b + 4, the clamp 8, the rounding 5, and the transpose 2.
"""

import functools
from typing import NamedTuple

import torch

from . import reference
from ._dispatch import INTERPRET, _device_guard, jit, tl
from ._launch import cdiv, launch, next_power_of_2, runs_triton
from .sizes import computes_nothing

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of both dimensions of what is multiplied in eight bits
PROGRAMS = 512  # at most, of the pass that reads the maxima; each leaves one
BLOCK = 8192
TILE_ROWS, TILE_COLUMNS, TILE_WARPS = 128, 128, 4


class Float8(NamedTuple):
    """A matrix in eight bits.

    Attributes:
        rows: (T, K), or None if it was not asked for.
        columns: (K, T'), the transpose with zeros at the end of each row, or None.
        inverse: (), fp32: what the numbers have to be multiplied by.
        maxima: (P,), int32: the bits of max|x| of P parts of x, which lead to the scale.
    """

    rows: torch.Tensor | None
    columns: torch.Tensor | None
    inverse: torch.Tensor
    maxima: torch.Tensor


@jit
def _maxima_kernel(X, MAXIMA, numel, rounds, programs, BLOCK: tl.constexpr):
    """The bits of max|x| of what this program reads. As integers they are in the order of the numbers, and above all of
    them is NaN, which is found in this way where a maximum of numbers may pass over it."""
    pid = tl.program_id(0).to(tl.int64)
    most = tl.zeros([BLOCK], tl.int32)
    for k in range(rounds):
        off = (pid + k * programs) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(X + off, mask=off < numel, other=0.0).to(tl.float32)
        most = tl.maximum(most, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(MAXIMA + pid, tl.max(most, 0))


@jit
def _scale_of(MAXIMA, LARGEST: tl.constexpr, POWER_OF_2: tl.constexpr, COUNT: tl.constexpr):
    """The scale of all numbers."""
    return _scale_for(tl.max(tl.load(MAXIMA + tl.arange(0, COUNT)), 0), LARGEST, POWER_OF_2)


@jit
def _scale_for(bits, LARGEST: tl.constexpr, POWER_OF_2: tl.constexpr):
    """The scales of numbers whose maxima have these bits. No maximum or minimum of floating-point numbers is taken in
    these kernels: a NaN has to pass, and the instructions for that made Triton write a transposed tile of single bytes
    wrongly (triton-lang/triton#11111)."""
    most = bits.to(tl.float32, bitcast=True)
    most = tl.where(most < 1e-12, 1e-12, most)
    scale = tl.div_rn(tl.full([], LARGEST, tl.float32), most)
    if POWER_OF_2:
        power = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale == scale, power, scale)
    return scale


@jit
def _scaled(x, scale, LARGEST: tl.constexpr):
    y = x.to(tl.float32) * scale
    return tl.where(y > LARGEST, LARGEST, tl.where(y < -LARGEST, -LARGEST, y))


@jit
def _rows_kernel(
    X, MAXIMA, ROWS, INVERSE, numel,
    LARGEST: tl.constexpr, POWER_OF_2: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    off = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + off, mask=off < numel, other=0.0)
    scale = _scale_of(MAXIMA, LARGEST, POWER_OF_2, COUNT)
    tl.store(ROWS + off, _scaled(x, scale, LARGEST).to(ROWS.dtype.element_ty), mask=off < numel)
    if pid == 0:
        tl.store(INVERSE, tl.div_rn(tl.full([], 1.0, tl.float32), scale))


@jit
def _quarter(X, ROWS, row, col, t, k, scale, LARGEST: tl.constexpr, KEEP_ROWS: tl.constexpr):
    """Every fourth row of a tile, scaled. Behind the last row are zeros."""
    inside = (row[:, None] < t) & (col[None, :] < k)
    x = tl.load(X + row[:, None] * k + col[None, :], mask=inside, other=0.0)
    y = _scaled(x, scale, LARGEST)
    if KEEP_ROWS:
        tl.store(ROWS + row[:, None] * k + col[None, :], y.to(ROWS.dtype.element_ty), mask=inside)
    return y


@jit
def _columns_kernel(
    X, MAXIMA, ROWS, COLUMNS, INVERSE, t, k, quarters, tiles_per_row,
    LARGEST: tl.constexpr, POWER_OF_2: tl.constexpr, COUNT: tl.constexpr,
    KEEP_ROWS: tl.constexpr, PACK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of x, written as its transpose and, with KEEP_ROWS, as it is.

    COLUMNS is int32: four numbers of one column in each, which change threads together. Where single bytes change
    threads, or are put together by shifts, the compiler leaves registers undefined, and on an H200 the result had wrong
    bytes with Triton 3.6 (triton-lang/triton#11111 is of this kind). So two instructions put them together.
    """
    pid = tl.program_id(0)
    quarter = (pid // tiles_per_row).to(tl.int64) * (BLOCK_T // 4) + tl.arange(0, BLOCK_T // 4)
    col = (pid % tiles_per_row).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    scale = _scale_of(MAXIMA, LARGEST, POWER_OF_2, COUNT)
    a = _quarter(X, ROWS, quarter * 4, col, t, k, scale, LARGEST, KEEP_ROWS)
    b = _quarter(X, ROWS, quarter * 4 + 1, col, t, k, scale, LARGEST, KEEP_ROWS)
    c = _quarter(X, ROWS, quarter * 4 + 2, col, t, k, scale, LARGEST, KEEP_ROWS)
    d = _quarter(X, ROWS, quarter * 4 + 3, col, t, k, scale, LARGEST, KEEP_ROWS)
    four = _four(a, b, c, d, ROWS, PACK)
    places = COLUMNS + col[:, None] * quarters + quarter[None, :]
    tl.store(places, tl.trans(four), mask=(quarter[None, :] < quarters) & (col[:, None] < k))
    if pid == 0:
        tl.store(INVERSE, tl.div_rn(tl.full([], 1.0, tl.float32), scale))


@jit
def _four(a, b, c, d, ROWS, PACK: tl.constexpr):
    """Four numbers, rounded to the dtype of ROWS, as one word."""
    if PACK == "":  # for Triton's interpreter
        four = _byte(a, ROWS) | (_byte(b, ROWS) << 8) | (_byte(c, ROWS) << 16) | (_byte(d, ROWS) << 24)
    else:
        four = tl.inline_asm_elementwise(PACK, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    return four


@jit
def _byte(y, ROWS):
    return y.to(ROWS.dtype.element_ty).to(tl.uint8, bitcast=True).to(tl.int32)


def _packing(dtype: torch.dtype) -> str:
    """What `_four` rounds and puts together four numbers with."""
    return "" if INTERPRET else _ptx("e4m3" if dtype == E4M3 else "e5m2")


def _ptx(name: str) -> str:
    """PTX that rounds four numbers to e4m3 or e5m2, the first into the lowest byte. It keeps NaN."""
    convert = f"cvt.rn.satfinite.{name}x2.f32"
    return f"{{ .reg .b16 low, high; {convert} low, $2, $1; {convert} high, $4, $3; mov.b32 $0, {{low, high}}; }}"


def padded(rows: int) -> int:
    """The next multiple of 16."""
    return cdiv(rows, MULTIPLE) * MULTIPLE


def maxima_of(x: torch.Tensor) -> torch.Tensor:
    """(P,), int32: the bits of the maxima of |x| over P parts of a contiguous x. The largest of them is that of x."""
    if not runs_triton(x):
        return reference.float8_maxima(x)
    programs = min(PROGRAMS, next_power_of_2(cdiv(x.numel(), BLOCK)))
    maxima = torch.empty(programs, dtype=torch.int32, device=x.device)
    with _device_guard(x):
        launch(
            _maxima_kernel, (programs,), x, maxima, x.numel(), cdiv(x.numel(), BLOCK * programs), programs,
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
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
    """x in eight bits, with one scale for all of it, as it is, transposed, or both. No gradient.

    Args:
        x (`torch.Tensor`): (T, K), contiguous; bf16, fp16 or fp32.
        dtype (`torch.dtype`, *optional*): `torch.float8_e4m3fn`, the default, or `torch.float8_e5m2`.
        rows, columns (`bool`, *optional*): Which of the two results are wanted, at least one.
        power_of_2 (`bool`, *optional*, defaults to `False`): Round the scale down to a power of two.
        maxima (`torch.Tensor`, *optional*): `maxima` of an earlier cast of the same x, which saves a pass.

    Returns:
        `Float8`. Zeros stay zeros; with a NaN in `x` all is NaN, and so it is, but for zeros, with an infinity.

    Raises:
        ValueError: `x` is no contiguous matrix of these dtypes, `dtype` is another, or nothing is asked for.
    """
    if x.ndim != 2 or not x.is_contiguous() or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype} with strides {x.stride()}; expected a contiguous matrix in bfloat16, "
            "float16 or float32."
        )
    if dtype not in (E4M3, E5M2):
        raise ValueError(f"dtype is {dtype}; expected torch.float8_e4m3fn or torch.float8_e5m2.")
    if not (rows or columns):
        raise ValueError("rows and columns are both False; ask for one of them, or for both.")
    # With one row, the transpose alone of an fp32 matrix still had wrong bytes on an H200 with Triton 3.6.
    if not runs_triton(x) or (columns and x.shape[0] < MULTIPLE and not computes_nothing()):
        return Float8(*reference.float8_cast(x, dtype, rows, columns, power_of_2, maxima))
    if maxima is None:
        maxima = maxima_of(x)
    t, k = x.shape
    inverse = torch.empty((), dtype=torch.float32, device=x.device)
    as_rows = torch.empty_like(x, dtype=dtype) if rows else None
    scale = {"LARGEST": torch.finfo(dtype).max, "POWER_OF_2": power_of_2, "COUNT": maxima.shape[0]}
    with _device_guard(x):
        if not columns:
            grid = (cdiv(x.numel(), BLOCK),)
            launch(_rows_kernel, grid, x, maxima, as_rows, inverse, x.numel(), **scale, BLOCK=BLOCK, num_warps=8)
            return Float8(as_rows, None, inverse, maxima)
        as_columns = torch.empty((k, padded(t)), dtype=dtype, device=x.device)
        tiles_per_row = cdiv(k, TILE_COLUMNS)
        launch(
            _columns_kernel, (cdiv(padded(t), TILE_ROWS) * tiles_per_row,),
            x, maxima, as_columns if as_rows is None else as_rows, as_columns.view(torch.int32), inverse,
            t, k, padded(t) // 4, tiles_per_row, **scale, KEEP_ROWS=rows, PACK=_packing(dtype),
            BLOCK_T=TILE_ROWS, BLOCK_K=TILE_COLUMNS, num_warps=TILE_WARPS,
        )  # fmt: skip
    return Float8(as_rows, as_columns, inverse, maxima)


@functools.cache
def fault_of_device(device: torch.device) -> str | None:
    """Why products in eight bits cannot be computed on `device`; None where they can. A CPU computes them in fp32."""
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip:
        return f"{device} is no NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        name = torch.cuda.get_device_name(device)
        return f"{name} (compute capability {major}.{minor}) has no matrix units for fp8, which begin with 8.9"
    return None
