"""RMSNorm: y = (w + offset) * xhat, with xhat = x * rstd and rstd = 1 / sqrt(mean(x^2) + eps). Zhang and Sennrich 2019,
arXiv:1910.07467. The same pass can add a residual first, or apply a gate z before or after the norm:

    norm        n = (w + offset) * xhat          dx = B(dy), with B(d) = rstd * (g - xhat * mean(g * xhat)) and
                                                 g = d * (w + offset);  dw = sum over rows of d * xhat
    residual    s = x + residual, norm of s      dx = dresidual = (gradient of s from its other uses) + B(dy)
    gate last   y = n * a(z)                     dn = dy * a(z),  dz = dy * n * a'(z),  dx = B(dn)
    gate first  norm of h = x * a(z)             dh = B(dy),  dx = dh * a(z),  dz = dh * x * a'(z)

    a(z) is silu(z) = z * s or sigmoid(z) = s, with a'(z) = s * (1 + z * (1 - s)) or s * (1 - s),  s = sigmoid(z)

Gate last: Qwen3-Next, Qwen3.5, OLMo hybrid (silu), Kimi Linear (sigmoid). Gate first: Mamba 2 (Dao and Gu 2024,
arXiv:2405.21060) and its hybrids.

Shapes  x, residual, z, s, y and their gradients (..., N), read as M rows of N; w, dw (N,). With a gate, a mean may
        cover only the N / group columns of a group. A program takes one group of some rows; the second grid index is
        the group. rstd (groups * M,) in fp32.
Dtypes  bf16, fp16, fp32; w and z may have dtypes of their own. Arithmetic in fp32, rounded where `cast` says. s is
        rounded to the common dtype of x and residual, and the norm reads the rounded s, as in two separate steps.
        Gradients follow the formula without roundings and are rounded once.
Bytes   b per element, n = M * N. Forward reads x and writes y: 2nb. Backward reads dy and x, and writes dx: 3nb, and
        for each program an fp32 row of dw, which a second pass adds up. No sum is atomic, so equal inputs give
        equal bits. Kept for backward: x, rstd. With a residual 4nb each (two steps: 5nb and 6nb). Kept: s, rstd. With a
        gate 3nb (eager about 14nb) and 5nb. Kept: x, z, rstd.
"""

import torch

from . import reference
from ._autograd import once_differentiable, records_graph
from ._dispatch import jit, kernel_op, runs_triton, tl
from ._launch import MAX_COLUMNS, as_rows, backward_tile, cdiv, check_norm, launch, not_among, persistent_grid, row_tile

CASTS = ("llama", "gemma", "none", "rstd")
ACTIVATIONS = ("silu", "sigmoid")
GATED_CASTS = ("llama", "gemma")
MAX_GROUPS = 65535  # CUDA's limit on the second dimension of a grid
# The role of the kernels' second input, as a constant of the kernel.
RESIDUAL = "residual"
GATE_FIRST = "gate first"
GATE_LAST = "gate last"


@jit
def _act(z, SILU: tl.constexpr):
    """Return (a(z), a'(z))."""
    s = tl.sigmoid(z)
    if SILU:
        return z * s, s * (1.0 + z * (1.0 - s))
    else:
        return s, s * (1.0 - s)


@jit(do_not_specialize=["m"])
def _rms_norm_fwd_kernel(
    X,
    OTHER,
    W,
    S,
    Y,
    RSTD,
    x_stride,
    other_stride,
    y_stride,
    m,
    n,
    eps,
    offset,
    ROLE: tl.constexpr,
    SILU: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CAST: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store y, rstd and, with a residual, s. ROLE says what OTHER is. Without a residual, S is X."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: row * n passes 2**31
    inside = tl.arange(0, BLOCK_N)
    col = inside
    if GROUPED:
        col += tl.program_id(1) * n
        RSTD += tl.program_id(1).to(tl.int64) * m
    mask = (row < m)[:, None] & (inside < n)[None, :]
    w = tl.zeros([1, BLOCK_N], tl.float32)
    if HAS_WEIGHT:
        w = tl.load(W + col, mask=inside < n, other=0.0)[None, :]
    x = tl.load(X + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROLE != "":
        other = tl.load(OTHER + row[:, None] * other_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROLE == "residual":
        rounded = (x + other).to(S.dtype.element_ty)
        x = rounded.to(tl.float32)
        tl.store(S + row[:, None] * y_stride + col[None, :], rounded, mask=mask)
    elif ROLE != "":
        a, _ = _act(other, SILU)
        if ROLE == "gate first":
            x *= a
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
    if ROLE == "gate last":
        if CAST == "llama" and S.dtype.element_ty == W.dtype.element_ty:  # else the product is in fp32
            y = y.to(S.dtype.element_ty).to(tl.float32)
        y *= a
    tl.store(Y + row[:, None] * y_stride + col[None, :], y, mask=mask)
    tl.store(RSTD + row, rstd, mask=row < m)


@jit(do_not_specialize=["m", "tiles"])
def _rms_norm_bwd_kernel(
    DY,
    X,
    OTHER,
    W,
    RSTD,
    DX,
    DGATE,
    DW,
    dy_stride,
    x_stride,
    other_stride,
    d_stride,
    m,
    n,
    offset,
    tiles,
    ROLE: tl.constexpr,
    SILU: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEED_DW: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Store dx, dw and, with a gate, dgate. OTHER is the gate, or the gradient of the sum from its other uses."""
    pid = tl.program_id(0)
    inside = tl.arange(0, BLOCK_N)
    col = inside
    if GROUPED:
        col += tl.program_id(1) * n
        RSTD += tl.program_id(1).to(tl.int64) * m
    if HAS_WEIGHT:
        w = tl.load(W + col, mask=inside < n, other=0.0)[None, :].to(tl.float32) + offset
    dw = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in tl.range(pid, tiles, tl.num_programs(0), num_stages=STAGES):
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (row < m)[:, None] & (inside < n)[None, :]
        x = tl.load(X + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        d = tl.load(DY + row[:, None] * dy_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row, mask=row < m, other=0.0)[:, None]
        if ROLE == "gate first" or ROLE == "gate last":
            z = tl.load(OTHER + row[:, None] * other_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
            a, slope = _act(z, SILU)
        if ROLE == "gate first":
            xhat = x * a * rstd
        else:
            xhat = x * rstd
        if ROLE == "gate last":
            tl.store(DGATE + row[:, None] * d_stride + col[None, :], d * w * xhat * slope, mask=mask)
            d *= a
        if NEED_DW:
            dw += d * xhat
        if HAS_WEIGHT:
            d *= w
        d = (d - xhat * (tl.sum(d * xhat, axis=1) / n)[:, None]) * rstd
        if ROLE == "gate first":
            tl.store(DGATE + row[:, None] * d_stride + col[None, :], d * x * slope, mask=mask)
            d *= a
        if ROLE == "residual":
            d += tl.load(OTHER + row[:, None] * other_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(DX + row[:, None] * d_stride + col[None, :], d, mask=mask)
    if NEED_DW:
        tl.store(DW + pid.to(tl.int64) * d_stride + col, tl.sum(dw, axis=0), mask=inside < n)


def _memory(x: torch.Tensor, weight: torch.Tensor | None, cast: str, group: int, role: str = ""):
    """Allocate y and rstd. y has the dtype of x, unless `cast` lets a wider weight widen it."""
    narrow = weight is None or cast == "gemma" or role == GATE_LAST
    dtype = x.dtype if narrow else torch.promote_types(x.dtype, weight.dtype)
    rstd = torch.empty(x.numel() // group, dtype=torch.float32, device=x.device)
    return torch.empty(x.shape, dtype=dtype, device=x.device), rstd


def _memory_with_sum(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, cast: str):
    """Allocate y, s and rstd."""
    s = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    y, rstd = _memory(s, weight, cast, x.shape[-1])
    return y, s, rstd


def _launch_forward(x, other, role, activation, weight, s, y, rstd, eps, offset, cast, group) -> None:
    rows = as_rows(x)
    others = rows if other is None else as_rows(other)
    m, width = rows.shape
    block_m, block_n, num_warps = row_tile(group)
    launch(
        _rms_norm_fwd_kernel,
        (cdiv(m, block_m), width // group),
        rows,
        others,
        rows if weight is None else weight.contiguous(),
        rows if s is None else s,
        y,
        rstd,
        rows.stride(0),
        others.stride(0),
        width,
        m,
        group,
        eps,
        offset,
        ROLE=role,
        SILU=activation == "silu",
        HAS_WEIGHT=weight is not None,
        CAST=cast,
        GROUPED=group < width,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
    )


@kernel_op("rms_norm_fwd")
def _forward(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    cast: str,
    role: str,
    activation: str,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    y, rstd = _memory(x, weight, cast, group, role)
    _launch_forward(x, gate, role, activation, weight, None, y, rstd, eps, offset, cast, group)
    return y, rstd


@_forward.register_fake
def _(x, gate, weight, eps, offset, cast, role, activation, group):
    return _memory(x, weight, cast, group, role)


@kernel_op("add_rms_norm_fwd")
def _add_forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, cast: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, s, rstd = _memory_with_sum(x, residual, weight, cast)
    _launch_forward(x, residual, RESIDUAL, "", weight, s, y, rstd, eps, offset, cast, x.shape[-1])
    return y, s, rstd


@_add_forward.register_fake
def _(x, residual, weight, eps, offset, cast):
    return _memory_with_sum(x, residual, weight, cast)


def _gradients(x: torch.Tensor, other: torch.Tensor | None, role: str) -> list[torch.Tensor]:
    """Allocate dx and, with a gate, dgate."""
    wanted = (x, other) if role in (GATE_FIRST, GATE_LAST) else (x,)
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in wanted]


@kernel_op("rms_norm_bwd")
def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    other: torch.Tensor | None,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    role: str,
    activation: str,
    group: int,
    need_dw: bool,
) -> list[torch.Tensor]:
    """Return dx, with a gate dgate, and with need_dw dw."""
    rows, dy_rows = as_rows(x), as_rows(dy)
    others = rows if other is None else as_rows(other)
    m, width = rows.shape
    groups = width // group
    loaded = (rows, dy_rows) if other is None else (rows, dy_rows, others)
    block_m, block_n, num_warps, stages = backward_tile(group, x.device, *loaded)
    tiles = cdiv(m, block_m)
    programs = max(1, persistent_grid(tiles * groups, x.device) // groups)
    found = _gradients(x, other, role)
    dw = torch.empty((programs, width), dtype=torch.float32, device=x.device) if need_dw else rstd
    launch(
        _rms_norm_bwd_kernel,
        (programs, groups),
        dy_rows,
        rows,
        others,
        rows if weight is None else weight.contiguous(),
        rstd,
        found[0],
        found[-1],
        dw,
        dy_rows.stride(0),
        rows.stride(0),
        others.stride(0),
        width,
        m,
        group,
        offset,
        tiles,
        ROLE=role,
        SILU=activation == "silu",
        HAS_WEIGHT=weight is not None,
        NEED_DW=need_dw,
        GROUPED=group < width,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=stages,
        num_warps=num_warps,
    )
    return [*found, dw.sum(0).to(weight.dtype)] if need_dw else found


@_backward.register_fake
def _(dy, x, other, weight, rstd, offset, role, activation, group, need_dw):
    dw = [torch.empty_like(weight, memory_format=torch.contiguous_format)] if need_dw else []
    return [*_gradients(x, other, role), *dw]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, options):
        y, rstd = _forward(x, gate, weight, *options)
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.options = options
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        need_dw = ctx.needs_input_grad[2]
        _, offset, _, *role_and_groups = ctx.options
        saved = ctx.saved_tensors
        found = _backward(dy, *saved, offset, *role_and_groups, need_dw)
        has_gate = saved[1] is not None
        return found[0], found[1] if has_gate else None, found[-1] if need_dw else None, None


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
        need_dw = ctx.needs_input_grad[2]
        ds, *dw = _backward(dy, s, ds, weight, rstd, ctx.offset, RESIDUAL, "", s.shape[-1], need_dw)
        dx, dresidual = (ds.to(dtype) for dtype in ctx.dtypes)
        return dx, dresidual, dw[0] if need_dw else None, None, None, None


def _check(x: torch.Tensor, weight: torch.Tensor | None, offset: float, cast: str) -> None:
    """Raise ValueError for arguments that `rms_norm` does not take."""
    check_norm(x, weight=weight)
    if cast not in CASTS:
        raise not_among("cast", cast, CASTS)
    if weight is None and offset != 0:
        raise ValueError(f"offset is {offset}, but weight is None: there is nothing to add it to. Leave offset at 0.")


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, offset: float = 0.0, cast: str = "llama"
) -> torch.Tensor:
    """Compute (weight + offset) * x / sqrt(mean(x^2) + eps) over the last dimension, differentiable in x and weight.

    `cast` says where the fp32 result is rounded; x̂ is x / sqrt(mean(x^2) + eps) in fp32:

    - `"llama"`: (weight + offset) * round(x̂ to x.dtype). Sum and product are rounded as PyTorch does for those dtypes,
      so that an fp32 weight gives an fp32 result. This is the form of `LlamaRMSNorm` and most others.
    - `"gemma"`: round((weight + offset) * x̂ to x.dtype), with all arithmetic in fp32. This is the form of
      `Gemma2RMSNorm` (offset 1) and `GptOssRMSNorm` (offset 0).
    - `"none"`: round((weight + offset) * x̂ to the common dtype of weight and x), with all arithmetic in fp32. It is
      for norms written without any cast. Such a norm rounds after each step; this one rounds once at the end.
    - `"rstd"`: as `"llama"`, but 1 / sqrt(mean(x^2) + eps) is rounded to x.dtype too, before x is multiplied by it.

    Args:
        x (`torch.Tensor`): (..., N), any strides; bf16, fp16 or fp32. The PyTorch twin computes float64 and N > 65536.
        weight (`torch.Tensor` or `None`): (N,), on the device of `x`, of any floating dtype. `None`: no factor.
        eps (`float`): Added to the mean of the squares.
        offset (`float`, *optional*, defaults to 0.0): Added to `weight`; 1.0 where weights are stored around zero.
        cast (`str`, *optional*, defaults to `"llama"`): `"llama"`, `"gemma"`, `"none"` or `"rstd"`.

    Returns:
        `torch.Tensor` of the shape of `x`, contiguous, or transposed like the heads (B, H, S, N) of a projection. Dtype
        of `x` for `"gemma"` and without a weight, else the common dtype of `x` and `weight`.

    Raises:
        ValueError: `weight` is not (N,) or on another device, `cast` is unknown, or `offset` is given without a weight.
    """
    _check(x, weight, offset, cast)
    if x.shape[-1] > MAX_COLUMNS or not runs_triton(x, weight):
        return reference.rms_norm(x, weight, eps, offset=offset, cast=cast)
    # Gemma 3 transposes its heads before it norms queries and keys. Copying them took 20 of 520 ms a step, and a norm
    # may take its rows in any order.
    if x.ndim == 4 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous():
        return rms_norm(x.transpose(1, 2), weight, eps, offset=offset, cast=cast).transpose(1, 2)
    options = (float(eps), float(offset), cast, "", "", x.shape[-1])
    if not records_graph():
        return _forward(x, None, weight, *options)[0]
    return _RMSNorm.apply(x, None, weight, options)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    cast: str = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual, weight, eps), x + residual), both differentiable in x, residual and weight.

    Args:
        x (`torch.Tensor`): (..., N), any strides; bf16, fp16 or fp32. The PyTorch twin computes float64 and N > 65536.
        residual (`torch.Tensor`): Shape and device of `x`.
        weight, eps, offset, cast: As in `rms_norm`, with the dtype of the sum for "x.dtype".

    Returns:
        `tuple` of two contiguous `torch.Tensor` of the shape of `x`: the norm, in the dtype as in `rms_norm`, and the
        sum, in the common dtype of `x` and `residual`.

    Raises:
        ValueError: `residual` has another shape or device than `x` (nothing is broadcast), or as in `rms_norm`.
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


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    activation: str = "silu",
    gate_first: bool = False,
    group_size: int | None = None,
    offset: float = 0.0,
    cast: str = "llama",
) -> torch.Tensor:
    """Compute rms_norm(x) * activation(gate), or rms_norm(x * activation(gate)), differentiable in x, gate and weight.

    `cast` says where the fp32 result is rounded, as in `rms_norm`. With `"llama"`, the norm of `gate_first=False` is
    rounded again before the product, as `Qwen3NextRMSNormGated` does; with `"gemma"` there is one rounding at the end,
    as in `KimiLinearRMSNormGated`.

    Args:
        x (`torch.Tensor`): (..., N), any strides; bf16, fp16 or fp32. The PyTorch twin computes float64, groups of more
            than 65536 and more than 65535 groups.
        gate (`torch.Tensor` or `None`): The shape and device of `x`, of any floating dtype. `None`: no gate.
        weight (`torch.Tensor`): (N,), on the device of `x`, of any floating dtype.
        eps (`float`): Added to the mean of the squares.
        activation (`str`, *optional*, defaults to `"silu"`): `"silu"` or `"sigmoid"`.
        gate_first (`bool`, *optional*, defaults to `False`): Multiply by the gate before the norm, as in Mamba 2.
        group_size (`int`, *optional*): How many columns are normed together; it divides N. Unset: all.
        offset (`float`, *optional*, defaults to 0.0): Added to `weight`.
        cast (`str`, *optional*, defaults to `"llama"`): `"llama"` or `"gemma"`.

    Returns:
        `torch.Tensor`, contiguous, of the shape of `x`. Dtype of `x`; with `"llama"` and the norm last, the common
        dtype of `x` and `weight`.

    Raises:
        ValueError: Shapes or devices disagree, an option is unknown, or `group_size` does not divide N.
    """
    check_norm(x, weight=weight)
    if gate is not None and (gate.shape != x.shape or gate.device != x.device or not gate.is_floating_point()):
        raise ValueError(
            f"gate is {tuple(gate.shape)} {gate.dtype} on {gate.device}, x {tuple(x.shape)} on {x.device}; expected a "
            "floating-point tensor of the shape and device of x."
        )
    if activation not in ACTIVATIONS:
        raise not_among("activation", activation, ACTIVATIONS)
    if cast not in GATED_CASTS:
        raise not_among("cast", cast, GATED_CASTS)
    width = x.shape[-1]
    group = width if group_size is None else group_size
    if group < 1 or width % group:
        raise ValueError(f"group_size is {group_size}, x {tuple(x.shape)}; expected a divisor of {width}, or None.")
    if group > MAX_COLUMNS or width // group > MAX_GROUPS or not runs_triton(x, weight, gate):
        return reference.gated_rms_norm(
            x,
            gate,
            weight,
            eps,
            activation=activation,
            gate_first=gate_first,
            group_size=group,
            offset=offset,
            cast=cast,
        )
    role = ""
    if gate is not None:
        role = GATE_FIRST if gate_first else GATE_LAST
    options = (float(eps), float(offset), cast, role, activation, int(group))
    if not records_graph():
        return _forward(x, gate, weight, *options)[0]
    return _RMSNorm.apply(x, gate, weight, options)
