"""Linear layers with a LoRA: one layer as an autograd step, and the parts for layers that share an input.

`_Kept` saves what backward needs and computes the r-wide product. The output is computed after it, and the stub that it
returns carries the output's gradient back (`_autograd.py`).

Only gate and up of an MLP form a group. q, k and v are separate layers: sharing one backward pass gained 1.7% of a step
on an H200 (bf16 and NF4), and took twenty comparisons a call to know that nothing had changed between the three.

Shapes  x (T, K), W (N, K), y (T, N). An adapter has A (r, K), B (N, r) and h = x A^T (T, r). R is the sum of the ranks.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch

from ._autograd import computed, once_differentiable, records_graph, without_memory
from ._dispatch import no_autocast
from ._launch import as_dtype, as_matrix
from ._low_rank import factors_of, low_rank_gradients, parts_of, scaled_b, sum_of_parts, sum_of_products
from ._products import wide_product
from .dequantize import PackedWeight
from .frozen_float8 import Float8Weight, SharedRows, input_gradient

Weight: TypeAlias = torch.Tensor | Float8Weight | PackedWeight


class Adapter(NamedTuple):
    """The LoRA of one layer: A (r, K), B (N, r) and the scaling of their product."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


class Layer(NamedTuple):
    """A linear layer (K -> N): weight (N, K), bias (N,) or None, and its LoRA or None."""

    weight: Weight
    bias: torch.Tensor | None
    adapter: Adapter | None


class Form(NamedTuple):
    """Describe a group of layers, without its tensors.

    Attributes:
        scalings (`tuple`): The scaling of each layer's LoRA; None for a layer without one.
        dtype: Dtype of the products and of the results.
        parts (`int`): How many 16-bit numbers represent one r-wide factor, 1 or 2 (see `_low_rank.py`).
        frozen (`tuple`): Each layer's weight if it is a packed object instead of a tensor, else None.
    """

    scalings: tuple[float | None, ...]
    dtype: torch.dtype
    parts: int
    frozen: tuple[Float8Weight | PackedWeight | None, ...]

    def layers(self, tensors) -> list[Layer]:
        """Rebuild the layers from their flattened tensors: weight, bias, A, B of each."""
        layers = []
        for k, (scaling, frozen) in enumerate(zip(self.scalings, self.frozen, strict=True)):
            weight, bias, a, b = tensors[4 * k : 4 * k + 4]
            weight = weight if frozen is None else frozen
            layers.append(Layer(weight, bias, None if scaling is None else Adapter(a, b, scaling)))
        return layers


def flattened(layers: list[Layer]) -> list[torch.Tensor | None]:
    """Return the tensors of `layers` in the order of `Form.layers`, without packed weights."""
    tensors: list[torch.Tensor | None] = []
    for weight, bias, adapter in layers:
        tensors += (
            weight if isinstance(weight, torch.Tensor) else None,
            bias,
            *((None, None) if adapter is None else adapter[:2]),
        )
    return tensors


class Rounded(NamedTuple):
    """The adapters of a group in the dtype of its products, made once for both passes.

    Attributes:
        a: The A of all adapters, stacked: (R, K), or (2 R, K) in two parts.
        b (`list`): s B of each layer: (N, r), or (N, 2 r) in two parts; None for a layer without an adapter.
    """

    a: torch.Tensor | None
    b: list[torch.Tensor | None]


def rounded(layers: list[Layer], form: Form) -> Rounded:
    """Return `Rounded` of `layers`."""
    adapters = [layer.adapter for layer in layers]
    all_a = [adapter.a for adapter in adapters if adapter is not None]
    all_b = [
        None
        if adapter is None
        else scaled_b(adapter.b, factors_of(adapter.scaling, form.dtype)[0], form.dtype, form.parts)
        for adapter in adapters
    ]
    if not all_a:
        return Rounded(None, all_b)
    return Rounded(parts_of(all_a[0] if len(all_a) == 1 else torch.cat(all_a), form.dtype, form.parts, 0), all_b)


def low_rank(source: torch.Tensor, a: torch.Tensor | None, form: Form) -> torch.Tensor:
    """Return h (T, R) of all adapters side by side, from one product with `Rounded.a`; (T, 2 R) in two parts."""
    if a is None:
        return source.new_empty((source.shape[0], 0))
    if form.parts == 1:
        return torch.mm(source, a.t())
    return parts_of(sum_of_parts(wide_product(source, a.t()), 2, 1), form.dtype, 2, 1)


def _ranges(layers: list[Layer]) -> list[slice]:
    """Return which of the R columns of h belong to each layer."""
    ends = list(accumulate([0 if layer.adapter is None else layer.adapter.a.shape[0] for layer in layers]))
    return [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]


def columns_of(h: torch.Tensor, layers: list[Layer], form: Form) -> list[tuple[torch.Tensor, ...]]:
    """Return the columns of h of each layer: (rounded,), (rounded, rest), or () without an adapter."""
    parts = (h,) if form.parts == 1 else h.chunk(2, 1)
    if len(layers) == 1:  # all of h belongs to it
        return [() if layers[0].adapter is None else parts]
    columns: list[tuple[torch.Tensor, ...]] = []
    for layer, own in zip(layers, _ranges(layers), strict=True):
        if layer.adapter is None:
            columns.append(())
        else:
            columns.append(tuple([part[:, own] for part in parts]))
    return columns


def adapter_of_output(
    layer: Layer, h: tuple[torch.Tensor, ...], b: torch.Tensor | None, form: Form
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the factors (T, r) and (r, N) that a layer's adapter adds to y, from its `Rounded.b`; None without one."""
    if layer.adapter is None or b is None:
        return None
    of_h = factors_of(layer.adapter.scaling, form.dtype)[1]
    rounded_h = h[0] if of_h == 1.0 else h[0] * of_h
    rounded_b = b if form.parts == 1 else b[:, : h[0].shape[1]]
    return rounded_h, rounded_b.t()


def output(
    rows: SharedRows, layer: Layer, h: tuple[torch.Tensor, ...], b: torch.Tensor | None, form: Form
) -> torch.Tensor:
    """Return y (T, N) of one layer."""
    small = adapter_of_output(layer, h, b, form)
    bias = None if layer.bias is None else layer.bias.to(form.dtype)
    if isinstance(layer.weight, Float8Weight):  # its product cannot accumulate into an existing tensor
        y = rows.times(layer.weight, bias)
    elif isinstance(layer.weight, PackedWeight) and layer.weight.product is not None:
        y = layer.weight.product(rows.rows)
    else:
        return sum_of_products(small, ((rows.rows, layer.weight.to(form.dtype).t()),), bias)
    return y if small is None else y.addmm_(*small)


class Gradients(NamedTuple):
    """Gradients of a group that follow from the gradients of its outputs and from h.

    Attributes:
        dh: (T, R), in the dtype of the form; (T, 2 R) in two parts.
        large (`list`): Pairs of factors. Their products sum to the gradient of x, without the adapters' share. The
            second factor may still be packed.
        tensors (`list`): Gradients of the layers' tensors, in the order of `flattened`. None: not yet there.
    """

    dh: torch.Tensor
    large: list[tuple[torch.Tensor, Weight]]
    tensors: list[torch.Tensor | None]


def gradients(
    dys: list[torch.Tensor],
    h: torch.Tensor,
    layers: list[Layer],
    all_b: list[torch.Tensor | None],
    form: Form,
    needs: Sequence[bool],
) -> Gradients:
    """Compute dh, dB and db of a group from the gradients (T, N) of its outputs. `needs` selects the tensors."""
    tensors: list[torch.Tensor | None] = [None] * len(needs)
    dh = torch.empty_like(h)
    large = []
    ranges = _ranges(layers)
    for k, (dy, layer, columns) in enumerate(zip(dys, layers, columns_of(h, layers, form), strict=True)):
        own = dh if form.parts == 1 else dh.unflatten(1, (2, -1))
        own = own if len(layers) == 1 else own[..., ranges[k]]
        large.append((dy, layer.weight))
        if needs[4 * k + 1]:
            tensors[4 * k + 1] = dy.sum(0)
        if layer.adapter is not None:
            both = columns[0] if form.parts == 1 else torch.cat(columns, 1)
            scaling = layer.adapter.scaling
            db = low_rank_gradients(dy, both, all_b[k], own, form.parts, factors_of(scaling, form.dtype)[1], scaling)
            if needs[4 * k + 3]:
                tensors[4 * k + 3] = db
    return Gradients(dh, large, tensors)


def add_gradients_of_factors(grads: Gradients, dys, rows, source, layers: list[Layer], form: Form, needs) -> None:
    """Add dA and dW of a group to `grads.tensors`. They need its input; `source` is the input of the adapters."""
    for k, dy in enumerate(dys):
        if needs[4 * k]:
            grads.tensors[4 * k] = torch.mm(dy.t(), rows)
    if not any(needs[2::4]):
        return
    da = sum_of_parts(wide_product(grads.dh.t(), source), form.parts, 0)
    for k, own in enumerate(_ranges(layers)):
        if needs[4 * k + 2]:
            grads.tensors[4 * k + 2] = da if len(layers) == 1 else da[own]


def adapters_part(grads: Gradients, a: torch.Tensor | None, form: Form) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return dh and A, the factors of the adapters' share of dx, from `Rounded.a`; None without adapters."""
    if a is None or form.parts == 1:
        return None if a is None else (grads.dh, a)
    rank = a.shape[0] // form.parts
    return grads.dh[:, :rank], a[:rank]


def gradient_of_input(small: tuple[torch.Tensor, torch.Tensor] | None, grads: Gradients) -> torch.Tensor:
    """Return dx (T, K): the products in `grads.large`, plus the adapters' share `small` if there is one."""
    of_float8 = [(dy, weight) for dy, weight in grads.large if isinstance(weight, Float8Weight)]
    others = (
        weight.of_gradient(dy) if isinstance(weight, PackedWeight) else (dy, as_dtype(weight, dy.dtype))
        for dy, weight in grads.large
        if not isinstance(weight, Float8Weight)
    )
    if not of_float8:
        return sum_of_products(small, others)
    dx = input_gradient(of_float8)
    for product in (*others, small):
        if product is not None:
            dx.addmm_(*product)
    return dx


def rounded_like(grads: list[torch.Tensor | None], tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return each gradient in the dtype of its tensor."""
    return [None if g is None or t is None else as_dtype(g, t.dtype) for g, t in zip(grads, tensors, strict=True)]


class _Kept(torch.autograd.Function):
    """Save what the backward pass of a layer needs, and return a stub without memory for its output."""

    @staticmethod
    def forward(ctx, form, layers, made, x, source, *tensors):
        factors = rounded(layers, form)
        rows = as_matrix(x, form.dtype)
        h = low_rank(rows if source is None else as_matrix(source, form.dtype), factors.a, form)
        made.append((rows, h, factors))
        ctx.save_for_backward(x, source, h, factors.a, *factors.b, *tensors)
        ctx.set_materialize_grads(False)
        ctx.form = form
        return without_memory((*x.shape[:-1], layers[0].weight.shape[0]), form.dtype, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 9
        x, source, h, a, b, *tensors = ctx.saved_tensors
        form = ctx.form
        needs_x, needs_source, *needs = ctx.needs_input_grad[3:]
        layers = form.layers(tensors)
        dx = None
        dsource = None
        with no_autocast(x.device.type):
            dys = [as_matrix(dy, form.dtype)]
            grads = gradients(dys, h, layers, [b], form, needs)
            rows = as_matrix(x, form.dtype)
            source_rows = rows if source is None else as_matrix(source, form.dtype)
            add_gradients_of_factors(grads, dys, rows, source_rows, layers, form, needs)
            small = adapters_part(grads, a, form)
            if needs_source:
                dsource = torch.mm(*small).view(x.shape).to(source.dtype)
            if needs_x:
                dx = gradient_of_input(small if source is None else None, grads).view(x.shape)
                dx = as_dtype(dx, x.dtype)
            return None, None, None, dx, dsource, *rounded_like(grads.tensors, tensors)


def output_of(x: torch.Tensor, source: torch.Tensor | None, layer: Layer, form: Form) -> torch.Tensor:
    """Compute the output y (..., N) of a layer with a LoRA. `source` is the adapter's input if it differs from x."""
    made: list[tuple[torch.Tensor, torch.Tensor, Rounded]] = []
    layers, stub = [layer], None
    with no_autocast(x.device.type):
        if records_graph():
            stub = _Kept.apply(form, layers, made, x, source, *flattened(layers))
        else:
            with torch.no_grad():
                factors = rounded(layers, form)
                rows = as_matrix(x, form.dtype)
                h = low_rank(rows if source is None else as_matrix(source, form.dtype), factors.a, form)
                made.append((rows, h, factors))
        rows, h, factors = made[0]
        compute = partial(output, SharedRows(rows), layer, columns_of(h, layers, form)[0], factors.b[0], form)
        return computed(compute, x.shape[:-1], stub)
