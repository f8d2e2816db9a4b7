"""A gated MLP of any width, at the speed of a width that is a multiple of 16 bytes: down(act(gate(x)) * up(x)).

cuBLAS has fast kernels for 16-bit matrices whose rows are multiples of 16 bytes ("Tensor Core Usage" in its
documentation). Of a width of 3420, as in the tower of Qwen2.5-VL-3B, none of the nine products is: on an H100 each
takes three times as long. Here the three weights are copied into wider ones with zeros at the ends, for each pass
anew. Zeros add nothing, so that results are the same. Gate and up become one product.

Shapes  x (..., K), gate and up (I, K), down (N, I), each with a bias or without. P is I, rounded up to 16 bytes.
Dtypes  bf16, fp16, fp32: that of autocast, else that of x. Weights of another dtype are converted as they are copied.
Bytes   b per element, apart from products: a copy of the weights is 2b (2IK + IN), in the forward and in the backward
        pass, and lasts as long as that. Kept for backward: x, and gate(x) and up(x) of width P. The gradients of gate
        and up are slices of one tensor.
"""

from typing import NamedTuple

import torch

from . import reference
from ._autograd import computed, once_differentiable, records_graph, without_memory
from ._dispatch import is_float64, jit, no_autocast, result_dtype, tl, use_triton
from ._launch import as_matrix, check_in, launch
from .gates import TWINS, gate_of_sums, gradients_of_sums
from .halves import joined

Projection = tuple[torch.Tensor, torch.Tensor | None]


class _Wide(NamedTuple):
    """Weights with zeros at the ends: gate and up (2P, K) and their bias (2P,), and down (N, P)."""

    inner: torch.Tensor
    bias: torch.Tensor | None
    outer: torch.Tensor


@jit
def _copy_row(SOURCE, TARGET, columns, wide, BLOCK: tl.constexpr):
    """Copy `columns` elements, and zeros up to `wide`."""
    for begin in range(0, wide, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(SOURCE + column, mask=column < columns, other=0.0)
        tl.store(TARGET + column, x.to(TARGET.dtype.element_ty), mask=column < wide)


@jit
def _widen_kernel(
    GATE, UP, DOWN, GATE_BIAS, UP_BIAS, INNER, BIAS, OUTER, k, width, wide,
    HAS_GATE_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program copies a row: those of gate and up come first, each with as many of zeros as are missing."""
    row = tl.program_id(0).to(tl.int64)
    if row < wide:
        there = tl.where(row < width, 1, 0)
        _copy_row(GATE + row * k, INNER + row * k, there * k, k, BLOCK)
        if HAS_BIAS:
            _copy_row(GATE_BIAS + row, BIAS + row, there * HAS_GATE_BIAS, 1, 16)
    elif row < 2 * wide:
        source = row - wide
        there = tl.where(source < width, 1, 0)
        _copy_row(UP + source * k, INNER + row * k, there * k, k, BLOCK)
        if HAS_BIAS:
            _copy_row(UP_BIAS + source, BIAS + row, there * HAS_UP_BIAS, 1, 16)
    else:
        source = row - 2 * wide
        _copy_row(DOWN + source * width, OUTER + source * wide, width, wide, BLOCK)


def _widened(tensors: tuple[torch.Tensor | None, ...], dtype: torch.dtype) -> _Wide:
    gate, gate_bias, up, up_bias, down, _ = tensors
    assert gate is not None and up is not None and down is not None
    width, k = gate.shape
    wide = wide_of(width, dtype)
    inner, outer = (gate.new_empty(shape, dtype=dtype) for shape in ((2 * wide, k), (down.shape[0], wide)))
    biased = gate_bias is not None or up_bias is not None
    bias = gate.new_empty(2 * wide, dtype=dtype) if biased else None
    launch(
        _widen_kernel, (2 * wide + down.shape[0],),
        gate, up, down, gate if gate_bias is None else gate_bias, up if up_bias is None else up_bias, inner,
        inner if bias is None else bias, outer, k, width, wide,
        HAS_GATE_BIAS=int(gate_bias is not None), HAS_UP_BIAS=int(up_bias is not None), HAS_BIAS=biased, BLOCK=1024,
    )  # fmt: skip
    return _Wide(inner, bias, outer)


def wide_of(width: int, dtype: torch.dtype) -> int:
    """`width`, rounded up to a multiple of 16 bytes."""
    step = 16 // dtype.itemsize
    return -(-width // step) * step


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _inner(x, wide: _Wide, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate and up (T, 2P), their product (T, P))."""
    both = _product(x, wide.inner, wide.bias)
    g, u = both.chunk(2, 1)
    return both, gate_of_sums(g, u, None, None, activation)


class _KeptMLP(torch.autograd.Function):
    """Keeps what the backward pass needs, and returns a tensor without memory in place of the output."""

    @staticmethod
    def forward(ctx, activation, dtype, made, x, *tensors):
        wide = _widened(tensors, dtype)
        both, a = _inner(as_matrix(x, dtype), wide, activation)
        made.append((a, wide))
        ctx.save_for_backward(x, both, *tensors)
        ctx.set_materialize_grads(False)
        ctx.activation, ctx.dtype = activation, dtype
        return without_memory((*x.shape[:-1], wide.outer.shape[0]), dtype, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 10
        x, both, *tensors = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad[3:]
        with no_autocast(x.device.type):
            rows, dy, wide = as_matrix(x, ctx.dtype), as_matrix(dy, ctx.dtype), _widened(tensors, ctx.dtype)
            width, places = tensors[0].shape[0], wide.outer.shape[1]
            da = torch.mm(dy, wide.outer)
            g, u = both.chunk(2, 1)
            dg, du, a = gradients_of_sums(da, g, u, None, None, None, ctx.activation)
            of_down = torch.mm(dy.t(), a)[:, :width] if needs[4] else None
            of_down_bias = dy.sum(0) if needs[5] else None
            del da, a
            d_both = joined(dg, du)
            d_both = torch.cat((dg, du), 1) if d_both is None else d_both
            of_inner = torch.mm(d_both.t(), rows) if needs[0] or needs[2] else None
            of_bias = d_both.sum(0) if needs[1] or needs[3] else None
            found = [of_inner, of_bias, of_inner, of_bias, of_down, of_down_bias]
            for i, begin in enumerate((0, 0, places, places)):
                found[i] = found[i][begin : begin + width] if needs[i] else None  # type: ignore[index]
            dx = torch.mm(d_both, wide.inner).view(x.shape).to(x.dtype) if needs_x else None
            of_tensors = [None if d is None else d.to(t.dtype) for d, t in zip(found, tensors, strict=True)]
            return None, None, None, dx, *of_tensors


def aligned_mlp(
    x: torch.Tensor, gate: Projection, up: Projection, down: Projection, *, activation: str = "silu"
) -> torch.Tensor:
    """down(act(gate(x)) * up(x)), with products as fast as of a width of whole 16 bytes; differentiable in all tensors.

    Args:
        x (`torch.Tensor`): (..., K); bf16, fp16 or fp32 (float64: the PyTorch twin).
        gate, up (`tuple`): (weight (I, K), bias (I,) or None), contiguous.
        down (`tuple`): (weight (N, I), bias (N,) or None), contiguous.
        activation (`str`, *optional*, defaults to `"silu"`): `"silu"`, `"gelu_tanh"`, or `"gelu"` for the exact one.

    Returns:
        `torch.Tensor` (..., N) in the dtype of `x`, under autocast in that of autocast.

    Raises:
        ValueError: A shape does not fit, or `activation` is unknown.
    """
    check_in("activation", activation, TWINS)
    (gate_weight, _), (up_weight, _), (down_weight, down_bias) = gate, up, down
    fits = gate_weight.ndim == down_weight.ndim == 2 and gate_weight.shape == up_weight.shape
    if not fits or down_weight.shape[1] != gate_weight.shape[0] or x.shape[-1] != gate_weight.shape[1]:
        shapes = [tuple(t.shape) for t in (x, gate_weight, up_weight, down_weight)]
        raise ValueError(
            "x is {}, the weights are gate {}, up {}, down {}; expected (..., K), (I, K), (I, K), (N, I).".format(
                *shapes
            )
        )
    tensors = (*gate, *up, *down)
    if is_float64(x, *tensors) or not use_triton(x) or x.numel() == 0:
        return reference.aligned_mlp(x, gate, up, down, activation=activation)
    dtype, made = result_dtype(x), []

    def compute() -> torch.Tensor:
        if not made:
            wide = _widened(tensors, dtype)
            made.append((_inner(as_matrix(x, dtype), wide, activation)[1], wide))
        a, wide = made.pop()
        return _product(a, wide.outer, None if down_bias is None else down_bias.to(dtype))

    with no_autocast(x.device.type):
        stub = _KeptMLP.apply(activation, dtype, made, x, *tensors) if records_graph() else None
        return computed(compute, x.shape[:-1], stub)
