"""Attention computed by several calls, each over a part of the keys, and merged by log-sum-exp.

With scores s_ij = scale * q_i . k_j, query i sees the keys J_c(i) in call c, and no key in two calls:

    L_ci = log sum_{j in J_c} exp(s_ij)        o_ci = sum_{j in J_c} exp(s_ij - L_ci) v_j
    L_i  = log(exp(z) + sum_c exp(L_ci))       o_i  = sum_c exp(L_ci - L_i) o_ci      (z: the sink of the head)
    p_ij = exp(s_ij - L_i)                     d_i  = do_i . o_i
    dv_j = sum_i p_ij do_i                     ds_ij = p_ij (do_i . v_j - d_i)        dz = -sum_i exp(z - L_i) d_i

Each gradient is a sum over i and j. So it is the sum of the gradients of the calls, if the backward of every call gets
the merged o and L. Flash attention's backward takes both as arguments. One autograd function has to contain all calls:
flash attention's log-sum-exp has no gradient, so merging outside would give wrong gradients without an error.

Shapes  q and o (T, H, D), k and v (N, G, D), H a multiple of G, L (H, T).
Dtypes  On a GPU bf16 and fp16, with PyTorch's flash attention. Elsewhere any, with the formulas above in fp32 or fp64.
"""

from itertools import pairwise
from typing import NamedTuple

import torch

from ._autograd import once_differentiable
from ._dispatch import jit, runs_triton, tl
from ._launch import cdiv, launch, next_power_of_2
from .row_attention import MOST_HEAD_DIM, flash_is_built

# A program merges so many tokens of so many heads.
MERGED_TOKENS = 8
MERGED_HEADS = 4
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class AttentionCall(NamedTuple):
    """The rows of one call: queries, and the keys that they see.

    A row without keys has queries that see nothing in this call. A row without queries has keys that are not seen. With
    such rows, the offsets of a captured call can cover all of q and k, whatever the lengths of its rows are.

    Attributes:
        first_query (`int`): The call has the queries `q[first_query:]`. 0 in the first call.
        query_offsets (`torch.Tensor`): int32 (rows + 1,), the start of each row of these queries, and their end.
        most_queries (`int`): The queries of the longest row.
        keys (`int`): The call has the keys `k[:keys]`.
        key_offsets (`torch.Tensor`): int32 (rows + 1,), the start of each row of keys, and their end.
        most_keys (`int`): The keys of the longest row.
        causal (`bool`): A query sees the keys up to its own. The last query of a row belongs to the last key.
        window (`int`, *optional*): In a causal call, the number of keys that a query sees, including its own.
    """

    first_query: int
    query_offsets: torch.Tensor
    most_queries: int
    keys: int
    key_offsets: torch.Tensor
    most_keys: int
    causal: bool
    window: int | None = None


def shared_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    calls: list[AttentionCall],
    *,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the attention of `calls` and merge it; differentiable in q, k, v and sinks.

    Args:
        q (`torch.Tensor`): (T, H, D), D at most 256.
        k, v (`torch.Tensor`): (N, G, D) of the same dtype, H a multiple of G.
        calls (`list[AttentionCall]`): The first call has all queries. No query sees the same key in two calls.
        scale (`float`, *optional*): Multiplies the products of q and k. Unset: 1 / sqrt(D).
        sinks (`torch.Tensor`, *optional*): (H,), the score of one more key for each head. Its value is zero.

    Returns:
        `torch.Tensor`: (T, H, D).

    Raises:
        ValueError: `why_not` gives a reason.
    """
    reason = why_not(q)
    if reason is not None:
        raise ValueError(f"q is {tuple(q.shape)} {q.dtype} on {q.device}: {reason}.")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return _SharedAttention.apply(q.contiguous(), k.contiguous(), v.contiguous(), sinks, calls, scale)


def why_not(q: torch.Tensor) -> str | None:
    """Return the reason why these queries are not supported, or None."""
    if q.shape[-1] > MOST_HEAD_DIM:
        return f"its heads are wider than {MOST_HEAD_DIM}"
    if not q.is_cuda:
        return None
    if q.dtype not in _SIXTEEN_BITS:
        return "on a GPU its dtype has to be bfloat16 or float16"
    if q.shape[-1] % 8:
        return "on a GPU the width of its heads has to be a multiple of 8"
    return None if flash_is_built(q.device) else "this PyTorch has no flash attention for this GPU"


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, calls, scale):
        run = _flash_forward if q.is_cuda else _explicit_forward
        states = []
        for call in calls:
            other, other_lse, state = run(call, q[call.first_query :], k[: call.keys], v[: call.keys], scale)
            states.append(state)
            if len(states) == 1:
                o, lse = other, other_lse
            else:
                o, lse = _merge(o, lse, other, other_lse, call.first_query)
        if sinks is not None:
            z = sinks.to(lse.dtype)[:, None]
            # Not in place: selective checkpointing checks that the saved output of attention is unchanged.
            o = (o * torch.sigmoid(lse - z).t()[..., None]).to(o.dtype)
            lse = torch.logaddexp(lse, z)
        ctx.calls = calls
        ctx.scale = scale
        ctx.states = states
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, sinks, o, lse = ctx.saved_tensors
        do = do.contiguous()
        dq = dk = dv = None
        for call, state in zip(ctx.calls, ctx.states, strict=True):
            start = call.first_query
            given = do[start:], q[start:], k[: call.keys], v[: call.keys], o[start:], lse[:, start:].contiguous()
            gradients = _explicit_backward if state is None else _flash_backward
            more_q, more_k, more_v = gradients(call, state, *given, ctx.scale)
            if dq is None:
                dq, dk, dv = more_q, more_k, more_v
                continue
            # PyTorch adds two 16-bit tensors in fp32 and rounds once.
            dq[start:] += more_q
            dk[: call.keys] += more_k
            dv[: call.keys] += more_v
        dz = None
        if sinks is not None and ctx.needs_input_grad[3]:
            delta = (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1).t()
            dz = -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum(1).to(sinks.dtype)
        return dq, dk, dv, dz, None, None


def _merge(o, lse, other, other_lse, start: int):
    """Merge o and L of all queries with o and L of another call, which has the queries from `start` on.

    A query that has seen no key in the other call has L = -inf there, the log of an empty sum. Flash attention writes
    +inf instead.
    """
    if runs_triton(o, other):
        return _merge_by_kernel(o, lse, other, other_lse, start)
    mine = lse[:, start:]
    other_lse = other_lse.masked_fill(other_lse == float("inf"), float("-inf"))
    share = torch.sigmoid(mine - other_lse).t()[..., None]
    # 1 - share loses digits where share is near 1.
    rest = torch.sigmoid(other_lse - mine).t()[..., None]
    both = (o[start:] * share + other * rest).to(o.dtype)
    lses = torch.logaddexp(mine, other_lse)
    return torch.cat((o[:start], both)), torch.cat((lse[:, :start], lses), 1)


def _merge_by_kernel(o, lse, other, other_lse, start: int):
    # Not in place: selective checkpointing saves the outputs of attention, and merges them again when it recomputes.
    out = torch.empty_like(o)
    lses = torch.empty_like(lse)
    tokens, heads, dim = o.shape
    grid = cdiv(tokens, MERGED_TOKENS), cdiv(heads, MERGED_HEADS)
    sizes = {"BLOCK_T": MERGED_TOKENS, "BLOCK_H": MERGED_HEADS, "BLOCK_D": next_power_of_2(dim)}
    pointers = o, lse.contiguous(), other, other_lse.contiguous(), out, lses
    launch(_merge_kernel, grid, *pointers, tokens, start, heads, dim, **sizes, num_warps=4)
    return out, lses


@jit(do_not_specialize=["tokens", "start"])
def _merge_kernel(
    OWN,
    OWN_L,
    OTHER,
    OTHER_L,
    OUT,
    OUT_L,
    tokens,
    start,
    heads,
    dim,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge o (tokens, heads, dim) and L (heads, tokens) with another call that has the tokens from `start` on."""
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    # L is contiguous in tokens, so tokens vary fastest in a tile.
    t = (tl.program_id(0) * BLOCK_T + row % BLOCK_T).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + row // BLOCK_T
    is_row = (t < tokens) & (h < heads)
    is_other = is_row & (t >= start)
    mine = tl.load(OWN_L + h * tokens.to(tl.int64) + t, mask=is_row, other=0.0)
    theirs = tl.load(OTHER_L + h * (tokens - start).to(tl.int64) + t - start, mask=is_other, other=float("-inf"))
    theirs = tl.where(theirs == float("inf"), float("-inf"), theirs)
    share = tl.sigmoid(mine - theirs)
    rest = tl.sigmoid(theirs - mine)  # 1 - share loses digits where share is near 1
    largest = tl.maximum(mine, theirs)
    lse = largest + tl.log(tl.exp(mine - largest) + tl.exp(theirs - largest))
    tl.store(OUT_L + h * tokens.to(tl.int64) + t, lse, mask=is_row)
    column = tl.arange(0, BLOCK_D)
    at = (t * heads + h)[:, None] * dim + column[None, :]
    is_number = is_row[:, None] & (column < dim)[None, :]
    o = tl.load(OWN + at, mask=is_number, other=0.0).to(tl.float32)
    before = (start.to(tl.int64) * heads) * dim
    is_theirs = is_other[:, None] & (column < dim)[None, :]
    other = tl.load(OTHER + at - before, mask=is_theirs, other=0.0).to(tl.float32)
    tl.store(OUT + at, o * share[:, None] + other * rest[:, None], mask=is_number)


# With PyTorch's flash attention


def _flash_options(call: AttentionCall, scale: float) -> dict:
    if not call.causal:
        return {"scale": scale, "window_size_left": None, "window_size_right": None}
    left = -1 if call.window is None else call.window - 1
    return {"scale": scale, "window_size_left": left, "window_size_right": 0}


def _lengths(call: AttentionCall, device: torch.device) -> tuple:
    offsets = call.query_offsets.to(device), call.key_offsets.to(device)  # layers may be spread over devices
    return *offsets, call.most_queries, call.most_keys, 0.0, call.causal and call.window is None


def _flash_forward(call: AttentionCall, q, k, v, scale: float):
    """Return (o, L, what the backward needs)."""
    o, lse, *state, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, *_lengths(call, q.device), False, **_flash_options(call, scale)
    )
    return o, lse, state


def _flash_backward(call: AttentionCall, state, do, q, k, v, o, lse, scale: float):
    return torch.ops.aten._flash_attention_backward(
        do, q, k, v, o, lse, *_lengths(call, q.device), *state, **_flash_options(call, scale)
    )


# With the formulas, for other devices


def _row_slices(call: AttentionCall):
    """Yield the slice of queries and the slice of keys of each row."""
    query_offsets = call.query_offsets.tolist()
    key_offsets = call.key_offsets.tolist()
    for queries, keys in zip(pairwise(query_offsets), pairwise(key_offsets), strict=True):
        yield slice(*queries), slice(*keys)


def _at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _heads_first(x: torch.Tensor, count: int) -> torch.Tensor:
    """x (N, G, D) as (H, N, D) in fp32 or fp64, with H = `count`."""
    return _at_least_fp32(x).repeat_interleave(count // x.shape[1], 1).transpose(0, 1)


def _scores(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """(H, M, N), from q (M, H, D) and k (N, G, D) of one row."""
    scores = scale * (_heads_first(q, q.shape[1]) @ _heads_first(k, q.shape[1]).transpose(1, 2))
    if not call.causal:
        return scores
    at = torch.arange(k.shape[0], device=q.device)
    distance = at[k.shape[0] - q.shape[0] :, None] - at
    seen = distance >= 0
    if call.window is not None:
        seen &= distance < call.window
    return scores.masked_fill(~seen, float("-inf"))


def _explicit_forward(call: AttentionCall, q, k, v, scale: float):
    """Return (o, L, None)."""
    o = torch.empty_like(q)
    lse = _at_least_fp32(q.new_empty(0)).new_empty(q.shape[1], q.shape[0])
    for queries, keys in _row_slices(call):
        scores = _scores(call, q[queries], k[keys], scale)
        lse[:, queries] = scores.logsumexp(-1)
        weights = torch.exp(scores - lse[:, queries, None])
        o[queries] = (weights @ _heads_first(v[keys], q.shape[1])).transpose(0, 1).to(o.dtype)
    return o, lse, None


def _explicit_backward(call: AttentionCall, state, do, q, k, v, o, lse, scale: float):
    heads, groups = q.shape[1], k.shape[1]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for queries, keys in _row_slices(call):
        weights = torch.exp(_scores(call, q[queries], k[keys], scale) - lse[:, queries, None])
        upstream = _heads_first(do[queries], heads)
        delta = (upstream * _heads_first(o[queries], heads)).sum(-1, keepdim=True)
        of_scores = scale * weights * (upstream @ _heads_first(v[keys], heads).transpose(1, 2) - delta)
        dq[queries] = (of_scores @ _heads_first(k[keys], heads)).transpose(0, 1).to(q.dtype)
        of_keys = of_scores.transpose(1, 2) @ _heads_first(q[queries], heads)
        of_values = weights.transpose(1, 2) @ upstream
        dk[keys] = of_keys.unflatten(0, (groups, -1)).sum(1).transpose(0, 1).to(k.dtype)
        dv[keys] = of_values.unflatten(0, (groups, -1)).sum(1).transpose(0, 1).to(v.dtype)
    return dq, dk, dv
