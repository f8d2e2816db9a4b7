"""SwiGLU gate: y = silu(g) * u, with silu(g) = g * s and s = sigmoid(g). Shazeer 2020, arXiv:2002.05202, section 2.

    du = dy * g * s
    dg = dy * u * s * (1 + g * (1 - s))

Variants (gpt-oss, DeepSeek V4, MiniMax M3, Falcon-H1) scale and clamp before that, and add to u after it:

    c = min(gate_scale * g, limit),  v = clamp(u, -limit, limit) + up_offset,  y = c * sigmoid(alpha * c) * v

Where a number is cut off, its gradient is 0, and at the limit itself it is not, as in torch.clamp.

Shapes  g, u, y and their gradients have one common shape (..., I). g and u may be the halves of one tensor (..., 2I),
        whose rows then lie apart, or its even and odd columns, as in gpt-oss.
Dtypes  bf16, fp16, fp32. Arithmetic in fp32, one rounding per store. Eager PyTorch rounds silu(g) too, so that 16-bit
        results are not bit-equal to F.silu(g) * u; on average they are nearer to the float64 value.
Bytes   b per element. Forward reads g, u and writes y: 3nb (eager 5nb, and clamped 9nb). Backward reads dy, g, u and
        writes dg, du: 5nb (eager 9nb, clamped 17nb). Kept for backward: g, u (eager also keeps silu(g)).
"""

import math

import torch

from . import reference
from ._dispatch import _device_guard, jit, kernel_op, once_differentiable, tl
from ._launch import check_gate, gate_gradients, gate_tiles, gradients_and_product_of, launch, paired, runs_triton

PLAIN = (math.inf, 1.0, 0.0, 1.0)  # limit, alpha, up_offset, gate_scale


@jit
def _load(G, U, g_stride, u_stride, row, tile, n, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of g and of u in fp32. For pairs, G is the tensor of which they are the columns: in one long row."""
    if PAIRS == "":
        col = tile * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(G + row * g_stride + col, mask=col < n, other=0.0)
        u = tl.load(U + row * u_stride + col, mask=col < n, other=0.0)
    else:
        col = tile * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        both = tl.load(G + col, mask=col < 2 * n, other=0.0)
        even, odd = tl.split(tl.reshape(both, [BLOCK, 2]))
        if PAIRS == "gate":
            g, u = even, odd
        else:
            g, u = odd, even
    return g.to(tl.float32), u.to(tl.float32)


@jit
def _swiglu_fwd_kernel(
    G, U, Y, g_stride, u_stride, n, tiles_per_row, limit, alpha, up_offset, gate_scale,
    VARIANT: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    row = (pid // tiles_per_row).to(tl.int64)
    tile = (pid % tiles_per_row).to(tl.int64)  # int64: a contiguous input is one row
    g, u = _load(G, U, g_stride, u_stride, row, tile, n, PAIRS, BLOCK)
    if VARIANT:
        g *= gate_scale
        g = tl.where(g > limit, limit, g)  # and not tl.minimum, which would hide a NaN
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u)) + up_offset
        y = g * tl.sigmoid(alpha * g) * u
    else:
        y = g * tl.sigmoid(g) * u
    col = tile * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + row * n + col, y, mask=col < n)


@jit
def _swiglu_bwd_kernel(
    DY, G, U, DG, DU, dy_stride, g_stride, u_stride, d_stride, n, tiles_per_row, limit, alpha, up_offset, gate_scale,
    VARIANT: tl.constexpr, PAIRS: tl.constexpr, D_PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    """With PRODUCT, DY is written over with y."""
    pid = tl.program_id(0)
    row = (pid // tiles_per_row).to(tl.int64)
    tile = (pid % tiles_per_row).to(tl.int64)
    col = tile * BLOCK + tl.arange(0, BLOCK)
    mask = col < n
    dy = tl.load(DY + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
    g, u = _load(G, U, g_stride, u_stride, row, tile, n, PAIRS, BLOCK)
    if VARIANT:
        g *= gate_scale
        g_cut, u_cut = g > limit, (u > limit) | (u < -limit)
        g = tl.where(g_cut, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u)) + up_offset
        s = tl.sigmoid(alpha * g)
        du = tl.where(u_cut, 0.0, dy * (g * s))
        dg = tl.where(g_cut, 0.0, dy * u * (s * (1.0 + alpha * g * (1.0 - s))) * gate_scale)
    else:
        s = tl.sigmoid(g)
        du = dy * (g * s)
        dg = dy * u * (s * (1.0 + g * (1.0 - s)))
    if D_PAIRS == "":
        tl.store(DU + row * d_stride + col, du, mask=mask)
        tl.store(DG + row * d_stride + col, dg, mask=mask)
    else:
        if D_PAIRS == "gate":
            both = tl.join(dg, du)
        else:
            both = tl.join(du, dg)
        col = tile * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        tl.store(DG + col, tl.reshape(both, [2 * BLOCK]), mask=col < 2 * n)
    if PRODUCT:
        tl.store(DY + row * dy_stride + tile * BLOCK + tl.arange(0, BLOCK), g * s * u, mask=mask)


def _is_variant(limit: float, alpha: float, up_offset: float, gate_scale: float) -> bool:
    return (limit, alpha, up_offset, gate_scale) != PLAIN


def _parts(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, str]:
    """What the kernel is given of gate and up, or of their gradients: the two, or the tensor that has them as pairs."""
    both = paired(a, b)
    return (a, b, "") if both is None else (both[0], both[0], both[1])


def _tiles(y: torch.Tensor, *parts: tuple[torch.Tensor, torch.Tensor, str]):
    """`gate_tiles` of y and of the parts, in this order. As soon as some are pairs, all are one long row."""
    given = [t for a, b, _ in parts for t in (a, b)]
    if not any(kind for *_, kind in parts):
        return gate_tiles(y, *given)
    y, *given = (t if t.is_contiguous() else t.contiguous() for t in (y, *given))
    rows, n, tiles_per_row, grid, block = gate_tiles(y)
    return rows + [t.view(1, -1) for t in given], n, tiles_per_row, grid, block


@kernel_op("swiglu_fwd")
def _forward(
    gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float, up_offset: float, gate_scale: float
) -> torch.Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    parts = _parts(gate, up)
    (_, g, u), n, tiles_per_row, grid, block = _tiles(y, parts)
    launch(
        _swiglu_fwd_kernel, grid,
        g, u, y, g.stride(0), u.stride(0), n, tiles_per_row, limit, alpha, up_offset, gate_scale,
        VARIANT=_is_variant(limit, alpha, up_offset, gate_scale), PAIRS=parts[2], BLOCK=block,
    )  # fmt: skip
    return y


@_forward.register_fake
def _(gate, up, limit, alpha, up_offset, gate_scale):
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@kernel_op("swiglu_bwd")
def _backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float, up_offset: float,
    gate_scale: float, reuse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    dg, du = gate_gradients(gate, up, reuse, pairs=True)  # not over dy, which another branch may read
    parts, d_parts = _parts(gate, up), _parts(dg, du)
    (dy, g, u, dg_rows, du_rows), n, tiles_per_row, grid, block = _tiles(dy, parts, d_parts)
    launch(
        _swiglu_bwd_kernel, grid,
        dy, g, u, dg_rows, du_rows, dy.stride(0), g.stride(0), u.stride(0), dg_rows.stride(0), n, tiles_per_row,
        limit, alpha, up_offset, gate_scale, VARIANT=_is_variant(limit, alpha, up_offset, gate_scale),
        PAIRS=parts[2], D_PAIRS=d_parts[2], BLOCK=block, PRODUCT=False,
    )  # fmt: skip
    return dg, du


@_backward.register_fake
def _(dy, gate, up, limit, alpha, up_offset, gate_scale, reuse):
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (gate, up))


def gradients_and_product(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, reuse: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dg, du, y) in one pass, y in the memory of `dy`. With `reuse` dg and du may be in that of `gate` and `up`."""
    if not (runs_triton(dy, gate, up) and dy.is_contiguous()):
        return gradients_and_product_of(reference.swiglu, dy, gate, up)
    dg, du = gate_gradients(gate, up, reuse)
    (dy_rows, g, u, dg_rows, du_rows), n, tiles_per_row, grid, block = gate_tiles(dy, gate, up, dg, du)
    with _device_guard(dy):
        launch(
            _swiglu_bwd_kernel, grid,
            dy_rows, g, u, dg_rows, du_rows, dy_rows.stride(0), g.stride(0), u.stride(0), dg_rows.stride(0), n,
            tiles_per_row, *PLAIN, VARIANT=False, PAIRS="", D_PAIRS="", BLOCK=block, PRODUCT=True,
        )  # fmt: skip
    return dg, du, dy


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, reuse, *variant):
        ctx.save_for_backward(gate, up)
        ctx.reuse = reuse and not (gate.is_leaf or up.is_leaf)  # the owner of a leaf reads it again
        ctx.variant = variant
        return _forward(gate, up, *variant)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return *_backward(dy, *ctx.saved_tensors, *ctx.variant, ctx.reuse), None, None, None, None, None


def swiglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    gate_scale: float = 1.0,
    reuse_inputs: bool = False,
) -> torch.Tensor:
    """silu(gate) * up in one pass, differentiable in both; or, with other than the defaults,
    c * sigmoid(alpha * c) * (clamp(up, -limit, limit) + up_offset) with c = min(gate_scale * gate, limit).

    Args:
        gate (`torch.Tensor`): (..., I); bf16, fp16 or fp32 (float64: the PyTorch twin). Rows may lie apart, as the
            halves of a fused projection do, or columns, as its even and odd ones do; no copy is made of them.
        up (`torch.Tensor`): Shape, dtype and device of `gate`.
        limit (`float`, *optional*): Cuts off the gate above it, and up on both sides; 7 in gpt-oss. Unset: neither.
        alpha (`float`, *optional*, defaults to 1.0): Of the sigmoid; 1.702 in gpt-oss.
        up_offset (`float`, *optional*, defaults to 0.0): Added to up; 1 in gpt-oss.
        gate_scale (`float`, *optional*, defaults to 1.0): Multiplies the gate before anything else.
        reuse_inputs (`bool`, *optional*, defaults to `False`): The backward pass may write the two gradients over
            `gate` and `up` if they are contiguous or the halves or pairs of a contiguous tensor, which saves two
            tensors of their size. Allow it only if nobody reads the two any more, neither later code nor the backward
            pass of what made them. It does nothing with `retain_graph=True`, for leaf tensors, under torch.compile and
            on the PyTorch twin.

    Returns:
        `torch.Tensor`, contiguous, of the shape and dtype of `gate`.

    Raises:
        ValueError: Shape, dtype or device of the two disagree, they are not floating point, or `limit` is not above 0.
    """
    check_gate(gate, up)
    if limit is not None and not limit > 0:
        raise ValueError(f"limit is {limit}; expected a number above 0, or None for no limit.")
    if not runs_triton(gate, up):
        return reference.swiglu(gate, up, limit=limit, alpha=alpha, up_offset=up_offset, gate_scale=gate_scale)
    variant = (math.inf if limit is None else float(limit), float(alpha), float(up_offset), float(gate_scale))
    if not torch.is_grad_enabled():
        return _forward(gate, up, *variant)
    return _SwiGLU.apply(gate, up, reuse_inputs, *variant)
