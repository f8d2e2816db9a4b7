"""LayerNorm: y = (w + offset) * xhat + b, with xhat = (x - mean(x)) * rstd and
rstd = 1 / sqrt(mean((x - mean(x))^2) + eps). Ba, Kiros and Hinton 2016, arXiv:1607.06450.

    dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = dy * (w + offset)
    dw = sum over rows of dy * xhat,  db = sum over rows of dy

Shapes  x, y, dx (..., N), read as M rows of N; w, b (N,), both optional; mean and rstd (M,) in fp32.
Dtypes  bf16, fp16, fp32; w and b may have dtypes of their own. Arithmetic in fp32, one rounding per store, y and dx in
        the dtype of x. The variance is computed from the centred row in registers, because E[x^2] - E[x]^2 cancels.
Bytes   b per element, n = M * N. Forward reads x and writes y: 2nb. Backward reads dy and x, and writes dx: 3nb, and
        for each program an fp32 row of dw and of db, which a second pass adds up. Kept for backward: x, mean, rstd.
"""

import torch

from . import reference
from ._autograd import once_differentiable, records_graph
from ._dispatch import jit, kernel_op, runs_triton, tl
from ._launch import MAX_COLUMNS, as_rows, backward_tile, cdiv, check_norm, launch, persistent_grid, row_tile


@jit
def _shifted(w, offset, W):
    """Return w + offset in fp32, rounded to the dtype of w in between as PyTorch rounds such a sum. W is a pointer."""
    return (w.to(tl.float32) + offset).to(W.dtype.element_ty).to(tl.float32)


@jit(do_not_specialize=["m"])
def _layer_norm_fwd_kernel(
    X,
    W,
    B,
    Y,
    MEAN,
    RSTD,
    x_stride,
    m,
    n,
    eps,
    offset,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: row * n passes 2**31
    col = tl.arange(0, BLOCK_N)
    mask = (row < m)[:, None] & (col < n)[None, :]
    x = tl.load(X + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1) / n
    x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n + eps)
    y = x * rstd[:, None]
    if HAS_WEIGHT:
        y *= _shifted(tl.load(W + col, mask=col < n, other=0.0), offset, W)[None, :]
    if HAS_BIAS:
        y += tl.load(B + col, mask=col < n, other=0.0)[None, :].to(tl.float32)
    tl.store(Y + row[:, None] * n + col[None, :], y, mask=mask)
    tl.store(MEAN + row, mean, mask=row < m)
    tl.store(RSTD + row, rstd, mask=row < m)


@jit(do_not_specialize=["m", "tiles"])
def _layer_norm_bwd_kernel(
    DY,
    X,
    W,
    MEAN,
    RSTD,
    DX,
    DW,
    DB,
    dy_stride,
    x_stride,
    m,
    n,
    offset,
    tiles,
    HAS_WEIGHT: tl.constexpr,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    col = tl.arange(0, BLOCK_N)
    if HAS_WEIGHT:
        w = _shifted(tl.load(W + col, mask=col < n, other=0.0), offset, W)[None, :]
    dw = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    db = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in tl.range(pid, tiles, tl.num_programs(0), num_stages=STAGES):
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (row < m)[:, None] & (col < n)[None, :]
        x = tl.load(X + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + row[:, None] * dy_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(MEAN + row, mask=row < m, other=0.0)[:, None]
        rstd = tl.load(RSTD + row, mask=row < m, other=0.0)[:, None]
        xhat = (x - mean) * rstd  # xhat is not 0 in masked columns, but dy is
        if NEED_DW:
            dw += dy * xhat
        if NEED_DB:
            db += dy
        if HAS_WEIGHT:
            dy *= w
        dx = (dy - (tl.sum(dy, axis=1) / n)[:, None] - xhat * (tl.sum(dy * xhat, axis=1) / n)[:, None]) * rstd
        tl.store(DX + row[:, None] * n + col[None, :], dx, mask=mask)
    partial = pid.to(tl.int64) * n + col
    if NEED_DW:
        tl.store(DW + partial, tl.sum(dw, axis=0), mask=col < n)
    if NEED_DB:
        tl.store(DB + partial, tl.sum(db, axis=0), mask=col < n)


@kernel_op("layer_norm_fwd")
def _forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = as_rows(x)
    m, n = rows.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(m, dtype=torch.float32, device=x.device) for _ in range(2))
    block_m, block_n, num_warps = row_tile(n)
    w, b = (rows if p is None else p.contiguous() for p in (weight, bias))
    launch(
        _layer_norm_fwd_kernel,
        (cdiv(m, block_m),),
        rows,
        w,
        b,
        y,
        mean,
        rstd,
        rows.stride(0),
        m,
        n,
        eps,
        offset,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
    )
    return y, mean, rstd


@_forward.register_fake
def _(x, weight, bias, eps, offset):
    m = x.numel() // x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, x.new_empty(m, dtype=torch.float32), x.new_empty(m, dtype=torch.float32)


@kernel_op("layer_norm_bwd")
def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    offset: float,
    need_dw: bool,
    need_db: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dx, dw, db). dw and db are fp32, and empty if they are not needed."""
    rows, dy_rows = as_rows(x), as_rows(dy)
    m, n = rows.shape
    block_m, block_n, num_warps, stages = backward_tile(n, x.device, rows, dy_rows)
    tiles = cdiv(m, block_m)
    programs = persistent_grid(tiles, x.device)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = torch.empty((programs, n) if need_dw else (0,), dtype=torch.float32, device=x.device)
    db = torch.empty((programs, n) if need_db else (0,), dtype=torch.float32, device=x.device)
    launch(
        _layer_norm_bwd_kernel,
        (programs,),
        dy_rows,
        rows,
        rows if weight is None else weight.contiguous(),
        mean,
        rstd,
        dx,
        dw,
        db,
        dy_rows.stride(0),
        rows.stride(0),
        m,
        n,
        offset,
        tiles,
        HAS_WEIGHT=weight is not None,
        NEED_DW=need_dw,
        NEED_DB=need_db,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=stages,
        num_warps=num_warps,
    )
    dw = dw.sum(0) if need_dw else dw
    db = db.sum(0) if need_db else db
    return dx, dw, db


@_backward.register_fake
def _(dy, x, weight, mean, rstd, offset, need_dw, need_db):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw, db = (rstd.new_empty(x.shape[-1] if need else 0) for need in (need_dw, need_db))
    return dx, dw, db


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, offset):
        y, mean, rstd = _forward(x, weight, bias, eps, offset)
        ctx.offset = offset
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        _, need_dw, need_db, *_ = ctx.needs_input_grad
        dx, dw, db = _backward(dy, x, weight, mean, rstd, ctx.offset, need_dw, need_db)
        dw = dw.to(weight.dtype) if need_dw else None
        db = db.to(ctx.bias_dtype) if need_db else None
        return dx, dw, db, None, None


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, *, offset: float = 0.0
) -> torch.Tensor:
    """Compute (weight + offset) * (x - mean(x)) / sqrt(var(x) + eps) + bias over the last dimension, differentiable in
    x, weight and bias.

    All arithmetic is in fp32, with one rounding to x.dtype at the end; weight + offset is also rounded to the dtype of
    the weight. This equals `nn.LayerNorm` for equal dtypes and, with `bias=None`, `CohereLayerNorm` for any weight
    dtype. Under autocast `F.layer_norm` returns fp32; pass `x.float()` for that.

    Args:
        x (`torch.Tensor`): (..., N), any strides; bf16, fp16 or fp32. The PyTorch twin computes float64 and N > 65536.
        weight (`torch.Tensor` or `None`): (N,), on the device of `x`, of any floating dtype. `None`: no factor.
        bias (`torch.Tensor` or `None`): The same. `None`: nothing is added.
        eps (`float`): Added to the variance (the one divided by N).
        offset (`float`, *optional*, defaults to 0.0): Added to `weight`; 1.0 where weights are stored around zero, as
            in Nemotron.

    Returns:
        `torch.Tensor`, contiguous, of the shape and dtype of `x`.

    Raises:
        ValueError: `weight` or `bias` is not (N,) or on another device, or `offset` is given without a weight.
    """
    check_norm(x, weight=weight, bias=bias)
    if weight is None and offset != 0:
        raise ValueError(f"offset is {offset}, but weight is None: there is nothing to add it to. Leave offset at 0.")
    if x.shape[-1] > MAX_COLUMNS or not runs_triton(x, weight, bias):
        return reference.layer_norm(x, weight, bias, eps, offset=offset)
    if not records_graph():
        return _forward(x, weight, bias, float(eps), float(offset))[0]
    return _LayerNorm.apply(x, weight, bias, float(eps), float(offset))
