"""A residual addition and the RMSNorm after it, in one pass: s = x + residual, y = rms_norm(s). Both are results.

    ds = (gradient of s from its other uses) + (gradient through the norm, see rms_norm.py);  dx = dresidual = ds

Shapes  x, residual, s, y (..., N), read as M rows of N; weight (N,); rstd (M,) in fp32.
Dtypes  bf16, fp16, fp32. s is rounded to the common dtype of x and residual, and the norm reads the rounded s, as two
        separate steps would. What follows is as in rms_norm.py.
Bytes   b per element, n = M * N. Forward reads x and residual, and writes s and y: 4nb (two steps: 5nb). Backward reads
        dy, ds and s, and writes dx: 4nb (two steps: 6nb). Kept for backward: s, rstd.
"""

import torch

from . import reference
from ._dispatch import jit, kernel_op, once_differentiable, tl
from ._launch import MAX_COLUMNS, as_rows, cdiv, launch, row_tile, runs_triton
from .rms_norm import check_rms_norm, norm_dtype, normed, rms_norm_backward, scale_row


@jit
def _add_rms_norm_fwd_kernel(
    X, RESIDUAL, W, S, Y, RSTD, x_stride, residual_stride, m, n, eps, offset,
    HAS_WEIGHT: tl.constexpr, CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: row * n passes 2**31
    col = tl.arange(0, BLOCK_N)
    mask = (row < m)[:, None] & (col < n)[None, :]
    w = tl.zeros([1, BLOCK_N], tl.float32)
    if HAS_WEIGHT:
        w = tl.load(W + col, mask=col < n, other=0.0)[None, :]
    x = tl.load(X + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(RESIDUAL + row[:, None] * residual_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    rounded = (x + residual).to(S.dtype.element_ty)
    s = rounded.to(tl.float32)
    tl.store(S + row[:, None] * n + col[None, :], rounded, mask=mask)
    rstd = tl.rsqrt(tl.sum(s * s, axis=1) / n + eps)
    y = scale_row(normed(s, rstd[:, None], S, CAST), w, offset, S, W, HAS_WEIGHT, CAST)
    tl.store(Y + row[:, None] * n + col[None, :], y, mask=mask)
    tl.store(RSTD + row, rstd, mask=row < m)


@kernel_op("add_rms_norm_fwd")
def _forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, cast: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x_rows, residual_rows = as_rows(x), as_rows(residual)
    m, n = x_rows.shape
    s = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    y = torch.empty(x.shape, dtype=norm_dtype(s, weight, cast), device=x.device)
    rstd = torch.empty(m, dtype=torch.float32, device=x.device)
    block_m, block_n, num_warps = row_tile(n)
    launch(
        _add_rms_norm_fwd_kernel, (cdiv(m, block_m),),
        x_rows, residual_rows, s if weight is None else weight.contiguous(), s, y, rstd,
        x_rows.stride(0), residual_rows.stride(0), m, n, eps, offset,
        HAS_WEIGHT=weight is not None, CAST=cast, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps,
    )  # fmt: skip
    return y, s, rstd


@_forward.register_fake
def _(x, residual, weight, eps, offset, cast):
    s = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    y = torch.empty(x.shape, dtype=norm_dtype(s, weight, cast), device=x.device)
    return y, s, x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset, cast):
        y, s, rstd = _forward(x, residual, weight, eps, offset, cast)
        ctx.save_for_backward(s, weight, rstd)
        ctx.offset, ctx.dtypes = offset, (x.dtype, residual.dtype)
        return y, s

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, ds):
        s, weight, rstd = ctx.saved_tensors
        ds, dw = rms_norm_backward(dy, ds, s, weight, rstd, ctx.offset, ctx.needs_input_grad[2])
        dx, dresidual = (ds.to(dtype) for dtype in ctx.dtypes)
        return dx, dresidual, dw if ctx.needs_input_grad[2] else None, None, None, None


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, *, offset: float = 0.0,
    cast: str = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(rms_norm(x + residual, weight, eps), x + residual), both differentiable in x, residual and weight.

    Args:
        x (`torch.Tensor`): (..., N), any strides; bf16, fp16 or fp32. The PyTorch twin computes float64 and N > 65536.
        residual (`torch.Tensor`): Shape and device of `x`.
        weight, eps, offset, cast: As in `rms_norm`, where "x.dtype" is now the dtype of the sum.

    Returns:
        `tuple` of two contiguous `torch.Tensor` of the shape of `x`: the norm, with the dtype that `rms_norm` gives it,
        and the sum, in the common dtype of `x` and `residual`.

    Raises:
        ValueError: `residual` has another shape or device than `x` (nothing is broadcast), or as `rms_norm`.
    """
    check_rms_norm(x, weight, offset, cast)
    if residual.shape != x.shape or residual.device != x.device or not residual.is_floating_point():
        raise ValueError(
            f"residual is {tuple(residual.shape)} {residual.dtype} on {residual.device}, x {tuple(x.shape)} {x.dtype} "
            f"on {x.device}; expected floating-point tensors of one shape on one device."
        )
    if x.shape[-1] > MAX_COLUMNS or not runs_triton(x, residual, weight):
        return reference.add_rms_norm(x, residual, weight, eps, offset=offset, cast=cast)
    return _AddRMSNorm.apply(x, residual, weight, float(eps), float(offset), cast)
