"""A gated MLP whose projections have a LoRA: down(act(gate(x)) * up(x)), each of the three as in `lora_linear`.

    g, u = gate(x), up(x);  a = act(g) * u;  y = down(a)

Shapes  x (..., K), gate and up (I, K), down (N, I); a LoRA on one of them or more, of any ranks.
Dtypes  As in `lora_linears` and `swiglu`.
Bytes   b per element of the width I, beside the large products: forward writes and reads g and u once more for their
        adapters, reads both and writes a, and reads a for the adapter of down. Backward writes and reads da once more;
        reads da, g and u, and writes dg, du and a in their place; and reads each of these three once. Kept for
        backward: x, g, u, and what is r wide. a is not kept: it comes with dg and du from one pass. No other tensor of
        the width I is alive in the backward pass than these three.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import reference
from ._dispatch import once_differentiable
from ._lora import (
    Form,
    Layer,
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
    no_autocast,
    output,
    rounded_like,
    without_memory,
)
from .frozen_float8 import SharedRows
from .geglu import geglu
from .geglu import gradients_and_product as geglu_gradients
from .lora_linear import Lora, Weight, as_tensors, checked_layers, form_of, runs_as_twin
from .swiglu import gradients_and_product as swiglu_gradients
from .swiglu import swiglu

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


class _Inner(NamedTuple):
    """What is known of an MLP before its down projection."""

    g: torch.Tensor
    u: torch.Tensor
    a: torch.Tensor
    h: torch.Tensor
    h_down: torch.Tensor


def _inner(x: torch.Tensor, layers: list[Layer], forms: tuple[Form, Form], gate: Gate) -> _Inner:
    rows = as_matrix(x, forms[0].dtype)
    h, shared = low_rank(rows, layers[:2], forms[0]), SharedRows(rows)
    g, u = (
        output(shared, *pair, forms[0]) for pair in zip(layers[:2], columns_of(h, layers[:2], forms[0]), strict=True)
    )
    a = gate.product(g, u)
    return _Inner(g, u, a, h, low_rank(a, layers[2:], forms[1]))


class _KeptMLP(torch.autograd.Function):
    """Keeps what the backward pass of an MLP needs, and returns a tensor without memory in place of its output."""

    @staticmethod
    def forward(ctx, forms, gate, made, x, *tensors):
        layers = [*forms[0].layers(tensors[:8]), *forms[1].layers(tensors[8:])]
        inner = _inner(x, layers, forms, gate)
        made.append(inner)
        ctx.save_for_backward(x, inner.g, inner.u, inner.h, inner.h_down, *tensors)
        ctx.set_materialize_grads(False)
        ctx.forms, ctx.gate = forms, gate
        return without_memory((*x.shape[:-1], layers[2].weight.shape[0]), forms[1].dtype, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 16
        x, g, u, h, h_down, *tensors = ctx.saved_tensors
        form, form_down = ctx.forms
        needs_x, *needs = ctx.needs_input_grad[3:]
        inner, down = form.layers(tensors[:8]), form_down.layers(tensors[8:])
        with no_autocast(x.device.type):
            dy = as_matrix(dy, form.dtype)
            of_down = gradients([dy], h_down, down, form_down, needs[8:])
            if not (needs_x or any(needs[:8])):
                a = ctx.gate.product(g, u)
                add_gradients_of_factors(of_down, [dy], a, a, down, form_down, needs[8:])
                return (None,) * 12 + tuple(rounded_like(of_down.tensors, tensors[8:]))
            da = gradient_of_input(adapters_part(of_down, down, form_down), of_down)
            dg, du, a = ctx.gate.gradients(da, g, u)
            del g, u, da
            add_gradients_of_factors(of_down, [dy], a, a, down, form_down, needs[8:])
            del a
            found = gradients([dg, du], h, inner, form, needs[:8])
            rows = as_matrix(x, form.dtype)
            add_gradients_of_factors(found, [dg, du], rows, rows, inner, form, needs[:8])
            dx = None
            if needs_x:
                dx = gradient_of_input(adapters_part(found, inner, form), found).view(x.shape).to(x.dtype)
            return None, None, None, dx, *rounded_like(found.tensors + of_down.tensors, tensors)


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
    forms, of_gate, made = (form_of(x, inner), form_of(x, outer)), ACTIVATIONS[activation], []

    def compute() -> torch.Tensor:
        known = made.pop() if made else _inner(x, [*inner, *outer], forms, of_gate)
        y = output(SharedRows(known.a), outer[0], columns_of(known.h_down, outer, forms[1])[0], forms[1])
        return in_shape(y, (*x.shape[:-1], y.shape[1]))

    with no_autocast(x.device.type):
        if not torch.is_grad_enabled():
            return compute()
        stub = _KeptMLP.apply(forms, of_gate, made, x, *flattened(inner), *flattened(outer))
        return computed((stub,), compute)
