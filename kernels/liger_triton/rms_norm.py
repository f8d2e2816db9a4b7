"""RMSNorm: y = (w + offset) * xhat, with xhat = x * rstd and rstd = 1 / sqrt(mean(x^2) + eps). Zhang and Sennrich 2019,
arXiv:1910.07467. And a residual addition before it in the same pass: s = x + residual, y = rms_norm(s).

    dx = rstd * (g - xhat * mean(g * xhat)),  g = dy * (w + offset)
    dw = sum over rows of dy * xhat
    with a residual: dx = dresidual = (gradient of s from its other uses) + (gradient through the norm)

Shapes  x, residual, s, y, dx (..., N), read as M rows of N; w, dw (N,); rstd (M,) in fp32.
Dtypes  bf16, fp16, fp32; w may have a dtype of its own. Arithmetic in fp32, with the roundings that `cast` names. s is
        rounded to the common dtype of x and residual, and the norm reads the rounded s, as two separate steps would.
        Gradients are those of the formula without roundings, rounded once, to the dtype of x and of w.
Bytes   b per element, n = M * N. Forward reads x and writes y: 2nb. Backward reads dy and x, and writes dx: 3nb, and
        for each program an fp32 row of dw, which a second pass adds up. There are no atomics, so that equal inputs give
        equal bits. Kept for backward: x, rstd. With a residual 4nb each (two steps: 5nb and 6nb). Kept: s, rstd.
"""

import torch

from . import reference
from ._autograd import once_differentiable, records_graph
from ._dispatch import jit, kernel_op, runs_triton, tl
from ._launch import MAX_COLUMNS, as_rows, backward_tile, cdiv, check_norm, launch, persistent_grid, row_tile

CASTS = ("llama", "gemma", "none", "rstd")


@jit
def _rms_norm_fwd_kernel(
    X, RESIDUAL, W, S, Y, RSTD, x_stride, residual_stride, m, n, eps, offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, CAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Without a residual, S is X and gives the dtype of what is normed."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: row * n passes 2**31
    col = tl.arange(0, BLOCK_N)
    mask = (row < m)[:, None] & (col < n)[None, :]
    w = tl.zeros([1, BLOCK_N], tl.float32)
    if HAS_WEIGHT:
        w = tl.load(W + col, mask=col < n, other=0.0)[None, :]
    x = tl.load(X + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        r = tl.load(RESIDUAL + row[:, None] * residual_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        rounded = (x + r).to(S.dtype.element_ty)
        x = rounded.to(tl.float32)
        tl.store(S + row[:, None] * n + col[None, :], rounded, mask=mask)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n + eps)
    if CAST == "rstd":
        y = x * rstd[:, None].to(S.dtype.element_ty).to(tl.float32)
    else:
        y = x * rstd[:, None]
    if CAST == "llama" or CAST == "rstd":
        y = y.to(S.dtype.element_ty).to(tl.float32)
    if HAS_WEIGHT:
        w = w.to(tl.float32) + offset
        if CAST == "llama" or CAST == "rstd":
            w = w.to(W.dtype.element_ty).to(tl.float32)
        y *= w
    tl.store(Y + row[:, None] * n + col[None, :], y, mask=mask)
    tl.store(RSTD + row, rstd, mask=row < m)


@jit
def _rms_norm_bwd_kernel(
    DY, DSUM, X, W, RSTD, DX, DW, dy_stride, dsum_stride, x_stride, m, n, offset, tiles,
    HAS_WEIGHT: tl.constexpr, HAS_DSUM: tl.constexpr, NEED_DW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    col = tl.arange(0, BLOCK_N)
    if HAS_WEIGHT:
        w = tl.load(W + col, mask=col < n, other=0.0)[None, :].to(tl.float32) + offset
    dw = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in tl.range(pid, tiles, tl.num_programs(0), num_stages=STAGES):
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (row < m)[:, None] & (col < n)[None, :]
        x = tl.load(X + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + row[:, None] * dy_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row, mask=row < m, other=0.0)[:, None]
        xhat = x * rstd
        if NEED_DW:
            dw += dy * xhat
        if HAS_WEIGHT:
            dy *= w
        dx = (dy - xhat * (tl.sum(dy * xhat, axis=1) / n)[:, None]) * rstd
        if HAS_DSUM:
            dx += tl.load(DSUM + row[:, None] * dsum_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(DX + row[:, None] * n + col[None, :], dx, mask=mask)
    if NEED_DW:
        tl.store(DW + pid.to(tl.int64) * n + col, tl.sum(dw, axis=0), mask=col < n)


def norm_dtype(x: torch.Tensor, weight: torch.Tensor | None, cast: str) -> torch.dtype:
    """The dtype of y: that of x, except where `cast` lets a wider weight widen it."""
    return x.dtype if weight is None or cast == "gemma" else torch.promote_types(x.dtype, weight.dtype)


def _launch_forward(x, residual, weight, s, y, rstd, eps, offset, cast) -> None:
    rows = as_rows(x)
    others = rows if residual is None else as_rows(residual)
    m, n = rows.shape
    block_m, block_n, num_warps = row_tile(n)
    launch(
        _rms_norm_fwd_kernel, (cdiv(m, block_m),),
        rows, others, rows if weight is None else weight.contiguous(), rows if s is None else s, y, rstd,
        rows.stride(0), others.stride(0), m, n, eps, offset, HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None, CAST=cast, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps,
    )  # fmt: skip


def _made_of_norm(x: torch.Tensor, weight: torch.Tensor | None, cast: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for y and rstd."""
    y = torch.empty(x.shape, dtype=norm_dtype(x, weight, cast), device=x.device)
    return y, torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)


def _sum_of(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Memory for s."""
    return torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)


@kernel_op("rms_norm_fwd")
def _forward(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, cast: str
) -> tuple[torch.Tensor, torch.Tensor]:
    y, rstd = _made_of_norm(x, weight, cast)
    _launch_forward(x, None, weight, None, y, rstd, eps, offset, cast)
    return y, rstd


@_forward.register_fake
def _(x, weight, eps, offset, cast):
    return _made_of_norm(x, weight, cast)


@kernel_op("add_rms_norm_fwd")
def _add_forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, cast: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    s = _sum_of(x, residual)
    y, rstd = _made_of_norm(s, weight, cast)
    _launch_forward(x, residual, weight, s, y, rstd, eps, offset, cast)
    return y, s, rstd


@_add_forward.register_fake
def _(x, residual, weight, eps, offset, cast):
    s = _sum_of(x, residual)
    y, rstd = _made_of_norm(s, weight, cast)
    return y, s, rstd


@kernel_op("rms_norm_bwd")
def _backward(
    dy: torch.Tensor, dsum: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor,
    offset: float, need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dx, dw). dsum, of the shape of x, is added to dx before its rounding. dw is empty unless need_dw."""
    rows, dy_rows = as_rows(x), as_rows(dy)
    dsum_rows = dy_rows if dsum is None else as_rows(dsum)
    m, n = rows.shape
    loaded = (rows, dy_rows) if dsum is None else (rows, dy_rows, dsum_rows)
    block_m, block_n, num_warps, stages = backward_tile(n, x.device, *loaded)
    tiles = cdiv(m, block_m)
    programs = persistent_grid(tiles, x.device)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = torch.empty((programs, n) if need_dw else (0,), dtype=torch.float32, device=x.device)
    launch(
        _rms_norm_bwd_kernel, (programs,),
        dy_rows, dsum_rows, rows, rows if weight is None else weight.contiguous(), rstd, dx, dw,
        dy_rows.stride(0), dsum_rows.stride(0), rows.stride(0), m, n, offset, tiles,
        HAS_WEIGHT=weight is not None, HAS_DSUM=dsum is not None, NEED_DW=need_dw, BLOCK_M=block_m, BLOCK_N=block_n,
        STAGES=stages, num_warps=num_warps,
    )  # fmt: skip
    return dx, dw.sum(0).to(weight.dtype) if need_dw else dw


@_backward.register_fake
def _(dy, dsum, x, weight, rstd, offset, need_dw):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return dx, torch.empty_like(weight, memory_format=torch.contiguous_format) if need_dw else rstd.new_empty(0)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, cast):
        y, rstd = _forward(x, weight, eps, offset, cast)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        dx, dw = _backward(dy, None, x, weight, rstd, ctx.offset, ctx.needs_input_grad[1])
        return dx, dw if ctx.needs_input_grad[1] else None, None, None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset, cast):
        y, s, rstd = _add_forward(x, residual, weight, eps, offset, cast)
        ctx.save_for_backward(s, weight, rstd)
        ctx.offset, ctx.dtypes = offset, (x.dtype, residual.dtype)
        return y, s

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, ds):
        s, weight, rstd = ctx.saved_tensors
        ds, dw = _backward(dy, ds, s, weight, rstd, ctx.offset, ctx.needs_input_grad[2])
        dx, dresidual = (ds.to(dtype) for dtype in ctx.dtypes)
        return dx, dresidual, dw if ctx.needs_input_grad[2] else None, None, None, None


def _check(x: torch.Tensor, weight: torch.Tensor | None, offset: float, cast: str) -> None:
    """ValueError on what `rms_norm` does not take."""
    check_norm(x, weight=weight)
    if cast not in CASTS:
        raise ValueError(f"cast is {cast!r}; expected one of {', '.join(map(repr, CASTS))}.")
    if weight is None and offset != 0:
        raise ValueError(f"offset is {offset}, but weight is None: there is nothing to add it to. Leave offset at 0.")


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, offset: float = 0.0, cast: str = "llama"
) -> torch.Tensor:
    """(weight + offset) * x / sqrt(mean(x^2) + eps) over the last dimension, differentiable in x and weight.

    `cast` says where the result of the fp32 arithmetic is rounded; x̂ is x / sqrt(mean(x^2) + eps) in fp32:

    - `"llama"`: (weight + offset) * round(x̂ to x.dtype). Sum and product are rounded as PyTorch does for those dtypes,
      so that an fp32 weight gives an fp32 result. This is the form of `LlamaRMSNorm` and most others.
    - `"gemma"`: round((weight + offset) * x̂ to x.dtype), with all arithmetic in fp32. This is the form of
      `Gemma2RMSNorm` (offset 1) and `GptOssRMSNorm` (offset 0).
    - `"none"`: round((weight + offset) * x̂ to the common dtype of weight and x), with all arithmetic in fp32. It is for
      a norm that was written without any cast; that one rounds after each of its steps, while here there is one
      rounding at the end.

    Args:
        x (`torch.Tensor`): (..., N), any strides; bf16, fp16 or fp32. The PyTorch twin computes float64 and N > 65536.
        weight (`torch.Tensor` or `None`): (N,), on the device of `x`, of any floating dtype. `None`: no factor.
        eps (`float`): Added to the mean of the squares.
        offset (`float`, *optional*, defaults to 0.0): Added to `weight`; 1.0 where weights are stored around zero.
        cast (`str`, *optional*, defaults to `"llama"`): `"llama"`, `"gemma"`, `"none"` or `"rstd"`.

    Returns:
        `torch.Tensor`, contiguous, of the shape of `x`. Dtype: that of `x` for `"gemma"` and without a weight, else the
        common dtype of `x` and `weight`.

    Raises:
        ValueError: `weight` is not (N,) or on another device, `cast` is unknown, or `offset` is given without a weight.
    """
    _check(x, weight, offset, cast)
    if x.shape[-1] > MAX_COLUMNS or not runs_triton(x, weight):
        return reference.rms_norm(x, weight, eps, offset=offset, cast=cast)
    if not records_graph():
        return _forward(x, weight, float(eps), float(offset), cast)[0]
    return _RMSNorm.apply(x, weight, float(eps), float(offset), cast)


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
    _check(x, weight, offset, cast)
    if residual.shape != x.shape or residual.device != x.device or not residual.is_floating_point():
        raise ValueError(
            f"residual is {tuple(residual.shape)} {residual.dtype} on {residual.device}, x {tuple(x.shape)} {x.dtype} "
            f"on {x.device}; expected floating-point tensors of one shape on one device."
        )
    if x.shape[-1] > MAX_COLUMNS or not runs_triton(x, residual, weight):
        return reference.add_rms_norm(x, residual, weight, eps, offset=offset, cast=cast)
    return _AddRMSNorm.apply(x, residual, weight, float(eps), float(offset), cast)
