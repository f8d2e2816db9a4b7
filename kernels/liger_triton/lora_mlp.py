"""A gated MLP whose projections have a LoRA: down(act(gate(x)) * up(x)), each of the three as in `lora_linear`.

    g, u = gate(x), up(x);  a = act(g) * u;  y = down(a)

Shapes  x (..., K), gate and up (I, K), down (N, I); a LoRA on one of them or more, of any ranks.
Dtypes  As in `lora_linears` and `swiglu`.
Bytes   b per element of the width I, beside the large products: forward reads g and u and writes a, and reads a for
        the adapter of down. Backward reads da, g and u, and writes dg, du and a in their place; and reads each of these
        three once. The adapters of gate and up, and that of the gradient of a, are added in these passes
        (`lora_gate.py`), but for ranks above 64 and fp32: there each is a pass that writes and reads once more. Kept
        for backward: x, g, u, and what is r wide. a is not kept: it comes with dg and du from one pass. No other tensor
        of the width I is alive in the backward pass than these three.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import reference
from ._dispatch import no_autocast, once_differentiable
from ._lora import (
    Form,
    Layer,
    Rounded,
    adapter_of_output,
    adapters_part,
    add_gradients_of_factors,
    as_matrix,
    columns_of,
    computed,
    flattened,
    gradient_of_input,
    gradients,
    in_shape,
    low_rank,
    output,
    rounded,
    rounded_like,
    without_memory,
)
from .frozen_float8 import SharedRows
from .geglu import geglu
from .geglu import gradients_and_product as geglu_gradients
from .lora_gate import Product, gate_of_sums, gradients_of_sums, takes
from .lora_linear import Lora, Weight, as_tensors, checked_layers, form_of, runs_as_twin
from .swiglu import gradients_and_product as swiglu_gradients
from .swiglu import swiglu

Sums = tuple[Product | None, Product | None]
Projection = tuple[Weight, torch.Tensor | None, Lora | None]


class Gate(NamedTuple):
    """act(gate) * up: (g, u) -> a, and (da, g, u) -> (dg, du, a), which may be written over da, g and u."""

    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    gradients: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


ACTIVATIONS = {
    "silu": Gate(swiglu, functools.partial(swiglu_gradients, reuse=True)),
    "gelu_tanh": Gate(
        functools.partial(geglu, approximate="tanh"), functools.partial(geglu_gradients, tanh=True, reuse=True)
    ),
    "gelu": Gate(
        functools.partial(geglu, approximate="none"), functools.partial(geglu_gradients, tanh=False, reuse=True)
    ),
}


class Plan(NamedTuple):
    """How an MLP is computed, beside its tensors.

    Attributes:
        forms (`tuple`): Of the group of gate and up, and of down.
        activation (`str`): A key of `ACTIVATIONS`.
        adds_in_gate (`bool`): Whether the adapters of gate and up are added in the gate. The g and u that are kept are
            without them then.
    """

    forms: tuple[Form, Form]
    activation: str
    adds_in_gate: bool

    def sums(self, layers: list[Layer], h: torch.Tensor, all_b: list[torch.Tensor | None]) -> Sums:
        """What the gate adds to g and to u."""
        if not self.adds_in_gate:
            return None, None
        form, columns = self.forms[0], columns_of(h, layers, self.forms[0])
        to_g, to_u = (adapter_of_output(*of_one, form) for of_one in zip(layers, columns, all_b, strict=True))
        return to_g, to_u

    def product(self, g: torch.Tensor, u: torch.Tensor, sums: Sums) -> torch.Tensor:
        """a of the g and u that are kept."""
        if sums == (None, None):
            return ACTIVATIONS[self.activation].product(g, u)
        return gate_of_sums(g, u, *sums, self.activation)

    def gradients(
        self, da: torch.Tensor, g: torch.Tensor, u: torch.Tensor, to_da: Product | None, sums: Sums
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dg, du, a), where `to_da` is a product that is missing in `da`."""
        if to_da is None and sums == (None, None):
            return ACTIVATIONS[self.activation].gradients(da, g, u)
        return gradients_of_sums(da, g, u, to_da, *sums, self.activation)


class _Inner(NamedTuple):
    """What is known of an MLP before its down projection."""

    g: torch.Tensor
    u: torch.Tensor
    a: torch.Tensor
    h: torch.Tensor
    h_down: torch.Tensor
    factors: Rounded
    factors_down: Rounded


def _inner(x: torch.Tensor, layers: list[Layer], plan: Plan) -> _Inner:
    form, form_down = plan.forms
    rows, inner = as_matrix(x, form.dtype), layers[:2]
    factors, factors_down = rounded(inner, form), rounded(layers[2:], form_down)
    h, shared = low_rank(rows, factors.a, form), SharedRows(rows)
    own = [(), ()] if plan.adds_in_gate else columns_of(h, inner, form)
    all_b = [None, None] if plan.adds_in_gate else factors.b
    g, u = (output(shared, *of_one, form) for of_one in zip(inner, own, all_b, strict=True))
    a = plan.product(g, u, plan.sums(inner, h, factors.b))
    return _Inner(g, u, a, h, low_rank(a, factors_down.a, form_down), factors, factors_down)


class _KeptMLP(torch.autograd.Function):
    """Keeps what the backward pass of an MLP needs, and returns a tensor without memory in place of its output."""

    @staticmethod
    def forward(ctx, plan, made, x, *tensors):
        form, form_down = plan.forms
        layers = [*form.layers(tensors[:8]), *form_down.layers(tensors[8:])]
        inner = _inner(x, layers, plan)
        made.append(inner)
        of_both = (inner.factors.a, *inner.factors.b, inner.factors_down.a, *inner.factors_down.b)
        ctx.save_for_backward(x, inner.g, inner.u, inner.h, inner.h_down, *of_both, *tensors)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        return without_memory((*x.shape[:-1], layers[2].weight.shape[0]), form_down.dtype, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 15
        x, g, u, h, h_down, a_inner, b_gate, b_up, a_down, b_down, *tensors = ctx.saved_tensors
        form, form_down = ctx.plan.forms
        needs_x, *needs = ctx.needs_input_grad[2:]
        inner, down = form.layers(tensors[:8]), form_down.layers(tensors[8:])
        with no_autocast(x.device.type):
            dy, b_inner = as_matrix(dy, form.dtype), [b_gate, b_up]
            of_down = gradients([dy], h_down, down, [b_down], form_down, needs[8:])
            sums = ctx.plan.sums(inner, h, b_inner)
            if not (needs_x or any(needs[:8])):
                a = ctx.plan.product(g, u, sums)
                add_gradients_of_factors(of_down, [dy], a, a, down, form_down, needs[8:])
                return (None,) * 11 + tuple(rounded_like(of_down.tensors, tensors[8:]))
            to_da = adapters_part(of_down, a_down, form_down)
            adds_to_da = to_da is not None and g.numel() > 0 and takes(form.dtype, x, [to_da[0].shape[1]])
            da = gradient_of_input(None if adds_to_da else to_da, of_down)
            dg, du, a = ctx.plan.gradients(da, g, u, to_da if adds_to_da else None, sums)
            del g, u, da
            add_gradients_of_factors(of_down, [dy], a, a, down, form_down, needs[8:])
            del a
            found = gradients([dg, du], h, inner, b_inner, form, needs[:8])
            rows = as_matrix(x, form.dtype)
            add_gradients_of_factors(found, [dg, du], rows, rows, inner, form, needs[:8])
            dx = None
            if needs_x:
                dx = gradient_of_input(adapters_part(found, a_inner, form), found).view(x.shape).to(x.dtype)
            return None, None, dx, *rounded_like(found.tensors + of_down.tensors, tensors)


def lora_mlp(
    x: torch.Tensor, gate: Projection, up: Projection, down: Projection, *, activation: str = "silu"
) -> torch.Tensor:
    """down(act(gate(x)) * up(x)) with a LoRA on the projections, differentiable in all tensors.

    Args:
        x (`torch.Tensor`): (..., K); bf16, fp16 or fp32 (float64: the PyTorch twin).
        gate, up (`tuple`): (weight (I, K), bias (I,) or None, lora or None), with `weight` and `lora` as in
            `lora_linear`.
        down (`tuple`): The same, with weight (N, I).
        activation (`str`, *optional*, defaults to `"silu"`): `"silu"`, `"gelu_tanh"`, or `"gelu"` for the exact one.

    Returns:
        `torch.Tensor` (..., N) in the dtype of `x`, under autocast in that of autocast. It runs without Triton too.

    Raises:
        ValueError: A shape, dtype or device does not fit, `activation` is unknown, or no projection has a LoRA.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; expected one of {', '.join(map(repr, ACTIVATIONS))}.")
    projections = [gate, up, down]
    if not any(lora is not None for _, _, lora in projections):
        raise ValueError("no projection has a lora; use torch.nn.functional.linear and liger_triton.swiglu.")
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
    plan = Plan(forms, activation, takes(forms[0].dtype, x, ranks) and x.numel() > 0)

    def compute() -> torch.Tensor:
        known = made.pop() if made else _inner(x, [*inner, *outer], plan)
        h = columns_of(known.h_down, outer, forms[1])[0]
        y = output(SharedRows(known.a), outer[0], h, known.factors_down.b[0], forms[1])
        return in_shape(y, (*x.shape[:-1], y.shape[1]))

    with no_autocast(x.device.type):
        if not torch.is_grad_enabled():
            return compute()
        stub = _KeptMLP.apply(plan, made, x, *flattened(inner), *flattened(outer))
        return computed((stub,), compute)
