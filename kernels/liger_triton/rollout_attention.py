"""Attention of a drafter that is unrolled from every token of a row (the training-time test of EAGLE-3).

In step j = 1, 2, ... the query at token t sees the keys of step 0 at the tokens of its row up to t, and those that its
own rollout has added, one a step, at the same t:

    s_u = scale * q_t . k_u                 u = first token of the row ... t
    s_i = scale * q_t . k^(i)_t             i = 1 ... j
    o_t = sum over both of softmax(s) v

The first part is `row_attention` with its log-sum-exp L0, and the second adds to both:

    L = log(exp(L0) + sum_i exp(s_i))       o = exp(L0 - L) o0 + sum_i exp(s_i - L) v^(i)

Flash attention's backward pass needs o and L only to rebuild the probabilities exp(s_u - L) and D = do . o. Given those
of both parts, it gives the right gradients of its own part; the others are dp_i = do . v^(i) and ds_i = p_i (dp_i - D).

Shapes  q (T, H, D); k, v and each of own_keys, own_values (T, G, D), H a multiple of G; L (H, T) in fp32.
Bytes   beyond `row_attention`, b an element: 2 j T G D b of the keys and values, read once forward and once backward.
"""

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from . import reference
from ._dispatch import is_float64, use_triton
from .row_attention import MOST_HEAD_DIM, flash_backward, flash_forward, is_flash, kernels_backward, kernels_forward


def _by_group(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Return (T, G, H / G, ...) of (T, H, ...): the heads that share a key are neighbours."""
    return x.unflatten(1, (groups, -1))


class _RolloutAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, offsets, longest, scale, *own):
        ctx.given = (longest, scale)
        ctx.state = None
        if is_flash(q, None):
            seen, level, *ctx.state = flash_forward(q, k, v, offsets, longest, scale, None)
        else:
            seen, level = kernels_forward(q, k, v, offsets, longest, scale, None, None, None)
        keys = own[: len(own) // 2]
        values = own[len(own) // 2 :]
        groups = k.shape[1]
        wide = _by_group(q, groups).float()
        scores = [(wide * key.unsqueeze(2).float()).sum(-1) * scale for key in keys]  # (T, G, H / G) each
        before = _by_group(level.t(), groups)
        total = torch.logsumexp(torch.stack([before, *scores]), 0)
        out = _by_group(seen, groups).float() * torch.exp(before - total).unsqueeze(-1)
        for score, value in zip(scores, values, strict=True):
            out += torch.exp(score - total).unsqueeze(-1) * value.unsqueeze(2).float()
        out = out.flatten(1, 2).to(q.dtype)
        level = total.flatten(1, 2).t().contiguous()
        ctx.save_for_backward(q, k, v, offsets, out, level, *own)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, offsets, out, level, *own = ctx.saved_tensors
        longest, scale = ctx.given
        do = do.contiguous()
        if ctx.state is not None:
            dq, dk, dv = flash_backward(do, q, k, v, out, level, offsets, longest, scale, None, ctx.state)
        else:
            dq, dk, dv = kernels_backward(do, q, k, v, out, level, offsets, longest, scale, None, None)
        keys = own[: len(own) // 2]
        values = own[len(own) // 2 :]
        groups = k.shape[1]
        wide_q = _by_group(q, groups).float()
        wide_do = _by_group(do, groups).float()
        total = _by_group(level.t(), groups)
        delta = (wide_do * _by_group(out, groups).float()).sum(-1)
        dq = _by_group(dq, groups).float()
        own_dk = []
        own_dv = []
        for key, value in zip(keys, values, strict=True):
            wide_key = key.unsqueeze(2).float()
            p = torch.exp((wide_q * wide_key).sum(-1) * scale - total)
            ds = p * ((wide_do * value.unsqueeze(2).float()).sum(-1) - delta) * scale
            dq = dq + ds.unsqueeze(-1) * wide_key
            own_dk.append((ds.unsqueeze(-1) * wide_q).sum(2).to(key.dtype))
            own_dv.append((p.unsqueeze(-1) * wide_do).sum(2).to(value.dtype))
        return dq.flatten(1, 2).to(q.dtype), dk, dv, None, None, None, *own_dk, *own_dv


def rollout_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_keys: Sequence[torch.Tensor],
    own_values: Sequence[torch.Tensor],
    offsets: torch.Tensor,
    longest: int,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute causal attention within each row and to the keys of a token's own rollout; differentiable in all of them.

    Args:
        q (`torch.Tensor`): (T, H, D), D at most 256. bf16, fp16, fp32 (float64: the PyTorch twin).
        k, v (`torch.Tensor`): (T, G, D) of the same dtype, H a multiple of G: the keys and values of step 0.
        own_keys, own_values (sequences of `torch.Tensor`): One (T, G, D) for each later step, at least one. The query
            at t sees their rows t alone.
        offsets (`torch.Tensor`): int32 (rows + 1,): where each row begins, and T.
        longest (`int`): Tokens of the longest row. A smaller number leaves tokens out.
        scale (`float`, *optional*): Factor of the products of q and k. Unset: 1 / sqrt(D).

    Returns:
        `torch.Tensor`: (T, H, D).

    Raises:
        ValueError: Shapes or dtypes disagree, D is more than 256, or there is no key of a later step.
    """
    own = [*own_keys, *own_values]
    fits = q.ndim == k.ndim == 3 and (q.shape[0], q.shape[2]) == (k.shape[0], k.shape[2])
    if not fits or q.shape[1] % k.shape[1] or q.shape[2] > MOST_HEAD_DIM or q.dtype != k.dtype:
        raise ValueError(
            f"q is {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}; expected q (T, H, D) and k (T, G, D) of "
            "one dtype, H a multiple of G and D at most 256."
        )
    if any(x.shape != k.shape or x.dtype != k.dtype for x in (v, *own)):
        found = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (v, *own))
        raise ValueError(f"v, own_keys and own_values are {found}; expected {tuple(k.shape)} {k.dtype} as k is.")
    if len(own_keys) != len(own_values) or not own_keys:
        raise ValueError(
            f"own_keys has {len(own_keys)} tensors and own_values {len(own_values)}; expected equally many, at least "
            "one. Without any, call row_attention."
        )
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if is_float64(q) or not use_triton(q) or q.numel() == 0:
        return reference.rollout_attention(q, k, v, own_keys, own_values, offsets, longest, scale=scale)
    q = q.contiguous()
    k = k.contiguous()
    v = v.contiguous()
    return _RolloutAttention.apply(q, k, v, offsets, longest, scale, *(x.contiguous() for x in own))
