"""The product of two fp8 matrices with a scale for each row: y_mn = (sum_k a_mk b_nk) * s_m * s_n.

Shapes  a (M, K), b (N, K), y (M, N), with K and N multiples of 16.
Bytes   besides the product: none if the product applies the scales itself, else 2b per element of y.
"""

import functools

import torch

from ._dispatch import jit, on_cuda, tl, use_triton
from ._launch import cdiv, launch
from .sizes import computes_nothing

TILE_ROWS, TILE_COLUMNS = 32, 256


@jit(do_not_specialize=["m"])
def _scale_kernel(Y, A, B, m, n, tiles_per_row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Multiply a tile of y in place, by a for each row and by b for each column."""
    pid = tl.program_id(0)
    row = (pid // tiles_per_row).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (pid % tiles_per_row).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < m)[:, None] & (col < n)[None, :]
    places = Y + row[:, None] * n + col[None, :]
    y = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    y *= tl.load(A + row, mask=row < m, other=0.0)[:, None]
    y *= tl.load(B + col, mask=col < n, other=0.0)[None, :]
    tl.store(places, y, mask=inside)


def scale_(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply a contiguous y (M, N) in place, by a (M,) for each row and by b (N,) for each column."""
    if not use_triton(y):
        return y.copy_(y.to(torch.float32) * a.view(-1, 1) * b.view(1, -1))
    a = a.contiguous()
    b = b.contiguous()
    m, n = y.shape
    tiles_per_row = cdiv(n, TILE_COLUMNS)
    launch(
        _scale_kernel,
        (cdiv(m, TILE_ROWS) * tiles_per_row,),
        y,
        a,
        b,
        m,
        n,
        tiles_per_row,
        BLOCK_M=TILE_ROWS,
        BLOCK_N=TILE_COLUMNS,
        num_warps=8,
    )
    return y


@functools.cache
def _has_exact_sums(device: torch.device) -> bool:
    """Return whether PyTorch sends a product with row scales to cuBLAS. There exact fp32 sums are as fast as short
    ones; the CUTLASS kernel that runs elsewhere is slow with exact sums."""
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return version >= (12, 9) and torch.cuda.get_device_capability(device)[0] == 9


def row_product(
    a: torch.Tensor,
    a_inverse: torch.Tensor,
    b: torch.Tensor,
    b_inverse: torch.Tensor,
    dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    fast_sums: bool = True,
) -> torch.Tensor:
    """Return a b^T (M, N) * a_inverse (M,) * b_inverse (N,) + bias (N,) for fp8 matrices a (M, K) and b (N, K).

    `fast_sums` allows the matrix units to keep sums in registers with fewer bits than fp32. A CPU computes in fp32.
    """
    a_inverse = a_inverse.view(-1, 1)
    b_inverse = b_inverse.view(1, -1)
    if not on_cuda(a):
        y = (a.to(torch.float32) @ b.to(torch.float32).t()) * a_inverse * b_inverse
        return (y if bias is None else y + bias).to(dtype)
    # bf16 is the only result dtype that PyTorch's product with row scales supports in all versions.
    if dtype == torch.bfloat16 and (fast_sums or computes_nothing() or _has_exact_sums(a.device)):
        return torch._scaled_mm(
            a, b.t(), scale_a=a_inverse, scale_b=b_inverse, bias=bias, out_dtype=dtype, use_fast_accum=fast_sums
        )
    one = torch.ones((), dtype=torch.float32, device=a.device)
    wide = dtype if dtype == torch.bfloat16 else torch.float32
    y = torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=wide, use_fast_accum=fast_sums)
    y = scale_(y, a_inverse, b_inverse)
    return (y if bias is None else y.add_(bias)).to(dtype)
