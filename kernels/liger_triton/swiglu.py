"""SwiGLU gate: y = silu(g) * u, with silu(g) = g * s and s = sigmoid(g). Shazeer 2020, arXiv:2002.05202, section 2.

    du = dy * g * s
    dg = dy * u * s * (1 + g * (1 - s))

Shapes  g, u, y and their gradients have one common shape (..., I). g and u may be the halves of one tensor (..., 2I),
        whose rows then lie apart.
Dtypes  bf16, fp16, fp32. Arithmetic in fp32, one rounding per store. Eager PyTorch rounds silu(g) too, so that 16-bit
        results are not bit-equal to F.silu(g) * u; on average they are nearer to the float64 value.
Bytes   b per element. Forward reads g, u and writes y: 3nb (eager 5nb). Backward reads dy, g, u and writes dg, du:
        5nb (eager 9nb). Kept for backward: g, u (eager also keeps silu(g)).
"""

import torch

from . import reference
from ._dispatch import _device_guard, jit, kernel_op, once_differentiable, tl
from ._launch import check_gate, gate_gradients, gate_tiles, gradients_and_product_of, launch, runs_triton


@jit
def _swiglu_fwd_kernel(G, U, Y, g_stride, u_stride, n, tiles_per_row, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    row = (pid // tiles_per_row).to(tl.int64)
    col = (pid % tiles_per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # int64: a contiguous input is one row
    mask = col < n
    g = tl.load(G + row * g_stride + col, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(U + row * u_stride + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(Y + row * n + col, g * tl.sigmoid(g) * u, mask=mask)


@jit
def _swiglu_bwd_kernel(
    DY, G, U, DG, DU, dy_stride, g_stride, u_stride, d_stride, n, tiles_per_row,
    BLOCK: tl.constexpr, PRODUCT: tl.constexpr = False,
):  # fmt: skip
    """With PRODUCT, DY is written over with y."""
    pid = tl.program_id(0)
    row = (pid // tiles_per_row).to(tl.int64)
    col = (pid % tiles_per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = col < n
    dy = tl.load(DY + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(G + row * g_stride + col, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(U + row * u_stride + col, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(DU + row * d_stride + col, dy * (g * s), mask=mask)
    tl.store(DG + row * d_stride + col, dy * u * (s * (1.0 + g * (1.0 - s))), mask=mask)
    if PRODUCT:
        tl.store(DY + row * dy_stride + col, g * s * u, mask=mask)


@kernel_op("swiglu_fwd")
def _forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    (g, u), n, tiles_per_row, grid, block = gate_tiles(gate, up)
    launch(_swiglu_fwd_kernel, grid, g, u, y, g.stride(0), u.stride(0), n, tiles_per_row, BLOCK=block)
    return y


@_forward.register_fake
def _(gate, up):
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@kernel_op("swiglu_bwd")
def _backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, reuse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    dg, du = gate_gradients(gate, up, reuse)  # not over dy, which autograd may hand to another branch too
    (dy, g, u, dg_rows, du_rows), n, tiles_per_row, grid, block = gate_tiles(dy, gate, up, dg, du)
    launch(
        _swiglu_bwd_kernel, grid,
        dy, g, u, dg_rows, du_rows, dy.stride(0), g.stride(0), u.stride(0), dg_rows.stride(0), n, tiles_per_row,
        BLOCK=block, PRODUCT=False,
    )  # fmt: skip
    return dg, du


@_backward.register_fake
def _(dy, gate, up, reuse):
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
            _swiglu_bwd_kernel, grid, dy_rows, g, u, dg_rows, du_rows,
            dy_rows.stride(0), g.stride(0), u.stride(0), dg_rows.stride(0), n, tiles_per_row, BLOCK=block, PRODUCT=True,
        )  # fmt: skip
    return dg, du, dy


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, reuse):
        ctx.save_for_backward(gate, up)
        ctx.reuse = reuse and not (gate.is_leaf or up.is_leaf)  # the owner of a leaf reads it again
        return _forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return *_backward(dy, *ctx.saved_tensors, ctx.reuse), None


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, reuse_inputs: bool = False) -> torch.Tensor:
    """silu(gate) * up in one pass, differentiable in both.

    Args:
        gate (`torch.Tensor`): (..., I); bf16, fp16 or fp32 (float64: the PyTorch twin). Rows may lie apart, as the
            halves of a fused projection do; no copy is made of them.
        up (`torch.Tensor`): Shape, dtype and device of `gate`.
        reuse_inputs (`bool`, *optional*, defaults to `False`): The backward pass may write the two gradients over
            `gate` and `up` if they are contiguous or the halves of a contiguous tensor, which saves two tensors of
            their size. Allow it only if nobody reads the two any more, neither later code nor the backward pass of what
            made them. It does nothing with `retain_graph=True`, for leaf tensors, under torch.compile and on the
            PyTorch twin.

    Returns:
        `torch.Tensor`, contiguous, of the shape and dtype of `gate`.

    Raises:
        ValueError: Shape, dtype or device of the two disagree, or they are not floating point.
    """
    check_gate(gate, up)
    if not runs_triton(gate, up):
        return reference.swiglu(gate, up)
    if not torch.is_grad_enabled():
        return _forward(gate, up)
    return _SwiGLU.apply(gate, up, reuse_inputs)
