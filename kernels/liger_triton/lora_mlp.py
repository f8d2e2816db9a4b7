"""A gated MLP, down(act(gate(x)) * up(x)), with an optional LoRA on each of its projections (see `lora_linear`).

    g, u = gate(x), up(x);  a = act(g) * u;  y = down(a)

Shapes  x (..., K), gate and up (I, K), down (N, I); a LoRA on any of them, of any ranks.
Dtypes  As in `lora_linear` and `swiglu`.
Bytes   b per element of the width I, apart from large products: forward reads g, u and a, and writes a. Backward reads
        da, g and u, writes dg, du and a in their place, and reads each of these once. The adapters are added in these
        passes (`gates.py`), but for ranks above 64 and fp32. Kept for backward: x, g, u, and what is r wide.
Slices  If g has more than `SLICE_ABOVE` bytes, both passes process slices of the rows, with at most `SLICE_BYTES` of g
        each. Kept for backward: x. Backward recomputes g and u slice by slice and sums the gradients of weights in
        fp32. Nothing is sliced if the product of a packed weight mixes rows.
"""

from typing import NamedTuple

import torch

from . import _lora, reference
from ._autograd import computed, once_differentiable, records_graph, without_memory
from ._dispatch import no_autocast, result_dtype
from ._launch import as_dtype, as_matrix, cdiv, not_among
from ._lora import Form, Layer, Rounded
from .dequantize import PackedWeight
from .frozen_float8 import Float8Weight, SharedRows
from .gates import ACTIVATIONS, Product, gate_of_sums, gradients_of_sums, takes
from .lora_linear import Lora, Weight, as_tensors, checked_layers, form_of, runs_as_twin

Sums = tuple[Product | None, Product | None]
Projection = tuple[Weight, torch.Tensor | None, Lora | None]
Factors = tuple[Rounded, Rounded]  # for the group of gate and up, and for down

# For 131,072 tokens of a Llama-3-8B, g, u and da take 10.5 GiB at once, and 0.8 GiB in slices of 9,472 rows. Under
# checkpointing, slices add no work: the recomputation of the layer stops before the MLP.
SLICE_ABOVE = 1 << 30
SLICE_BYTES = 256 << 20
SLICE_UNIT = 128  # slices have a multiple of this many rows


def goes_in_slices(x: torch.Tensor, width: int) -> bool:
    """Return whether an MLP of this inner width processes the rows of `x` in slices."""
    return x.shape[:-1].numel() * width * result_dtype(x).itemsize > SLICE_ABOVE


class MLPForm(NamedTuple):
    """Describe how an MLP is computed, without its tensors.

    Attributes:
        forms (`tuple`): The forms of the group of gate and up, and of down.
        activation (`str`): One of `ACTIVATIONS`.
        adds_in_gate (`bool`): Add the adapters of gate and up inside the gate kernel. The saved g and u then lack them.
    """

    forms: tuple[Form, Form]
    activation: str
    adds_in_gate: bool

    def layers(self, tensors) -> list[Layer]:
        """Rebuild the three projections from their flattened tensors."""
        return [*self.forms[0].layers(tensors[:8]), *self.forms[1].layers(tensors[8:])]

    def slices(self, rows: int, layers: list[Layer]) -> list[slice]:
        """Return the rows that are computed together: one slice if g is small, or if rows depend on one another."""
        row = layers[0].weight.shape[0] * self.forms[0].dtype.itemsize
        by_row = all(layer.weight.by_row for layer in layers if isinstance(layer.weight, PackedWeight))
        if rows * row <= SLICE_ABOVE or not by_row:
            return [slice(rows)]
        each = cdiv(cdiv(rows, cdiv(rows * row, SLICE_BYTES)), SLICE_UNIT) * SLICE_UNIT
        return [slice(start, min(rows, start + each)) for start in range(0, rows, each)]

    def sums(self, layers: list[Layer], h: torch.Tensor, all_b: list[torch.Tensor | None]) -> Sums:
        """Return what the gate kernel adds to g and to u."""
        if not self.adds_in_gate:
            return None, None
        form = self.forms[0]
        columns = _lora.columns_of(h, layers, self.forms[0])
        to_g, to_u = (_lora.adapter_of_output(*of_one, form) for of_one in zip(layers, columns, all_b, strict=True))
        return to_g, to_u


class _Inner(NamedTuple):
    """The state of an MLP before its down projection. Backward recomputes a."""

    g: torch.Tensor
    u: torch.Tensor
    a: torch.Tensor | None
    h: torch.Tensor
    h_down: torch.Tensor


def _factors(layers: list[Layer], mlp: MLPForm) -> Factors:
    return _lora.rounded(layers[:2], mlp.forms[0]), _lora.rounded(layers[2:], mlp.forms[1])


def _inner(rows: torch.Tensor, layers: list[Layer], mlp: MLPForm, factors: Factors) -> _Inner:
    form = mlp.forms[0]
    inner = layers[:2]
    of_inner, of_down = factors
    h = _lora.low_rank(rows, of_inner.a, form)
    shared = SharedRows(rows)
    own = [(), ()] if mlp.adds_in_gate else _lora.columns_of(h, inner, form)
    all_b = [None, None] if mlp.adds_in_gate else of_inner.b
    g, u = (_lora.output(shared, *of_one, form) for of_one in zip(inner, own, all_b, strict=True))
    a = gate_of_sums(g, u, *mlp.sums(inner, h, of_inner.b), mlp.activation)
    return _Inner(g, u, a, h, _lora.low_rank(a, of_down.a, mlp.forms[1]))


def _output(inner: _Inner, down: list[Layer], factors: Factors, mlp: MLPForm) -> torch.Tensor:
    form = mlp.forms[1]
    h = _lora.columns_of(inner.h_down, down, form)[0]
    return _lora.output(SharedRows(inner.a), down[0], h, factors[1].b[0], form)


def _gradients(
    rows: torch.Tensor,
    dy: torch.Tensor,
    inner: _Inner,
    layers: list[Layer],
    mlp: MLPForm,
    factors: Factors,
    needs_x: bool,
    needs: list[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Return dx or None, and the gradients of the tensors of `layers`. It overwrites g and u and does not read a."""
    form, form_down = mlp.forms
    of_inner, factors_down = factors
    both = layers[:2]
    down = layers[2:]
    g, u, _, h, h_down = inner
    of_down = _lora.gradients([dy], h_down, down, factors_down.b, form_down, needs[8:])
    sums = mlp.sums(both, h, of_inner.b)
    if not (needs_x or any(needs[:8])):
        a = gate_of_sums(g, u, *sums, mlp.activation)
        _lora.add_gradients_of_factors(of_down, [dy], a, a, down, form_down, needs[8:])
        return None, [None] * 8 + of_down.tensors
    to_da = _lora.adapters_part(of_down, factors_down.a, form_down)
    adds_to_da = to_da is not None and g.numel() > 0 and takes(form.dtype, rows, [to_da[0].shape[1]])
    # The gate kernel adds the adapter's part of da in registers; a pass of its own would read and write da once more.
    da = _lora.gradient_of_input(None if adds_to_da else to_da, of_down)
    dg, du, a = gradients_of_sums(da, g, u, to_da if adds_to_da else None, *sums, mlp.activation)
    del da  # g, u and da are the largest tensors of the pass: free each as soon as it is read
    _lora.add_gradients_of_factors(of_down, [dy], a, a, down, form_down, needs[8:])
    del a
    grads = _lora.gradients([dg, du], h, both, of_inner.b, form, needs[:8])
    _lora.add_gradients_of_factors(grads, [dg, du], rows, rows, both, form, needs[:8])
    dx = _lora.gradient_of_input(_lora.adapters_part(grads, of_inner.a, form), grads) if needs_x else None
    return dx, grads.tensors + of_down.tensors


class _KeptMLP(torch.autograd.Function):
    """Save what the backward pass of an MLP needs, and return a stub without memory for its output."""

    @staticmethod
    def forward(ctx, mlp, made, x, *tensors):
        layers = mlp.layers(tensors)
        factors = _factors(layers, mlp)
        inner = _inner(as_matrix(x, mlp.forms[0].dtype), layers, mlp, factors)
        made.append((inner, factors))
        of_both = (factors[0].a, *factors[0].b, factors[1].a, *factors[1].b)
        ctx.save_for_backward(x, inner.g, inner.u, inner.h, inner.h_down, *of_both, *tensors)
        ctx.set_materialize_grads(False)
        ctx.mlp = mlp
        return without_memory((*x.shape[:-1], layers[2].weight.shape[0]), mlp.forms[1].dtype, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 15
        x, g, u, h, h_down, a_inner, b_gate, b_up, a_down, b_down, *tensors = ctx.saved_tensors
        factors = (Rounded(a_inner, [b_gate, b_up]), Rounded(a_down, [b_down]))
        dtype = ctx.mlp.forms[0].dtype
        needs_x, *needs = ctx.needs_input_grad[2:]
        inner = _Inner(g, u, None, h, h_down)
        with no_autocast(x.device.type):
            given = as_matrix(x, dtype), as_matrix(dy, dtype), inner, ctx.mlp.layers(tensors)
            dx, grads = _gradients(*given, ctx.mlp, factors, needs_x, needs)
            dx = None if dx is None else as_dtype(dx.view(x.shape), x.dtype)
            return None, None, dx, *_lora.rounded_like(grads, tensors)


class _SlicedMLP(torch.autograd.Function):
    """Save only the input of an MLP, and return a stub without memory for its output."""

    @staticmethod
    def forward(ctx, mlp, x, *tensors):
        ctx.save_for_backward(x, *tensors)
        ctx.set_materialize_grads(False)
        ctx.mlp = mlp
        return without_memory((*x.shape[:-1], mlp.layers(tensors)[2].weight.shape[0]), mlp.forms[1].dtype, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 14
        x, *tensors = ctx.saved_tensors
        mlp, (needs_x, *needs) = ctx.mlp, ctx.needs_input_grad[1:]
        with no_autocast(x.device.type):
            rows = as_matrix(x, mlp.forms[0].dtype)
            dy = as_matrix(dy, mlp.forms[0].dtype)
            layers = _unpacked(mlp.layers(tensors), mlp)
            total = [None] * len(tensors)
            factors = _factors(layers, mlp)
            dx = torch.empty_like(rows) if needs_x else None
            for own in mlp.slices(len(rows), layers):
                inner = _inner(rows[own], layers, mlp, factors)
                of_slice, grads = _gradients(rows[own], dy[own], inner, layers, mlp, factors, needs_x, needs)
                del inner
                if dx is not None:
                    dx[own] = of_slice
                del of_slice
                for k, t in enumerate(grads):
                    if t is not None:
                        total[k] = t.float() if total[k] is None else total[k].add_(t)
            dx = None if dx is None else dx.view(x.shape).to(x.dtype)
            return None, dx, *_lora.rounded_like(total, tensors)


def _unpacked(layers: list[Layer], mlp: MLPForm) -> list[Layer]:
    """Return `layers` with matrices in the dtype of the products. Otherwise each slice would unpack or convert them."""

    def unpacked(layer: Layer) -> Layer:
        weight = layer.weight
        if isinstance(weight, Float8Weight) or (isinstance(weight, PackedWeight) and weight.product is not None):
            return layer
        return layer._replace(weight=weight.to(mlp.forms[0].dtype))

    return [unpacked(layer) for layer in layers]


def _sliced(x: torch.Tensor, layers: list[Layer], mlp: MLPForm) -> torch.Tensor:
    """Return y (T, N), computed slice by slice."""
    layers = _unpacked(layers, mlp)
    rows = as_matrix(x, mlp.forms[0].dtype)
    factors = _factors(layers, mlp)
    y = rows.new_empty((len(rows), layers[2].weight.shape[0]))
    for own in mlp.slices(len(rows), layers):
        y[own] = _output(_inner(rows[own], layers, mlp, factors), layers[2:], factors, mlp)
    return y


def lora_mlp(
    x: torch.Tensor, gate: Projection, up: Projection, down: Projection, *, activation: str = "silu"
) -> torch.Tensor:
    """Compute down(act(gate(x)) * up(x)) with an optional LoRA on each projection, differentiable in all tensors.

    Args:
        x (`torch.Tensor`): (..., K); bf16, fp16 or fp32 (float64: the PyTorch twin).
        gate, up (`tuple`): (weight (I, K), bias (I,) or None, lora or None), with `weight` and `lora` as in
            `lora_linear`.
        down (`tuple`): The same, with weight (N, I).
        activation (`str`, *optional*, defaults to `"silu"`): `"silu"`, `"gelu_tanh"`, or `"gelu"` for the exact one.

    Returns:
        `torch.Tensor` (..., N) in the dtype of `x`, or in the autocast dtype. It runs without Triton too.

    Raises:
        ValueError: A shape, dtype or device does not fit, or `activation` is unknown.
    """
    if activation not in ACTIVATIONS:
        raise not_among("activation", activation, ACTIVATIONS)
    projections = [gate, up, down]
    inner = checked_layers(x, projections[:2])
    if gate[0].shape != up[0].shape or down[0].ndim != 2 or down[0].shape[1] != up[0].shape[0]:
        shapes = [tuple(weight.shape) for weight, _, _ in projections]
        raise ValueError("the weights are gate {}, up {}, down {}; expected (I, K), (I, K), (N, I).".format(*shapes))
    width = x.new_empty((0, up[0].shape[0]))
    outer = checked_layers(width, [down])
    if runs_as_twin(x, [*inner, *outer]):
        return reference.lora_mlp(x, *as_tensors(projections, x), activation=activation)
    forms, made = (form_of(x, inner), form_of(x, outer)), []
    ranks = [0 if lora is None else lora[0].shape[0] for _, _, lora in projections[:2]]
    mlp = MLPForm(forms, activation, takes(forms[0].dtype, x, ranks) and x.numel() > 0)

    layers = [*inner, *outer]
    sliced = len(mlp.slices(x.shape[:-1].numel(), layers)) > 1

    def compute() -> torch.Tensor:
        if sliced:
            return _sliced(x, layers, mlp)
        if not made:
            factors = _factors(layers, mlp)
            made.append((_inner(as_matrix(x, forms[0].dtype), layers, mlp, factors), factors))
        known, factors = made.pop()
        return _output(known, outer, factors, mlp)

    with no_autocast(x.device.type):
        tensors = (*_lora.flattened(inner), *_lora.flattened(outer))
        stub = None
        if records_graph():
            stub = _SlicedMLP.apply(mlp, x, *tensors) if sliced else _KeptMLP.apply(mlp, made, x, *tensors)
        return computed(compute, x.shape[:-1], stub)
