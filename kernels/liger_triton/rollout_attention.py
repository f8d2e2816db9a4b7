"""Attention of a drafter that is unrolled from every token of a row (the training-time test of EAGLE-3).

In step j = 1, 2, ... the query at token t sees the keys of step 0 at the tokens of its row up to t, and the keys that
its own rollout has added at t, one a step:

    s_u = scale * q_t . k_u                 u = first token of the row ... t
    s_i = scale * q_t . k^(i)_t             i = 1 ... j
    o_t = sum over both of softmax(s) v

The first part is `row_attention`, with output o0 and log-sum-exp L0. The second part adds to both:

    L = log(exp(L0) + sum_i exp(s_i))       o = exp(L0 - L) o0 + sum_i exp(s_i - L) v^(i)

Flash attention's backward uses o and L only for the probabilities exp(s_u - L) and for D = do . o. Given the o and L
of both parts, it returns the right gradients of the first part. For the second, dp_i = do . v^(i) and
ds_i = p_i (dp_i - D).

Shapes  q, o (n, H, D); k, v (T, G, D), H a multiple of G; each of own_keys, own_values (n, G, D); L (H, n) in fp32.
        n = T, or the number of tokens in `places` if only these are unrolled.
Dtypes  bf16, fp16, fp32, the same for all tensors. Scores, sums and gradients in fp32, one rounding per store. The
        first part rounds its output and its dq to the dtype.
Bytes   in addition to `row_attention`, b an element: forward reads q, o0 and 2 j n G D of keys and values, and writes
        o. Backward reads q, do, o, dq and the keys and values, and writes dq and the gradients of the keys and values.
        Both first copy the j keys and the j values into one temporary tensor each.
"""

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from . import reference
from ._dispatch import is_float64, jit, tl, use_triton
from ._launch import cdiv, launch, next_power_of_2
from .row_attention import (
    LOG2E,
    MOST_HEAD_DIM,
    flash_backward,
    flash_forward,
    is_flash,
    kernels_backward,
    kernels_forward,
)


@jit
def _of_group(X, at, head, tokens, heads, shared, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return pointers (BLOCK_T, BLOCK_R, BLOCK_D) to tokens `at` in `shared` heads of X (T, heads, D) from `head` on,
    and the mask of elements that exist."""
    r = tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    rows = at.to(tl.int64)[:, None] * heads + head + r[None, :]  # int64: 131072 tokens of 4096 x 4 are 2**31 elements
    there = (at < tokens)[:, None] & (r < shared)[None, :]
    return X + rows[:, :, None] * D + d[None, None, :], there[:, :, None] & (d < D)[None, None, :]


@jit
def _own_tile(X, step, at, group, tokens, groups, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return pointers (BLOCK_T, BLOCK_D) to tokens `at` of a group in X (j, T, G, D), and the mask."""
    d = tl.arange(0, BLOCK_D)
    rows = (at.to(tl.int64) + step * tokens) * groups + group
    return X + rows[:, None] * D + d[None, :], (at < tokens)[:, None] & (d < D)[None, :]


@jit
def _levels(L, at, head, tokens, shared, BLOCK_R: tl.constexpr):
    """Return pointers (BLOCK_T, BLOCK_R) into L (H, T), and the mask."""
    r = tl.arange(0, BLOCK_R)
    there = (at < tokens)[:, None] & (r < shared)[None, :]
    return L + (head + r).to(tl.int64)[None, :] * tokens + at[:, None], there


@jit(do_not_specialize=["tokens", "steps"])
def _combine_kernel(
    Q,
    SEEN,
    LEVEL,
    K,
    V,
    OUT,
    tokens,
    heads,
    groups,
    steps,
    scale,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add the own keys to SEEN and LEVEL, the attention to the keys of step 0: write OUT, and LEVEL in place.

    One program has a few tokens in all heads of a group, so each key is read once. `scale` includes log2(e)."""
    group = tl.program_id(1)
    shared = heads // groups
    head = group * shared
    at = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    places, there = _of_group(Q, at, head, tokens, heads, shared, D, BLOCK_R, BLOCK_D)
    q = tl.load(places, mask=there, other=0.0).to(tl.float32)
    places, there = _of_group(SEEN, at, head, tokens, heads, shared, D, BLOCK_R, BLOCK_D)
    acc = tl.load(places, mask=there, other=0.0).to(tl.float32)
    levels, known = _levels(LEVEL, at, head, tokens, shared, BLOCK_R)
    most = tl.load(levels, mask=known, other=0.0) * 1.4426950408889634
    total = tl.full([BLOCK_T, BLOCK_R], 1.0, tl.float32)
    for step in range(0, steps):
        k_places, here = _own_tile(K, step, at, group, tokens, groups, D, BLOCK_D)
        k = tl.load(k_places, mask=here, other=0.0).to(tl.float32)
        s = tl.sum(q * k[:, None, :], 2) * scale
        new = tl.maximum(most, s)
        shrink = tl.exp2(most - new)
        p = tl.exp2(s - new)
        total = total * shrink + p
        v_places, here = _own_tile(V, step, at, group, tokens, groups, D, BLOCK_D)
        v = tl.load(v_places, mask=here, other=0.0).to(tl.float32)
        acc = acc * shrink[:, :, None] + p[:, :, None] * v[:, None, :]
        most = new
    places, there = _of_group(OUT, at, head, tokens, heads, shared, D, BLOCK_R, BLOCK_D)
    tl.store(places, (acc / total[:, :, None]).to(OUT.dtype.element_ty), mask=there)
    tl.store(levels, (most + tl.log2(total)) / 1.4426950408889634, mask=known)


@jit(do_not_specialize=["tokens", "steps"])
def _own_gradient_kernel(
    Q,
    DO,
    OUT,
    LEVEL,
    K,
    V,
    DQ,
    DK,
    DV,
    tokens,
    heads,
    groups,
    steps,
    factor,
    scale,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write DK and DV (j, T, G, D), and add the second part's gradient to DQ. OUT and LEVEL cover all keys.

    Each sum is over the heads of one program, so the result does not depend on the order of the programs."""
    group = tl.program_id(1)
    shared = heads // groups
    head = group * shared
    at = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    places, there = _of_group(Q, at, head, tokens, heads, shared, D, BLOCK_R, BLOCK_D)
    q = tl.load(places, mask=there, other=0.0).to(tl.float32)
    places, there = _of_group(DO, at, head, tokens, heads, shared, D, BLOCK_R, BLOCK_D)
    do = tl.load(places, mask=there, other=0.0).to(tl.float32)
    places, there = _of_group(OUT, at, head, tokens, heads, shared, D, BLOCK_R, BLOCK_D)
    delta = tl.sum(do * tl.load(places, mask=there, other=0.0).to(tl.float32), 2)
    levels, known = _levels(LEVEL, at, head, tokens, shared, BLOCK_R)
    level = tl.load(levels, mask=known, other=0.0) * 1.4426950408889634
    dq_places, there = _of_group(DQ, at, head, tokens, heads, shared, D, BLOCK_R, BLOCK_D)
    dq = tl.load(dq_places, mask=there, other=0.0).to(tl.float32)
    for step in range(0, steps):
        k_places, here = _own_tile(K, step, at, group, tokens, groups, D, BLOCK_D)
        k = tl.load(k_places, mask=here, other=0.0).to(tl.float32)
        p = tl.exp2(tl.sum(q * k[:, None, :], 2) * scale - level)
        v_places, here = _own_tile(V, step, at, group, tokens, groups, D, BLOCK_D)
        v = tl.load(v_places, mask=here, other=0.0).to(tl.float32)
        ds = p * (tl.sum(do * v[:, None, :], 2) - delta) * factor
        dq += ds[:, :, None] * k[:, None, :]
        dk_places, here = _own_tile(DK, step, at, group, tokens, groups, D, BLOCK_D)
        tl.store(dk_places, tl.sum(ds[:, :, None] * q, 1).to(DK.dtype.element_ty), mask=here)
        dv_places, here = _own_tile(DV, step, at, group, tokens, groups, D, BLOCK_D)
        tl.store(dv_places, tl.sum(p[:, :, None] * do, 1).to(DV.dtype.element_ty), mask=here)
    tl.store(dq_places, dq.to(DQ.dtype.element_ty), mask=there)


def _tile(heads: int, groups: int, d: int) -> dict[str, int]:
    """Return the blocks of a program: 2048 elements of q, or one token of all heads of a group."""
    wide = next_power_of_2(max(16, d))
    shared = next_power_of_2(heads // groups)
    tokens = max(1, 2048 // (wide * shared))
    warps = min(16, max(4, tokens * shared * wide // 512))
    return {"D": d, "BLOCK_T": tokens, "BLOCK_R": shared, "BLOCK_D": wide, "num_warps": warps}


def _add_own_keys(q, seen, level, keys, values, scale: float) -> torch.Tensor:
    """Return o (n, H, D) of all keys, and bring `level` (H, n) up to L. keys and values are (j, n, G, D)."""
    tokens, heads, d = q.shape
    steps, _, groups, _ = keys.shape
    out = torch.empty_like(q)
    tile = _tile(heads, groups, d)
    grid = cdiv(tokens, tile["BLOCK_T"]), groups
    launch(
        _combine_kernel,
        grid,
        q,
        seen,
        level,
        keys,
        values,
        out,
        tokens,
        heads,
        groups,
        steps,
        scale * LOG2E,
        **tile,
    )
    return out


def _own_gradients(do, q, out, level, keys, values, dq, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients (j, n, G, D) of the own keys and values, and add their part to dq (n, H, D)."""
    tokens, heads, d = q.shape
    steps, _, groups, _ = keys.shape
    dk = torch.empty_like(keys)
    dv = torch.empty_like(values)
    tile = _tile(heads, groups, d)
    grid = cdiv(tokens, tile["BLOCK_T"]), groups
    launch(
        _own_gradient_kernel,
        grid,
        q,
        do,
        out,
        level,
        keys,
        values,
        dq,
        dk,
        dv,
        tokens,
        heads,
        groups,
        steps,
        scale,
        scale * LOG2E,
        **tile,
    )
    return dk, dv


def _at_places(x: torch.Tensor, places: torch.Tensor | None, tokens: int, dim: int = 0) -> torch.Tensor:
    """Return x with zeros for the tokens that `places` leaves out: `tokens` rows in dimension `dim`."""
    if places is None:
        return x
    shape = [*x.shape]
    shape[dim] = tokens
    return x.new_zeros(shape).index_copy_(dim, places, x)


class _RolloutAttention(torch.autograd.Function):
    """With `places`, the first part is computed for all tokens: PyTorch's flash attention has no queries with gaps. A
    query of zeros with a gradient of zeros adds nothing to dk and dv."""

    @staticmethod
    def forward(ctx, q, k, v, offsets, longest, scale, places, *own):
        ctx.given = (longest, scale)
        ctx.state = None
        wide_q = _at_places(q, places, len(k))
        if is_flash(q, None):
            seen, level, *ctx.state = flash_forward(wide_q, k, v, offsets, longest, scale, None)
        else:
            seen, level = kernels_forward(wide_q, k, v, offsets, longest, scale, None, None, None)
        if places is not None:
            seen = seen[places]
            level = level[:, places]
        half = len(own) // 2
        level = level.contiguous()
        # The copies cost less than a launch for each key, and are not kept: later steps have the same keys.
        keys = torch.stack(own[:half])
        values = torch.stack(own[half:])
        out = _add_own_keys(q, seen.contiguous(), level, keys, values, scale)
        ctx.save_for_backward(q, k, v, offsets, places, out, level, *own)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, offsets, places, out, level, *own = ctx.saved_tensors
        longest, scale = ctx.given
        do = do.contiguous()
        wide = [_at_places(x, places, len(k)) for x in (do, q, out)]
        given = wide[0], wide[1], k, v, wide[2], _at_places(level, places, len(k), 1), offsets, longest, scale, None
        if ctx.state is not None:
            dq, dk, dv = flash_backward(*given, ctx.state)
        else:
            dq, dk, dv = kernels_backward(*given, None)
        dq = dq.contiguous() if places is None else dq[places]
        half = len(own) // 2
        keys = torch.stack(own[:half])
        values = torch.stack(own[half:])
        own_dk, own_dv = _own_gradients(do, q, out, level, keys, values, dq, scale)
        return dq, dk, dv, None, None, None, None, *own_dk.unbind(), *own_dv.unbind()


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
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally within each row, and to the keys of a token's own rollout; differentiable in q, keys and values.

    Args:
        q (`torch.Tensor`): (n, H, D), D at most 256. bf16, fp16, fp32 (float64: the PyTorch twin).
        k, v (`torch.Tensor`): (T, G, D) of the same dtype, H a multiple of G: the keys and values of step 0.
        own_keys, own_values (sequences of `torch.Tensor`): One (n, G, D) for each later step, at least one. Query i
            sees only row i of each.
        offsets (`torch.Tensor`): int32 (rows + 1,), the start of each row, and T.
        longest (`int`): Tokens of the longest row. A smaller number leaves tokens out.
        scale (`float`, *optional*): Multiplies the products of q and k. Unset: 1 / sqrt(D).
        places (`torch.Tensor`, *optional*): int64 (n,), without duplicates: the tokens that are unrolled. Unset: all
            tokens, n = T.

    Returns:
        `torch.Tensor`: (n, H, D).

    Raises:
        ValueError: Shapes or dtypes disagree, D is more than 256, or no key is of a later step.
    """
    own = [*own_keys, *own_values]
    fits = q.ndim == k.ndim == 3 and q.shape[2] == k.shape[2]
    if not fits or q.shape[1] % k.shape[1] or q.shape[2] > MOST_HEAD_DIM or q.dtype != k.dtype:
        raise ValueError(
            f"q is {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}; expected q (n, H, D) and k (T, G, D) of "
            "one dtype, H a multiple of G and D at most 256."
        )
    rows = len(k) if places is None else len(places)
    if len(q) != rows:
        expected = f"the {rows} tokens of k" if places is None else f"the {rows} places"
        raise ValueError(f"q is {tuple(q.shape)}; expected a row for each of {expected}.")
    if v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(f"v is {tuple(v.shape)} {v.dtype}; expected {tuple(k.shape)} {k.dtype} as k is.")
    shape = (rows, *k.shape[1:])
    if any(x.shape != shape or x.dtype != k.dtype for x in own):
        found = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in own)
        raise ValueError(f"own_keys and own_values are {found}; expected {shape} {k.dtype}, heads and dtype as k has.")
    if len(own_keys) != len(own_values) or not own_keys:
        raise ValueError(
            f"own_keys has {len(own_keys)} tensors and own_values {len(own_values)}; expected equally many, at least "
            "one. Without any, call row_attention."
        )
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if is_float64(q) or not use_triton(q) or q.numel() == 0:
        return reference.rollout_attention(q, k, v, own_keys, own_values, offsets, longest, scale=scale, places=places)
    q = q.contiguous()
    k = k.contiguous()
    v = v.contiguous()
    return _RolloutAttention.apply(q, k, v, offsets, longest, scale, places, *(x.contiguous() for x in own))
