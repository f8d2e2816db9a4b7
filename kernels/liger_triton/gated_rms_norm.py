"""RMSNorm and a gate in one pass, with the gate after the norm or before it, over whole rows or over groups of columns.

    norm first   y = n * a(z),  n = (w + offset) * xhat,  xhat = x * rstd,  rstd = 1 / sqrt(mean(x^2) + eps)
    gate first   y = (w + offset) * xhat,  xhat = h * rstd,  h = x * a(z),  rstd = 1 / sqrt(mean(h^2) + eps)

    a(z) is silu(z) = z * s or sigmoid(z) = s, with a'(z) = s * (1 + z * (1 - s)) or s * (1 - s),  s = sigmoid(z)

    norm first   dn = dy * a(z),  dz = dy * n * a'(z),  dx = B(dn)
    gate first   dh = B(dy),  dx = dh * a(z),  dz = dh * x * a'(z)
    B(d) = rstd * (g - xhat * mean(g * xhat)),  g = d * (w + offset);  dw = sum over rows of d * xhat

Norm first: Qwen3-Next, Qwen3.5, OLMo hybrid (silu), Kimi Linear (sigmoid). Gate first: Mamba 2 (Dao and Gu 2024,
arXiv:2405.21060) and its hybrids.

Shapes  x, z, y, dx, dz (..., N), read as M rows of N; w, dw (N,). A mean is over the N / group columns of a group, and
        a program has one group of some rows: the second index of the grid is the group. rstd (groups, M) in fp32.
Dtypes  bf16, fp16, fp32; z and w may have dtypes of their own. Arithmetic in fp32, with the roundings that `cast`
        names. Gradients are those of the formula without roundings, rounded once.
Bytes   b per element, n = M * N. Forward reads x and z, and writes y: 3nb (eager about 14nb with fp32 in between).
        Backward reads dy, x and z, and writes dx and dz: 5nb, and for each program an fp32 row of dw, which a second
        pass adds up. Kept for backward: x, z, rstd.
"""

import torch

from . import reference
from ._autograd import once_differentiable, records_graph
from ._dispatch import jit, kernel_op, runs_triton, tl
from ._launch import MAX_COLUMNS, as_rows, backward_tile, cdiv, check_norm, launch, persistent_grid, row_tile
from .rms_norm import norm_dtype

ACTIVATIONS = ("silu", "sigmoid")
CASTS = ("llama", "gemma")
MAX_GROUPS = 65535  # the most programs that the second dimension of a grid may have


@jit
def _act(z, SILU: tl.constexpr):
    """(a(z), a'(z))"""
    s = tl.sigmoid(z)
    if SILU:
        return z * s, s * (1.0 + z * (1.0 - s))
    else:
        return s, s * (1.0 - s)


@jit
def _gated_rms_norm_fwd_kernel(
    X, Z, W, Y, RSTD, x_stride, z_stride, y_stride, m, n, eps, offset,
    HAS_GATE: tl.constexpr, SILU: tl.constexpr, GATE_FIRST: tl.constexpr, CAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: row * n passes 2**31
    inside = tl.arange(0, BLOCK_N)
    col = group * n + inside
    mask = (row < m)[:, None] & (inside < n)[None, :]
    x = tl.load(X + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    w_row = tl.load(W + col, mask=inside < n, other=0.0)[None, :]
    w = w_row.to(tl.float32) + offset
    if HAS_GATE:
        z = tl.load(Z + row[:, None] * z_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        a, _ = _act(z, SILU)
        if GATE_FIRST:
            x *= a
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n + eps)
    y = x * rstd[:, None]
    if CAST == "llama":
        y = y.to(X.dtype.element_ty).to(tl.float32)
        w = w.to(W.dtype.element_ty).to(tl.float32)
    y *= w
    if HAS_GATE and not GATE_FIRST:
        if CAST == "llama" and X.dtype.element_ty == W.dtype.element_ty:  # else the product is in fp32
            y = y.to(X.dtype.element_ty).to(tl.float32)
        y *= a
    tl.store(Y + row[:, None] * y_stride + col[None, :], y, mask=mask)
    tl.store(RSTD + group.to(tl.int64) * m + row, rstd, mask=row < m)


@jit
def _gated_rms_norm_bwd_kernel(
    DY, X, Z, W, RSTD, DX, DZ, DW, dy_stride, x_stride, z_stride, d_stride, m, n, offset, tiles,
    HAS_GATE: tl.constexpr, SILU: tl.constexpr, GATE_FIRST: tl.constexpr, NEED_DW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid, group = tl.program_id(0), tl.program_id(1)
    inside = tl.arange(0, BLOCK_N)
    col = group * n + inside
    w = tl.load(W + col, mask=inside < n, other=0.0)[None, :].to(tl.float32) + offset
    dw = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in tl.range(pid, tiles, tl.num_programs(0), num_stages=STAGES):
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (row < m)[:, None] & (inside < n)[None, :]
        x = tl.load(X + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        d = tl.load(DY + row[:, None] * dy_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + group.to(tl.int64) * m + row, mask=row < m, other=0.0)[:, None]
        if HAS_GATE:
            z = tl.load(Z + row[:, None] * z_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
            a, slope = _act(z, SILU)
            if GATE_FIRST:
                xhat = x * a * rstd
            else:
                xhat = x * rstd
                tl.store(DZ + row[:, None] * d_stride + col[None, :], d * w * xhat * slope, mask=mask)
                d *= a
        else:
            xhat = x * rstd
        if NEED_DW:
            dw += d * xhat
        d *= w
        d = (d - xhat * (tl.sum(d * xhat, axis=1) / n)[:, None]) * rstd
        if HAS_GATE and GATE_FIRST:
            tl.store(DZ + row[:, None] * d_stride + col[None, :], d * x * slope, mask=mask)
            d *= a
        tl.store(DX + row[:, None] * d_stride + col[None, :], d, mask=mask)
    if NEED_DW:
        tl.store(DW + pid.to(tl.int64) * d_stride + col, tl.sum(dw, axis=0), mask=inside < n)


def _result_dtype(
    x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, gate_first: bool, cast: str
) -> torch.dtype:
    return norm_dtype(x, weight, cast) if gate is None or gate_first else x.dtype


@kernel_op("gated_rms_norm_fwd")
def _forward(
    x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, eps: float, activation: str, gate_first: bool,
    group: int, offset: float, cast: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    rows = as_rows(x)
    gates = rows if gate is None else as_rows(gate)
    m, width = rows.shape
    y = torch.empty(x.shape, dtype=_result_dtype(x, gate, weight, gate_first, cast), device=x.device)
    rstd = torch.empty((width // group, m), dtype=torch.float32, device=x.device)
    block_m, block_n, num_warps = row_tile(group)
    launch(
        _gated_rms_norm_fwd_kernel, (cdiv(m, block_m), width // group),
        rows, gates, weight.contiguous(), y, rstd, rows.stride(0), gates.stride(0), width, m, group, eps, offset,
        HAS_GATE=gate is not None, SILU=activation == "silu", GATE_FIRST=gate_first, CAST=cast,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps,
    )  # fmt: skip
    return y, rstd


@_forward.register_fake
def _(x, gate, weight, eps, activation, gate_first, group, offset, cast):
    y = torch.empty(x.shape, dtype=_result_dtype(x, gate, weight, gate_first, cast), device=x.device)
    return y, x.new_empty((x.shape[-1] // group, x.numel() // x.shape[-1]), dtype=torch.float32)


@kernel_op("gated_rms_norm_bwd")
def _backward(
    dy: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, rstd: torch.Tensor,
    activation: str, gate_first: bool, group: int, offset: float, need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dx, dgate, dw). dgate is empty without a gate, and dw unless need_dw."""
    rows, dy_rows = as_rows(x), as_rows(dy)
    gates = rows if gate is None else as_rows(gate)
    m, width = rows.shape
    groups = width // group
    loaded = (rows, dy_rows) if gate is None else (rows, dy_rows, gates)
    block_m, block_n, num_warps, stages = backward_tile(group, x.device, *loaded)
    tiles = cdiv(m, block_m)
    programs = max(1, persistent_grid(tiles * groups, x.device) // groups)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = rstd.new_empty(0) if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=x.device)
    dw = torch.empty((programs, width) if need_dw else (0,), dtype=torch.float32, device=x.device)
    launch(
        _gated_rms_norm_bwd_kernel, (programs, groups),
        dy_rows, rows, gates, weight.contiguous(), rstd, dx, dgate, dw, dy_rows.stride(0), rows.stride(0),
        gates.stride(0), width, m, group, offset, tiles, HAS_GATE=gate is not None, SILU=activation == "silu",
        GATE_FIRST=gate_first, NEED_DW=need_dw, BLOCK_M=block_m, BLOCK_N=block_n, STAGES=stages, num_warps=num_warps,
    )  # fmt: skip
    return dx, dgate, dw.sum(0).to(weight.dtype) if need_dw else dw


@_backward.register_fake
def _(dy, x, gate, weight, rstd, activation, gate_first, group, offset, need_dw):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = rstd.new_empty(0) if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=x.device)
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if need_dw else rstd.new_empty(0)
    return dx, dgate, dw


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, eps, activation, gate_first, group, offset, cast):
        y, rstd = _forward(x, gate, weight, eps, activation, gate_first, group, offset, cast)
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.options = activation, gate_first, group, offset
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, gate, weight, rstd = ctx.saved_tensors
        need_dw = ctx.needs_input_grad[2]
        dx, dgate, dw = _backward(dy, x, gate, weight, rstd, *ctx.options, need_dw)
        return dx, None if gate is None else dgate, dw if need_dw else None, *[None] * 6


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
    """rms_norm(x) * activation(gate), or rms_norm(x * activation(gate)), differentiable in x, gate and weight.

    `cast` says where the result of the fp32 arithmetic is rounded, as in `rms_norm`. With `"llama"`, the norm of
    `gate_first=False` is rounded again before the product, as `Qwen3NextRMSNormGated` does; with `"gemma"` there is one
    rounding at the end, as in `KimiLinearRMSNormGated`.

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
        `torch.Tensor`, contiguous, of the shape of `x`. Dtype: that of `x`, except with `"llama"` where the norm comes
        last, whose dtype is the common one of `x` and `weight`.

    Raises:
        ValueError: Shapes or devices disagree, an option is unknown, or `group_size` does not divide N.
    """
    check_norm(x, weight=weight)
    if gate is not None and (gate.shape != x.shape or gate.device != x.device or not gate.is_floating_point()):
        raise ValueError(
            f"gate is {tuple(gate.shape)} {gate.dtype} on {gate.device}, x {tuple(x.shape)} on {x.device}; expected a "
            "floating-point tensor of the shape and device of x."
        )
    for name, value, known in (("activation", activation, ACTIVATIONS), ("cast", cast, CASTS)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, known))}.")
    width = x.shape[-1]
    group = width if group_size is None else group_size
    if group < 1 or width % group:
        raise ValueError(f"group_size is {group_size}, x {tuple(x.shape)}; expected a divisor of {width}, or None.")
    if group > MAX_COLUMNS or width // group > MAX_GROUPS or not runs_triton(x, weight, gate):
        return reference.gated_rms_norm(
            x, gate, weight, eps, activation=activation, gate_first=gate_first, group_size=group, offset=offset,
            cast=cast,
        )  # fmt: skip
    options = (float(eps), activation, bool(gate_first), int(group), float(offset), cast)
    if not records_graph():
        return _forward(x, gate, weight, *options)[0]
    return _GatedRMSNorm.apply(x, gate, weight, *options)
