"""A gated MLP whose projections have a LoRA: down(act(gate(x)) * up(x)), each of the three as in `lora_linear`.

    g, u = gate(x), up(x);  a = act(g) * u;  y = down(a)

Shapes  x (..., K), gate and up (I, K), down (N, I); a LoRA on one of them or more, of any ranks.
Dtypes  As in `lora_linears` and `swiglu`.
Bytes   b per element of the width I, apart from large products: forward reads g, u and a, and writes a. Backward reads
        da, g and u, writes dg, du and a in their place, and reads each of these once. The adapters are added in these
        passes (`gates.py`), but for ranks above 64 and fp32. Kept for backward: x, g, u, and what is r wide.
"""

from typing import NamedTuple

import torch

from . import _lora, reference
from ._autograd import computed, once_differentiable, records_graph, without_memory
from ._dispatch import no_autocast
from ._launch import as_matrix, check_in
from ._lora import Form, Layer, Rounded
from .frozen_float8 import SharedRows
from .gates import TWINS, Product, gate_of_sums, gradients_of_sums, takes
from .lora_linear import Lora, Weight, as_tensors, checked_layers, form_of, runs_as_twin

Sums = tuple[Product | None, Product | None]
Projection = tuple[Weight, torch.Tensor | None, Lora | None]


class Plan(NamedTuple):
    """How an MLP is computed, apart from its tensors.

    Attributes:
        forms (`tuple`): Of the group of gate and up, and of down.
        activation (`str`): A key of `TWINS`.
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
        form, columns = self.forms[0], _lora.columns_of(h, layers, self.forms[0])
        to_g, to_u = (_lora.adapter_of_output(*of_one, form) for of_one in zip(layers, columns, all_b, strict=True))
        return to_g, to_u


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
    factors, factors_down = _lora.rounded(inner, form), _lora.rounded(layers[2:], form_down)
    h, shared = _lora.low_rank(rows, factors.a, form), SharedRows(rows)
    own = [(), ()] if plan.adds_in_gate else _lora.columns_of(h, inner, form)
    all_b = [None, None] if plan.adds_in_gate else factors.b
    g, u = (_lora.output(shared, *of_one, form) for of_one in zip(inner, own, all_b, strict=True))
    a = gate_of_sums(g, u, *plan.sums(inner, h, factors.b), plan.activation)
    return _Inner(g, u, a, h, _lora.low_rank(a, factors_down.a, form_down), factors, factors_down)


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
            of_down = _lora.gradients([dy], h_down, down, [b_down], form_down, needs[8:])
            sums = ctx.plan.sums(inner, h, b_inner)
            if not (needs_x or any(needs[:8])):
                a = gate_of_sums(g, u, *sums, ctx.plan.activation)
                _lora.add_gradients_of_factors(of_down, [dy], a, a, down, form_down, needs[8:])
                return (None,) * 11 + tuple(_lora.rounded_like(of_down.tensors, tensors[8:]))
            to_da = _lora.adapters_part(of_down, a_down, form_down)
            adds_to_da = to_da is not None and g.numel() > 0 and takes(form.dtype, x, [to_da[0].shape[1]])
            da = _lora.gradient_of_input(None if adds_to_da else to_da, of_down)
            dg, du, a = gradients_of_sums(da, g, u, to_da if adds_to_da else None, *sums, ctx.plan.activation)
            del g, u, da
            _lora.add_gradients_of_factors(of_down, [dy], a, a, down, form_down, needs[8:])
            del a
            found = _lora.gradients([dg, du], h, inner, b_inner, form, needs[:8])
            rows = as_matrix(x, form.dtype)
            _lora.add_gradients_of_factors(found, [dg, du], rows, rows, inner, form, needs[:8])
            dx = None
            if needs_x:
                dx = _lora.gradient_of_input(_lora.adapters_part(found, a_inner, form), found).view(x.shape).to(x.dtype)
            return None, None, dx, *_lora.rounded_like(found.tensors + of_down.tensors, tensors)


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
    check_in("activation", activation, TWINS)
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
        h = _lora.columns_of(known.h_down, outer, forms[1])[0]
        return _lora.output(SharedRows(known.a), outer[0], h, known.factors_down.b[0], forms[1])

    with no_autocast(x.device.type):
        tensors = (*_lora.flattened(inner), *_lora.flattened(outer))
        stub = _KeptMLP.apply(plan, made, x, *tensors) if records_graph() else None
        return computed(compute, x.shape[:-1], stub)
