"""Cases of blocks of routed experts. The floor is the FLOP of their nine products, forward and backward."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from _cases import Case, randn
from _measure import DEVICE

import liger_triton as lt
from liger_triton import reference


def grouped_mm(x, ids, weights, gate_up, down):
    """transformers' experts in its implementation "grouped_mm"."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    block = SimpleNamespace(
        num_experts=gate_up.shape[0], gate_up_proj=gate_up, down_proj=down, has_gate=True, has_bias=False,
        is_transposed=False, has_post_expert_norm=False, _is_expert_parallel=False,
        _apply_gate=lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
    )  # fmt: skip
    return grouped_mm_experts_forward(block, x, ids, weights)


def liger_fused_moe(x, ids, weights, gate_up, down):
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    return LigerFusedMoEFunction.apply(x, gate_up, down, ids.int(), weights)


def experts(tokens, hidden, inner, count, top_k, *, dtype):
    x = randn(tokens, hidden, dtype=dtype)
    values, ids = torch.randn(tokens, count, device=DEVICE).topk(top_k)
    weights = values.softmax(-1).to(dtype).requires_grad_()
    gate_up = randn(count, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5)
    down = randn(count, hidden, inner, dtype=dtype, scale=inner**-0.5)
    dy = randn(tokens, hidden, dtype=dtype, grad=False)

    def exact(case):
        """In fp32 on the GPU, whose error is far below those of 16 bits. Float64 weights may not fit."""
        wide = torch.float64 if tokens * inner < 2**22 else torch.float32
        leaves = [t.detach().to(wide).requires_grad_() for t in (x, weights, gate_up, down)]
        y = reference.experts(leaves[0], ids, *leaves[1:])
        return [y, *torch.autograd.grad(y, leaves, dy.to(wide))]

    return Case(
        "experts",
        f"{tokens}x{hidden}, {count} of {inner}, {top_k} a token",
        (x, ids, weights, gate_up, down),
        {"ours": lt.experts, "eager": reference.experts, "grouped_mm": grouped_mm, "liger": liger_fused_moe},
        exact,
        dtype,
        flop=18 * tokens * top_k * hidden * inner,
        upstream=(dy,),
        graph=False,  # the eager one waits for the GPU
    )
