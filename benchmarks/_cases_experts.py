"""Cases of routed expert blocks: fully trained, frozen with adapters on their parameters, and frozen in FP8.

The floor is the FLOP of the required products: nine for each pair of a token and an expert (forward, and backward for
the input and the weights), or six with frozen weights.
"""

import functools
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from _cases import Case, randn
from _cases_lora import SCALING, adapter, under_autocast
from _measure import DEVICE

import liger_triton as lt
from liger_triton import reference
from liger_triton.frozen_float8 import quantized_matrices


def grouped_mm(x, weights, gate_up, down, ids):
    """transformers' experts with the implementation "grouped_mm"."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    block = SimpleNamespace(
        num_experts=gate_up.shape[0],
        gate_up_proj=gate_up,
        down_proj=down,
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        has_post_expert_norm=False,
        _is_expert_parallel=False,
        _apply_gate=lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
    )
    return grouped_mm_experts_forward(block, x, ids, weights)


def liger_fused_moe(x, weights, gate_up, down, ids):
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    return LigerFusedMoEFunction.apply(x, gate_up, down, ids.int(), weights)


def ours(x, weights, gate_up, down, ids):
    return lt.experts(x, ids, weights, gate_up, down)


def eager(x, weights, gate_up, down, ids):
    return reference.experts(x, ids, weights, gate_up, down)


def routed(tokens, hidden, inner, count, top_k, dtype):
    """x, the routing weights, the experts' matrices, ids, and the gradient of the result."""
    x = randn(tokens, hidden, dtype=dtype)
    values, ids = torch.randn(tokens, count, device=DEVICE).topk(top_k)
    weights = values.softmax(-1).to(dtype).requires_grad_()
    gate_up = randn(count, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5)
    down = randn(count, hidden, inner, dtype=dtype, scale=inner**-0.5)
    return x, weights, gate_up, down, ids, randn(tokens, hidden, dtype=dtype, grad=False)


def factors(a, b, count):
    """A (E, r, in) and B (E, out, r) of PEFT's matrices (E r, in) and (out, r E)."""
    return a.view(count, -1, a.shape[1]), b.view(b.shape[0], -1, count).permute(2, 0, 1)


def exact(case):
    """The result and the gradients in float64, one expert after the other, so that they need not all fit."""
    x, weights, gate_up, down, *loras, ids = case.inputs
    (count, _, hidden), (tokens, top_k) = gate_up.shape, ids.shape
    loras = [factors(a, b, count) for a, b in zip(loras[::2], loras[1::2], strict=True)]
    out, dx = (torch.zeros(tokens, hidden, dtype=torch.float64, device=DEVICE) for _ in range(2))
    d_weights = torch.zeros(tokens * top_k, dtype=torch.float64, device=DEVICE)
    of_experts = []
    for e in range(count):
        pairs = (ids.flatten() == e).nonzero().flatten()
        at = pairs // top_k
        given = [x[at], weights.flatten()[pairs], gate_up[e], down[e]]
        for lora in loras:
            given += [factor[e] for factor in lora]
        leaves = [t.detach().double().requires_grad_() for t in given]
        rows, share, w, v, *low = leaves
        w, v = (m + SCALING * low[k + 1] @ low[k] if low else m for m, k in ((w, 0), (v, 2)))
        gate, up = (rows @ w.T).chunk(2, -1)
        y = share[:, None] * ((F.silu(gate) * up) @ v.T)
        trained = leaves[4:] or (leaves[2:] if gate_up.requires_grad else [])
        d_rows, d_share, *others = torch.autograd.grad(y, [rows, share, *trained], case.upstream[0][at].double())
        out.index_add_(0, at, y.detach())
        dx.index_add_(0, at, d_rows)
        d_weights[pairs] = d_share
        of_experts.append(others)
    stacked = [torch.stack(grads) for grads in zip(*of_experts, strict=True)]
    if loras:  # as PEFT stores them
        stacked = [t.flatten(0, 1) if k % 2 == 0 else t.permute(1, 2, 0).flatten(1) for k, t in enumerate(stacked)]
    return [out, dx, d_weights.view(tokens, top_k), *stacked]


def size_of(tokens, hidden, inner, count, top_k, more=""):
    return f"{tokens}x{hidden}, {count} of {inner}, {top_k} a token{more}"


def experts(tokens, hidden, inner, count, top_k, *, dtype):
    *inputs, dy = routed(tokens, hidden, inner, count, top_k, dtype)
    return Case(
        "experts",
        size_of(tokens, hidden, inner, count, top_k),
        tuple(inputs),
        {"ours": ours, "eager": eager, "grouped_mm": grouped_mm, "liger": liger_fused_moe},
        exact,
        dtype,
        flop=18 * tokens * top_k * hidden * inner,
        upstream=(dy,),
        graph=False,  # eager waits for the GPU
    )


def peft_experts(gate_up, down, adapters):
    """transformers' "grouped_mm" block with these weights, under PEFT's adapters on both parameters."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    count, hidden, inner = down.shape
    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inner, num_experts=count)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        model = torch.nn.ModuleDict({"experts": Qwen3MoeExperts(config)})
    for name, t in (("gate_up_proj", gate_up), ("down_proj", down)):
        setattr(model["experts"], name, torch.nn.Parameter(t, requires_grad=False))
    rank = adapters[0].shape[0] // count
    names = ["experts.gate_up_proj", "experts.down_proj"]
    lora = LoraConfig(r=rank, lora_alpha=SCALING * rank, target_modules=[], target_parameters=names)
    wrapper = get_peft_model(model, lora).base_model.model["experts"]
    parts = {"gate_up_proj": adapters[:2], "down_proj": adapters[2:]}
    for one in (wrapper, wrapper.base_layer):
        one.lora_A["default"].weight, one.lora_B["default"].weight = parts[one.parameter_name]
    return wrapper


def experts_lora(tokens, hidden, inner, count, top_k, rank, *, dtype):
    x, weights, gate_up, down, ids, dy = routed(tokens, hidden, inner, count, top_k, dtype)
    gate_up, down = gate_up.detach(), down.detach()
    adapters = [*adapter(hidden, 2 * inner, count * rank), *adapter(inner, hidden, count * rank)]
    wrapper = functools.cache(lambda: peft_experts(gate_up, down, adapters))

    def peft(x, weights, gate_up, down, a_w, b_w, a_v, b_v, ids):
        return wrapper()(x, ids, weights)

    def ours(x, weights, gate_up, down, a_w, b_w, a_v, b_v, ids):
        loras = [lt.ExpertLoRA(*factors(a, b, count), SCALING) for a, b in ((a_w, b_w), (a_v, b_v))]
        return lt.experts(x, ids, weights, gate_up, down, gate_up_lora=loras[0], down_lora=loras[1])

    return Case(
        "experts, LoRA",
        size_of(tokens, hidden, inner, count, top_k, f", r={rank}"),
        (x, weights, gate_up, down, *adapters, ids),
        {"ours": under_autocast(ours), "peft": under_autocast(peft)},
        exact,
        dtype,
        flop=12 * tokens * top_k * hidden * inner,
        upstream=(dy,),
        graph=False,
    )


def experts_frozen(tokens, hidden, inner, count, top_k, *, dtype):
    """FP8 weights, and their dequantised values in `dtype`."""
    x, weights, gate_up, down, ids, dy = routed(tokens, hidden, inner, count, top_k, dtype)
    packed = [quantized_matrices(t.detach()) for t in (gate_up, down)]
    gate_up, down = (t.unpack() for t in packed)

    def in_fp8(x, weights, gate_up, down, ids):
        return lt.experts(x, ids, weights, *packed)

    return Case(
        "experts, frozen",
        size_of(tokens, hidden, inner, count, top_k),
        (x, weights, gate_up, down, ids),
        {"ours": ours, "ours, fp8": in_fp8, "eager": eager, "grouped_mm": grouped_mm},
        exact,
        dtype,
        flop=12 * tokens * top_k * hidden * inner,
        upstream=(dy,),
        graph=False,
    )
