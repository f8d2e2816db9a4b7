"""Gradients computed together with their loss, and multiplied by the upstream gradient in backward.

The product reuses the memory of the gradient if the dtypes agree. Only a sole owner may give memory away, so eager
calls hold these gradients themselves until the last backward pass instead of saving them.

Shapes  grad (..., n) with unit stride in the last dimension; factor () or, for grad (m, n), (m,), fp32, on its device.
Dtypes  any of bf16, fp16, fp32 in and out. The product is computed in fp32 and rounded once.
Bytes   reads grad and writes the result. In place, a factor of 1 costs nothing. The factor is read on the device, so
        that the host does not wait for it.
"""

import math

import torch

from ._autograd import graph_is_kept, once_differentiable
from ._dispatch import jit, tl, use_triton
from ._launch import launch, next_power_of_2
from .sizes import computes_nothing


@jit
def _scale_kernel(
    G, OUT, FACTOR, g_stride, out_stride, factor_stride, columns, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr
):
    """Multiply row `program_id(0)` of G by its factor."""
    row = tl.program_id(0).to(tl.int64)  # int64: 262144 rows of 8192 are 2**31 elements
    factor = tl.load(FACTOR + row * factor_stride)
    if IN_PLACE:
        if factor == 1.0:
            return
    G += row * g_stride
    OUT += row * out_stride
    for start in range(0, columns, BLOCK):
        off = start + tl.arange(0, BLOCK)
        g = tl.load(G + off, mask=off < columns, other=0.0).to(tl.float32)
        tl.store(OUT + off, g * factor, mask=off < columns)


def scaled(grad: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, keep: bool = False) -> torch.Tensor:
    """Return grad * factor in `dtype`. It overwrites grad if the dtypes agree, except with `keep` or in a trace."""
    if grad.ndim > 2:
        return scaled(grad.flatten(0, -2), factor, dtype, keep).view(grad.shape)
    # The factor must not be 0-dimensional: PyTorch would round it to the dtype of grad first.
    rows = factor.reshape(-1, *[1] * (grad.ndim - 1))
    if torch.compiler.is_compiling():
        return (grad.float() * rows).to(dtype)
    out = grad if grad.dtype == dtype and not keep else torch.empty_like(grad, dtype=dtype)
    # On a CPU, Triton's interpreter would truncate to bf16 instead of rounding.
    if not use_triton(grad) or (grad.device.type == "cpu" and not computes_nothing()) or grad.numel() == 0:
        return torch.mul(grad, rows, out=out)
    launch_scale(grad, factor, out)
    return out


def launch_scale(grad: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
    """Launch the kernel behind `scaled`, into `out`, which may be `grad`."""
    g, o = (t.view(1, -1) if t.ndim < 2 else t for t in (grad, out))
    if factor.ndim == 0 and grad.is_contiguous() and out.is_contiguous() and grad.numel() % 2048 == 0:
        g, o = (t.view(-1, 2048) for t in (g, o))  # all rows now start at a multiple of 16 bytes
    launch(
        _scale_kernel,
        (g.shape[0],),
        g,
        o,
        factor,
        g.stride(0),
        o.stride(0),
        factor.stride(0) if factor.ndim else 0,
        g.shape[1],
        IN_PLACE=out is grad,
        BLOCK=min(2048, next_power_of_2(g.shape[1])),
        num_warps=8,
    )


def one_number(g, counted):
    """Return the single value () that g (T,) has in all counted rows: NaN if they differ, 0 if no row counts."""
    if g.shape[0] == 0:
        return g.new_zeros(())
    if g.stride(0) == 0 and not torch.compiler.is_compiling():
        return torch.where(counted.any(), g[0], 0.0)  # the backward pass of a sum expands one number
    low = torch.where(counted, g, torch.inf).amin()
    high = torch.where(counted, g, -torch.inf).amax()
    value = torch.where(low == high, low, torch.nan)
    return torch.where(counted.any(), value, 0.0)


def split_pow2_scale(row_weight: torch.Tensor | None, scale: float, dtype: torch.dtype, rows: torch.Tensor):
    """Return (the row weights for a gradient computed in `dtype`, the factor to multiply it by later).

    In fp16, before the loss scale is known, a weight of 1e-6 would underflow and one of 1e5 would overflow. So a power
    of two, taken from the largest weight times the factor `scale` of the logits, is applied later; it rounds nothing.
    In other dtypes the later factor is None. `rows` is any tensor with the shape of the weights.
    """
    power = math.frexp(scale)[1] - 1
    if dtype != torch.float16 or (row_weight is None and power == 0):
        return row_weight, None
    later = torch.full((), 2.0**power, device=rows.device)
    if row_weight is None:
        row_weight = torch.ones(rows.shape, device=rows.device)
    elif row_weight.numel():
        later = torch.ldexp(later, torch.frexp(row_weight.abs().amax()).exponent - 1)
    return row_weight / later, later


def stash_grads(ctx, grads, dtypes, *saved) -> None:
    """Keep `grads`, the known gradients of inputs in `dtypes` (or None), and the tensors `saved` for backward."""
    ctx.dtypes, ctx.held = dtypes, None
    if torch.compiler.is_compiling():
        ctx.save_for_backward(*saved, *grads)
    else:
        ctx.save_for_backward(*saved)
        ctx.held = list(grads)


def take_scaled_grads(ctx, saved, factor: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the gradients that `stash_grads` kept, times `factor`, each in the dtype of its input.

    `saved` is `ctx.saved_tensors`: reading it raises if an earlier backward pass did not keep the graph.
    """
    keep = False
    if torch.compiler.is_compiling():
        grads = list(saved[len(saved) - len(ctx.dtypes) :])
    else:
        grads, keep = list(ctx.held), graph_is_kept()
        if not keep:
            ctx.held = None
    out = []
    for k, dtype in enumerate(ctx.dtypes):
        grad = grads[k]
        grads[k] = None  # free one fp32 sum before the next is rounded
        out.append(None if grad is None else scaled(grad, factor, dtype, keep))
        del grad
    return out


class _WithGradients(torch.autograd.Function):
    """Return `loss` () with known gradients for `inputs`."""

    @staticmethod
    def forward(ctx, loss, later, *grads_and_inputs):
        half = len(grads_and_inputs) // 2
        stash_grads(ctx, grads_and_inputs[:half], [t.dtype for t in grads_and_inputs[half:]], later)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        saved = ctx.saved_tensors
        g = g.float()
        out = take_scaled_grads(ctx, saved, g if saved[0] is None else g * saved[0])
        return None, None, *[None] * len(out), *out


def with_gradients(loss, inputs, grads, later=None):
    """Return `loss` () with d loss / d inputs[k] = grads[k], times the number `later` () if given.

    This function owns the gradients from here on and overwrites them. Each is rounded to the dtype of its input after
    it is multiplied by the upstream gradient.
    """
    return _WithGradients.apply(loss, later, *grads, *inputs) if inputs else loss
