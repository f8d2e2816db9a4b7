"""GeGLU gate: y = gelu(g) * u. Shazeer 2020, arXiv:2002.05202, section 2. gelu: Hendrycks and Gimpel 2016,
arXiv:1606.08415.

    "none"  gelu(g) = g * Phi(g),  gelu'(g) = Phi(g) + g * phi(g), with Phi and phi of the standard normal distribution
    "tanh"  gelu(g) = g * s,       gelu'(g) = s + g * s * (1 - s) * z',  s = sigmoid(z)
            z = 2 * sqrt(2 / pi) * (g + 0.044715 * g^3).  It equals the usual form, since (1 + tanh(z / 2)) / 2 is
            sigmoid(z), but 1 + tanh would cancel for negative g.

    du = dy * gelu(g),  dg = dy * u * gelu'(g)

Shapes, dtypes and bytes are those of swiglu.py. The two are separate files because they share only the host code, which
is in `_launch.py`; their formulas and derivatives have nothing in common.
"""

import functools

import torch

from . import reference
from ._dispatch import _device_guard, jit, kernel_op, once_differentiable, tl
from ._launch import check_gate, gate_gradients, gate_tiles, gradients_and_product_of, launch, runs_triton

APPROXIMATIONS = ("tanh", "none")


@jit
def _gelu(g, TANH: tl.constexpr):
    """(gelu(g), gelu'(g))"""
    if TANH:
        s = tl.sigmoid(1.5957691216057308 * g * (1.0 + 0.044715 * g * g))  # 2 * sqrt(2 / pi)
        # Beyond |g| = 15, s is 0 or 1 in fp32 and its derivative 0. Without the clamp g * g could be inf, and 0 * inf
        # NaN.
        b = tl.minimum(tl.maximum(g, -15.0), 15.0)
        slope = s + b * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * b * b)  # 3 * 0.044715
    else:
        s = 0.5 + 0.5 * tl.erf(0.7071067811865476 * g)  # 1 / sqrt(2)
        slope = s + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)  # 1 / sqrt(2 * pi)
    return g * s, slope


@jit
def _geglu_fwd_kernel(G, U, Y, g_stride, u_stride, n, tiles_per_row, TANH: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    row = (pid // tiles_per_row).to(tl.int64)
    col = (pid % tiles_per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # int64: a contiguous input is one row
    mask = col < n
    g = tl.load(G + row * g_stride + col, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(U + row * u_stride + col, mask=mask, other=0.0).to(tl.float32)
    value, _ = _gelu(g, TANH)
    tl.store(Y + row * n + col, value * u, mask=mask)


@jit
def _geglu_bwd_kernel(
    DY, G, U, DG, DU, dy_stride, g_stride, u_stride, d_stride, n, tiles_per_row,
    TANH: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr = False,
):  # fmt: skip
    """With PRODUCT, DY is written over with y."""
    pid = tl.program_id(0)
    row = (pid // tiles_per_row).to(tl.int64)
    col = (pid % tiles_per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = col < n
    dy = tl.load(DY + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(G + row * g_stride + col, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(U + row * u_stride + col, mask=mask, other=0.0).to(tl.float32)
    value, slope = _gelu(g, TANH)
    tl.store(DU + row * d_stride + col, dy * value, mask=mask)
    tl.store(DG + row * d_stride + col, dy * u * slope, mask=mask)
    if PRODUCT:
        tl.store(DY + row * dy_stride + col, value * u, mask=mask)


@kernel_op("geglu_fwd")
def _forward(gate: torch.Tensor, up: torch.Tensor, tanh: bool) -> torch.Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    (g, u), n, tiles_per_row, grid, block = gate_tiles(gate, up)
    launch(_geglu_fwd_kernel, grid, g, u, y, g.stride(0), u.stride(0), n, tiles_per_row, TANH=tanh, BLOCK=block)
    return y


@_forward.register_fake
def _(gate, up, tanh):
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@kernel_op("geglu_bwd")
def _backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, tanh: bool, reuse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dg, du = gate_gradients(gate, up, reuse)  # not over dy, which autograd may hand to another branch too
    (dy, g, u, dg_rows, du_rows), n, tiles_per_row, grid, block = gate_tiles(dy, gate, up, dg, du)
    launch(
        _geglu_bwd_kernel, grid,
        dy, g, u, dg_rows, du_rows, dy.stride(0), g.stride(0), u.stride(0), dg_rows.stride(0), n, tiles_per_row,
        TANH=tanh, BLOCK=block, PRODUCT=False,
    )  # fmt: skip
    return dg, du


@_backward.register_fake
def _(dy, gate, up, tanh, reuse):
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (gate, up))


def gradients_and_product(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, tanh: bool, reuse: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As in `swiglu.py`."""
    if not (runs_triton(dy, gate, up) and dy.is_contiguous()):
        twin = functools.partial(reference.geglu, approximate="tanh" if tanh else "none")
        return gradients_and_product_of(twin, dy, gate, up)
    dg, du = gate_gradients(gate, up, reuse)
    (dy_rows, g, u, dg_rows, du_rows), n, tiles_per_row, grid, block = gate_tiles(dy, gate, up, dg, du)
    with _device_guard(dy):
        launch(
            _geglu_bwd_kernel, grid, dy_rows, g, u, dg_rows, du_rows,
            dy_rows.stride(0), g.stride(0), u.stride(0), dg_rows.stride(0), n, tiles_per_row,
            TANH=tanh, BLOCK=block, PRODUCT=True,
        )  # fmt: skip
    return dg, du, dy


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, tanh, reuse):
        ctx.save_for_backward(gate, up)
        ctx.reuse = reuse and not (gate.is_leaf or up.is_leaf)  # the owner of a leaf reads it again
        ctx.tanh = tanh
        return _forward(gate, up, tanh)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return *_backward(dy, *ctx.saved_tensors, ctx.tanh, ctx.reuse), None, None


def geglu(
    gate: torch.Tensor, up: torch.Tensor, *, approximate: str = "tanh", reuse_inputs: bool = False
) -> torch.Tensor:
    """gelu(gate) * up in one pass, differentiable in both.

    Args:
        gate (`torch.Tensor`): (..., I); bf16, fp16 or fp32 (float64: the PyTorch twin). Rows may lie apart, as the
            halves of a fused projection do; no copy is made of them.
        up (`torch.Tensor`): Shape, dtype and device of `gate`.
        approximate (`str`, *optional*, defaults to `"tanh"`): `"tanh"`, or `"none"` for the exact gelu; as in `F.gelu`.
        reuse_inputs (`bool`, *optional*, defaults to `False`): As in `swiglu`.

    Returns:
        `torch.Tensor`, contiguous, of the shape and dtype of `gate`.

    Raises:
        ValueError: Shape, dtype or device of the two disagree, none is floating point, or `approximate` is unknown.
    """
    check_gate(gate, up)
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"approximate is {approximate!r}; expected one of {', '.join(map(repr, APPROXIMATIONS))}.")
    if not runs_triton(gate, up):
        return reference.geglu(gate, up, approximate=approximate)
    if not torch.is_grad_enabled():
        return _forward(gate, up, approximate == "tanh")
    return _GeGLU.apply(gate, up, approximate == "tanh", reuse_inputs)
