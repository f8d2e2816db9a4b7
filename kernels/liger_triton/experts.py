"""A block of routed, gated experts as one operation: out[t] = sum over k of s[t, k] * expert e[t, k] of x[t].

    h = x W[e] + b[e]          (2 I) gate and up, halves or even and odd columns
    a = gate(h)                (I)   see `gates.py`
    y = a V[e] + c[e]          (H)
    out[t] = sum over k of s[t, k] y[t, k]

    da = V dout, of the token;  ds = da . a + dout . c;  dh = gate'(h, s da)
    dV = (s a)^T dout,  dW = x^T dh,  dx[t] = sum over k of W dh[t, k],  dc = sum of s dout,  db = sum of dh

    a LoRA     W + scaling B A and V + scaling B A take the places of W and V; their sum is never formed
    packed     W and V are frozen and stored as 4-bit MXFP4 or as fp8 (e4m3 with a scale for each output); each is
               unpacked once a pass, used, and freed before the other

Shapes  x (T, H), ids and s (T, K), W (E, 2 I, H), V (E, H, I), b (E, 2 I), c (E, H); transposed: W (E, H, 2 I), V
        (E, I, H). A of a LoRA (E, r, in), B (E, out, r), of any strides. S = T * K pairs.
Dtypes  bf16, fp16, fp32; s in any of them. h, a and y are rounded once each, and products, sums over K and the gradient
        of s accumulate in fp32.
Bytes   b per element. Rows of x and dout are gathered inside the loads of a product; a copy would take 2 S H b each.
        Kept for backward: x, s, h, and r numbers a pair for a LoRA. a is recomputed from h. y is not needed: the
        gradient of s is a dot product of tensors that backward has anyway. Packed: E * 2 I * H * b more while a matrix
        is unpacked.
Time    On an H100, 128 experts of 2048 x 768, 8 a token, forward and backward: 18.3 ms at 32,768 tokens (transformers'
        grouped_mm 38.6) and 5.5 ms at 8,192 (10.6).
Exactness  No atomics: the same inputs give the same bits. Ids outside [0, E) take no part, and their s gets a gradient
        of 0.
"""

import math
from typing import NamedTuple, TypeAlias

import torch

from . import reference
from ._autograd import graph_is_kept, once_differentiable, without_memory
from ._dispatch import is_wrapped, kernel_op, no_autocast, runs_triton
from ._launch import as_dtype, not_among, shared_memory
from ._routed import (
    GateForm,
    Low,
    Routing,
    bias_gradient,
    combine,
    gate_gradients,
    gated_product,
    product,
    route,
    weight_gradient,
)
from .dequantize import MXFP4Weight, dequantize_mxfp4
from .frozen_float8 import Float8Matrices, Float8Weight, dequantized
from .gates import ACTIVATIONS, UNCHANGED

Packed: TypeAlias = MXFP4Weight | Float8Matrices
_INPUTS = ("x", "share", "w", "v", "b", "c", "a_w", "b_w", "a_v", "b_v")


def most_rank(device: torch.device) -> int:
    """Return the largest rank of a low-rank product that kernels add in 16 bits on `device`: a power of two.

    A program holds all ranks of its tile of 128 x 256 in shared memory.
    """
    ranks = shared_memory(device) // (2 * (128 + 256))
    return 1 << ranks.bit_length() - 1


class ExpertLoRA(NamedTuple):
    """A LoRA on one matrix of each expert: W[e] + scaling * lora_b[e] lora_a[e].

    Attributes:
        lora_a (`torch.Tensor`): (E, r, in).
        lora_b (`torch.Tensor`): (E, out, r).
        scaling (`float`): The factor of their product.
    """

    lora_a: torch.Tensor
    lora_b: torch.Tensor
    scaling: float


def _matrix(w: torch.Tensor, scales: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return W (E, in, out) in the dtype of `like`. With `scales`, it is unpacked from fp8 or MXFP4 blocks."""
    if scales is None:
        return w
    # The whole matrix is unpacked, 1 GiB for a moment with gpt-oss-20b. Unpacking inside the loads of a product would
    # need a scale for each step of the sum in backward.
    if scales.dtype == torch.uint8:
        return dequantize_mxfp4(w.mT, scales, like.dtype).mT
    return dequantized(Float8Weight(w.mT, scales), like.dtype).mT


@kernel_op("experts_gate")
def _gate(
    x: torch.Tensor,
    ids: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    a_w: torch.Tensor | None,
    b_w: torch.Tensor | None,
    w_scales: torch.Tensor | None,
    act: str,
    limit: float,
    alpha: float,
    up_offset: float,
    gate_scale: float,
    interleaved: bool,
    scale_w: float,
) -> list[torch.Tensor]:
    """Return [a, h, x A for the LoRA on W (empty without one), and the three tensors of the routing]."""
    form = GateForm(act, limit, alpha, up_offset, gate_scale, interleaved)
    routing = route(ids, w.shape[0])
    low = None if a_w is None else Low(product(x, a_w, routing, gathered=True, scale=scale_w), b_w)
    h, a = gated_product(x, _matrix(w, w_scales, x), routing, form, b, low)
    return [a, h, x.new_empty(0) if low is None else low.rows, *routing]


@_gate.register_fake
def _(x, ids, w, b, a_w, *rest):
    pairs, (experts, _, two) = ids.numel(), w.shape
    places = [ids.new_empty(size, dtype=torch.int32) for size in (pairs, pairs, experts + 1)]
    rows_w = x.new_empty(0) if a_w is None else x.new_empty(pairs, a_w.shape[2])
    return [x.new_empty(pairs, two // 2), x.new_empty(pairs, two), rows_w, *places]


@kernel_op("experts_down")
def _down(
    a: torch.Tensor,
    ids: torch.Tensor,
    share: torch.Tensor,
    v: torch.Tensor,
    c: torch.Tensor | None,
    a_v: torch.Tensor | None,
    b_v: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    scale_v: float,
    pairs: torch.Tensor,
    tokens: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Return the result (T, H)."""
    routing = Routing(pairs, tokens, offsets)
    low = None if a_v is None else Low(product(a, a_v, routing, gathered=False, scale=scale_v), b_v)
    y = product(a, _matrix(v, v_scales, a), routing, gathered=False, scattered=True, bias=c, low=low)
    return combine(y, ids, routing.experts, share, a.dtype)


@_down.register_fake
def _(a, ids, share, v, *rest):
    return a.new_empty(ids.shape[0], v.shape[2])


@kernel_op("experts_bwd")
def _backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    share: torch.Tensor,
    w: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor | None,
    c: torch.Tensor | None,
    a_w: torch.Tensor | None,
    b_w: torch.Tensor | None,
    a_v: torch.Tensor | None,
    b_v: torch.Tensor | None,
    w_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    h: torch.Tensor,
    rows_w: torch.Tensor,
    pairs: torch.Tensor,
    tokens: torch.Tensor,
    offsets: torch.Tensor,
    needed: list[bool],
    act: str,
    limit: float,
    alpha: float,
    up_offset: float,
    gate_scale: float,
    interleaved: bool,
    scale_w: float,
    scale_v: float,
    reuse: bool,
) -> list[torch.Tensor]:
    """Return the gradients of `_INPUTS`, empty where `needed` is False. With `reuse`, h is overwritten."""
    form = GateForm(act, limit, alpha, up_offset, gate_scale, interleaved)
    routing = Routing(pairs, tokens, offsets)
    needs = dict(zip(_INPUTS, needed, strict=True))
    grads = {}
    low = None
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    if a_v is not None:
        low = Low(product(dout, b_v.mT, routing, gathered=True, scale=scale_v), a_v.mT)
    a = product(dout, _matrix(v, v_scales, x).mT, routing, gathered=True, low=low)  # da; the gate overwrites it
    dh, d_share = gate_gradients(a, h, share, routing, form, reuse)
    if needs["share"]:
        d_share = d_share if c is None else d_share + _bias_shares(dout, c, ids)
        grads["share"] = d_share.view(share.shape).to(share.dtype)
    if needs["v"]:
        grads["v"] = weight_gradient(a, dout, v, routing, gathered="right")
    if needs["c"]:
        grads["c"] = bias_gradient(dout, c, routing, share)
    if needs["b_v"]:
        rows = product(a, a_v, routing, gathered=False, scale=scale_v)
        grads["b_v"] = weight_gradient(rows, dout, b_v, routing, gathered="right")
    if needs["a_v"]:
        grads["a_v"] = weight_gradient(a, low.rows, a_v, routing, gathered="none")
    del a, low
    low = None if a_w is None else Low(product(dh, b_w.mT, routing, gathered=False, scale=scale_w), a_w.mT)
    if needs["b_w"]:
        grads["b_w"] = weight_gradient(rows_w, dh, b_w, routing, gathered="none")
    if needs["a_w"]:
        grads["a_w"] = weight_gradient(x, low.rows, a_w, routing, gathered="left")
    if needs["w"]:
        grads["w"] = weight_gradient(x, dh, w, routing, gathered="left")
    if needs["b"]:
        grads["b"] = bias_gradient(dh, b, routing)
    if needs["x"]:
        dx = product(dh, _matrix(w, w_scales, x).mT, routing, gathered=False, scattered=True, low=low)
        grads["x"] = combine(dx, ids, routing.experts, None, x.dtype)
    return [grads.get(name, x.new_empty(0)) for name in _INPUTS]


@_backward.register_fake
def _(dout, x, ids, share, w, v, b, c, a_w, b_w, a_v, b_v, w_scales, v_scales, h, rows_w, *rest):
    inputs = (x, share, w, v, b, c, a_w, b_w, a_v, b_v)
    needed = rest[3]
    return [torch.empty_like(t) if need else x.new_empty(0) for t, need in zip(inputs, needed, strict=True)]


class _Gate(torch.autograd.Function):
    """Save what the backward pass needs. Return a stub of the result, a, and the tensors of the routing.

    Weights are (E, in, out), or packed with their scales (see `_matrix`). LoRA factors are A (E, in, r) and B (E, r,
    out).
    """

    @staticmethod
    def forward(ctx, x, ids, *rest):
        _, w, _, b, _, a_w, b_w, _, _, w_scales, _, *form = rest
        a, h, rows_w, *routing = _gate(x, ids, w, b, a_w, b_w, w_scales, *form[:-1])
        ctx.save_for_backward(x, ids, *rest[:11], h, rows_w, *routing)
        ctx.form = form
        ctx.set_materialize_grads(False)  # otherwise autograd would allocate zeros of the size of a
        ctx.mark_non_differentiable(a, *routing)
        return without_memory(x.shape, x.dtype, x), a, *routing

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, *_):
        if dout is None:
            return (None,) * 23
        needed = [ctx.needs_input_grad[0], *ctx.needs_input_grad[2:11]]
        reuse = not torch.compiler.is_compiling() and not graph_is_kept()
        grads = _backward(dout, *ctx.saved_tensors, needed, *ctx.form, reuse)
        dx, *others = (grad if need else None for grad, need in zip(grads, needed, strict=True))
        return dx, None, *others, *[None] * 10


class _Down(torch.autograd.Function):
    """Compute the result and save nothing. The gradient goes to the stub."""

    @staticmethod
    def forward(ctx, stub, *rest):
        ctx.others = len(rest)
        return _down(*rest)

    @staticmethod
    def backward(ctx, dout):
        return dout, *[None] * ctx.others


def _bias_shares(dout: torch.Tensor, c: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return dout . c of each pair (T * K,) in fp32: the down bias's part of the gradient of s."""
    all_experts = (dout @ c.to(dout.dtype).t()).float()
    known = (ids >= 0) & (ids < c.shape[0])
    return all_experts.gather(1, torch.where(known, ids, 0)).masked_fill(~known, 0).view(-1)


def _turned(b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return B (E, out, r) in `dtype` with unit stride in `out`, in one copy. PEFT stores B with experts fastest."""
    return b.mT.to(dtype, memory_format=torch.contiguous_format).contiguous().mT


def _check(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor | Packed,
    down: torch.Tensor | Packed,
    transposed: bool,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    loras: tuple[ExpertLoRA | None, ExpertLoRA | None],
) -> None:
    """Raise ValueError unless the shapes belong together."""
    if gate_up.ndim != 3 or down.ndim != 3:
        raise ValueError(f"gate_up is {tuple(gate_up.shape)}, down {tuple(down.shape)}; expected three dimensions.")
    if isinstance(gate_up, Packed) != isinstance(down, Packed) or (
        isinstance(gate_up, Packed) and (transposed or type(gate_up) is not type(down))
    ):
        raise ValueError(
            f"gate_up is a {type(gate_up).__name__}, down a {type(down).__name__}, transposed {transposed}; expected "
            "two tensors, or both packed alike and not transposed."
        )
    if transposed:
        experts, width, two = gate_up.shape
        _, inner, out = down.shape
    else:
        experts, two, width = gate_up.shape
        _, out, inner = down.shape
    if two != 2 * inner or down.shape[0] != experts or out != width:
        stored = "(E, H, 2 I) and (E, I, H)" if transposed else "(E, 2 I, H) and (E, H, I)"
        raise ValueError(f"gate_up is {tuple(gate_up.shape)}, down {tuple(down.shape)}; expected {stored}.")
    if hidden.ndim != 2 or hidden.shape[1] != width:
        raise ValueError(f"hidden is {tuple(hidden.shape)}; expected (T, {width}), the width of gate_up.")
    if expert_ids.shape != weights.shape or expert_ids.ndim != 2 or expert_ids.shape[0] != hidden.shape[0]:
        raise ValueError(
            f"expert_ids is {tuple(expert_ids.shape)}, weights {tuple(weights.shape)}; expected both "
            f"({hidden.shape[0]}, K), for as many tokens as hidden has."
        )
    for name, bias, size in zip(("gate_up_bias", "down_bias"), biases, (two, out), strict=True):
        if bias is not None and tuple(bias.shape) != (experts, size):
            raise ValueError(f"{name} is {tuple(bias.shape)}; expected ({experts}, {size}).")
    for name, lora, sizes in zip(("gate_up_lora", "down_lora"), loras, ((width, two), (inner, out)), strict=True):
        if lora is not None:
            rank = lora.lora_a.shape[1]
            fits_a = tuple(lora.lora_a.shape) == (experts, rank, sizes[0])
            fits_b = tuple(lora.lora_b.shape) == (experts, sizes[1], rank)
            if not (fits_a and fits_b):
                raise ValueError(
                    f"{name} has lora_a {tuple(lora.lora_a.shape)} and lora_b {tuple(lora.lora_b.shape)}; expected "
                    f"({experts}, r, {sizes[0]}) and ({experts}, {sizes[1]}, r)."
                )


def experts(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor | Packed,
    down: torch.Tensor | Packed,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    gate_scale: float = 1.0,
    interleaved: bool = False,
    transposed: bool = False,
    gate_up_lora: ExpertLoRA | None = None,
    down_lora: ExpertLoRA | None = None,
) -> torch.Tensor:
    """Sum the gated MLPs of each token's K experts, times their routing weights. Nothing waits for the GPU.

    Args:
        hidden (`torch.Tensor`): (T, H); bf16, fp16 or fp32 (float64: the PyTorch twin). It is cast to the dtype of
            `gate_up`; everything is computed in that dtype, as in transformers' grouped products.
        expert_ids (`torch.Tensor`): (T, K), integers. Pairs with an id outside [0, E) count as 0.
        weights (`torch.Tensor`): (T, K), floating point: the routing weights.
        gate_up (`torch.Tensor`, `MXFP4Weight` or `Float8Matrices`): (E, 2 I, H), or (E, H, 2 I) if `transposed`.
        down: (E, H, I), or (E, I, H) if `transposed`; dtype and kind of `gate_up`.
        gate_up_bias, down_bias (`torch.Tensor`, *optional*): (E, 2 I) and (E, H).
        activation (`str`, *optional*, defaults to `"silu"`): `"silu"`, `"gelu_tanh"` or `"gelu"`.
        limit, alpha, up_offset, gate_scale: As in `swiglu`; with other than the defaults `activation` must be "silu".
        interleaved (`bool`, *optional*, defaults to `False`): Gate and up are the even and odd outputs of `gate_up`, as
            in gpt-oss, instead of its halves.
        transposed (`bool`, *optional*, defaults to `False`): How the weights are stored.
        gate_up_lora, down_lora (`ExpertLoRA`, *optional*): A LoRA on either, cast to the dtype of `gate_up`.

    Returns:
        `torch.Tensor`: (T, H), contiguous, in the dtype of `hidden`; differentiable in all floating-point inputs.

    Raises:
        ValueError: Shapes do not belong together, `activation` is unknown, or `limit` is not above 0.
    """
    _check(hidden, expert_ids, weights, gate_up, down, transposed, (gate_up_bias, down_bias), (gate_up_lora, down_lora))
    if activation not in ACTIVATIONS:
        raise not_among("activation", activation, ACTIVATIONS)
    if limit is not None and not limit > 0:
        raise ValueError(f"limit is {limit}; expected a number above 0, or None for no limit.")
    numbers = (math.inf if limit is None else float(limit), float(alpha), float(up_offset), float(gate_scale))
    if numbers != UNCHANGED and activation != "silu":
        raise ValueError(f"activation is {activation!r}, which has no limit, alpha, up_offset or gate_scale.")
    dtype = gate_up.dtype
    x = as_dtype(hidden, dtype)
    loras = [
        lora if lora is None else ExpertLoRA(lora.lora_a.to(dtype), _turned(lora.lora_b, dtype), lora.scaling)
        for lora in (gate_up_lora, down_lora)
    ]
    matrices, scales = (gate_up, down), (None, None)
    if isinstance(gate_up, Packed):
        matrices, scales = zip(gate_up[:2], down[:2], strict=True)
    floats = [gate_up_bias, down_bias]
    if not isinstance(gate_up, Packed):
        floats += [gate_up, down]
    for lora in loras:
        if lora is not None:
            floats += [lora.lora_a, lora.lora_b]
    if not runs_triton(x, *floats, weights) or expert_ids.numel() == 0 or any(map(is_wrapped, (expert_ids, *scales))):
        with no_autocast(x.device.type):
            out = reference.experts(
                x,
                expert_ids,
                weights,
                gate_up,
                down,
                gate_up_bias,
                down_bias,
                activation=activation,
                limit=limit,
                alpha=alpha,
                up_offset=up_offset,
                gate_scale=gate_scale,
                interleaved=interleaved,
                transposed=transposed,
                gate_up_lora=loras[0],
                down_lora=loras[1],
            )
        return out.to(hidden.dtype)
    form = (activation if numbers == UNCHANGED else "clamped", *numbers, interleaved)
    w, v = matrices if transposed else (t.mT for t in matrices)
    factors = []
    scalings = []
    for lora in loras:
        # Autograd functions take flat arguments: a missing LoRA is two Nones and a scaling that is not read.
        factors += [None, None] if lora is None else [lora.lora_a.mT, lora.lora_b.mT]
        scalings.append(0.0 if lora is None else float(lora.scaling))
    x = x if x.stride(1) == 1 else x.contiguous()
    given = (x, expert_ids.contiguous(), weights.contiguous(), w, v, gate_up_bias, down_bias, *factors, *scales)
    stub, a, *routing = _Gate.apply(*given, *form, *scalings)
    out = _Down.apply(stub, a, *given[1:3], v, down_bias, *factors[2:], scales[1], scalings[1], *routing)
    return as_dtype(out, hidden.dtype)
