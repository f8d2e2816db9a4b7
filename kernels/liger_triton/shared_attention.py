"""Attention of a few calls over parts of one row of tokens, merged by their log-sum-exp.

With scores s_ij = scale * q_i . k_j, call c sees a set of keys J_c(i), and the sets of one query do not overlap:

    L_ci = log sum_{j in J_c} exp(s_ij)        o_ci = sum_{j in J_c} exp(s_ij - L_ci) v_j
    L_i  = log(exp(z) + sum_c exp(L_ci))       o_i  = sum_c exp(L_ci - L_i) o_ci      (z: the sink of the head)
    p_ij = exp(s_ij - L_i)                     d_i  = do_i . o_i
    dv_j = sum_i p_ij do_i                     ds_ij = p_ij (do_i . v_j - d_i)        dz = -sum_i exp(z - L_i) d_i

Each gradient is a sum over i and j, so it is the sum over the calls, if the backward pass of every call gets the merged
o and L. That is how flash attention is used here: its backward takes both as arguments. It has to be one autograd
function around all calls, since the log-sum-exp of flash attention has no gradient: merged outside of one, the
gradients would be wrong without an error.

Shapes  q and o (T, H, D), k and v (N, G, D), H a multiple of G, L (H, T).
Dtypes  On a GPU bf16 and fp16, by PyTorch's flash attention. Elsewhere any, by the explicit formulas in fp32 or fp64.
"""

from typing import NamedTuple

import torch

from ._autograd import once_differentiable
from ._dispatch import jit, runs_triton, tl
from ._launch import cdiv, launch, next_power_of_2
from .row_attention import MOST_HEAD_DIM, flash_is_built

MERGED_TOKENS = 8  # tokens and heads of a tile of the merge
MERGED_HEADS = 4
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class AttentionCall(NamedTuple):
    """One call: rows of queries, each with a row of keys.

    A row may have queries and no keys, and they see nothing in this call. Or it has keys and no queries, and no query
    sees them. So the tables of a captured call can cover all of q and k, whatever the lengths of its rows are.

    Attributes:
        first_query (`int`): The queries are those of q from here on; of the first call 0.
        query_offsets (`torch.Tensor`): int32 (rows + 1,), where each row of them begins, and the end.
        most_queries (`int`): Of the longest row.
        keys (`int`): The keys are the first so many of k.
        key_offsets (`torch.Tensor`): int32 (rows + 1,).
        most_keys (`int`): Of the longest row.
        causal (`bool`): Whether a query sees the keys up to its own; the last query and the last key of a row are one.
        window (`int`, *optional*): How many keys a query of a causal call sees, its own included.
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
    """Merge the attention of `calls`; differentiable in q, k, v and sinks.

    Args:
        q (`torch.Tensor`): (T, H, D), D at most 256.
        k, v (`torch.Tensor`): (N, G, D) of the same dtype, H a multiple of G.
        calls (`list[AttentionCall]`): The first has all queries. No query sees a key in two of them.
        scale (`float`, *optional*): Factor of the products of q and k. Unset: 1 / sqrt(D).
        sinks (`torch.Tensor`, *optional*): (H,), for each head the score of an extra key with value zero.

    Returns:
        `torch.Tensor`: (T, H, D).

    Raises:
        ValueError: `why_not` has a reason.
    """
    reason = why_not(q)
    if reason is not None:
        raise ValueError(f"q is {tuple(q.shape)} {q.dtype} on {q.device}: {reason}.")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return _SharedAttention.apply(q.contiguous(), k.contiguous(), v.contiguous(), sinks, calls, scale)


def why_not(q: torch.Tensor) -> str | None:
    """Tell why no attention here takes such queries, or return None."""
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
        run = _by_flash if q.is_cuda else _explicitly
        first, *others = (run(call, q[call.first_query :], k[: call.keys], v[: call.keys], scale) for call in calls)
        o, level, _ = first
        for call, (other, other_level, _) in zip(calls[1:], others, strict=True):
            o, level = _merged(o, level, other, other_level, call.first_query)
        if sinks is not None:
            z = sinks.to(level.dtype)[:, None]
            # Not in place: selective checkpointing checks that a kept result of attention is unchanged.
            o = (o * torch.sigmoid(level - z).t()[..., None]).to(o.dtype)
            level = torch.logaddexp(level, z)
        ctx.calls, ctx.scale = calls, scale
        ctx.states = [state for *_, state in (first, *others)]
        ctx.save_for_backward(q, k, v, sinks, o, level)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, sinks, o, level = ctx.saved_tensors
        do = do.contiguous()
        dq = dk = dv = None
        for call, state in zip(ctx.calls, ctx.states, strict=True):
            start = call.first_query
            given = do[start:], q[start:], k[: call.keys], v[: call.keys], o[start:], level[:, start:].contiguous()
            gradients = _gradients_explicitly if state is None else _gradients_by_flash
            more_q, more_k, more_v = gradients(call, state, *given, ctx.scale)
            if dq is None:
                dq, dk, dv = more_q, more_k, more_v
                continue
            # Two addends in 16 bits: PyTorch adds them in fp32, and rounds once.
            dq[start:] += more_q
            dk[: call.keys] += more_k
            dv[: call.keys] += more_v
        dz = None
        if sinks is not None and ctx.needs_input_grad[3]:
            delta = (do.to(level.dtype) * o.to(level.dtype)).sum(-1).t()
            dz = -(torch.exp(sinks.to(level.dtype)[:, None] - level) * delta).sum(1).to(sinks.dtype)
        return dq, dk, dv, dz, None, None


def _merged(o, level, other, other_level, start: int):
    """(o, L) of all queries. Those from `start` on were in another call too.

    Where a query has seen no key in it, its L is -inf, the log of an empty sum. Flash attention writes +inf there.
    """
    if runs_triton(o, other):
        return _merged_by_kernel(o, level, other, other_level, start)
    mine = level[:, start:]
    other_level = other_level.masked_fill(other_level == float("inf"), float("-inf"))
    share = torch.sigmoid(mine - other_level).t()[..., None]
    # 1 - share loses digits where share is near 1.
    rest = torch.sigmoid(other_level - mine).t()[..., None]
    both = (o[start:] * share + other * rest).to(o.dtype)
    levels = torch.logaddexp(mine, other_level)
    return torch.cat((o[:start], both)), torch.cat((level[:, :start], levels), 1)


def _merged_by_kernel(o, level, other, other_level, start: int):
    # Not in place: selective checkpointing keeps the results of attention, and merges them again when it recomputes.
    out, levels = torch.empty_like(o), torch.empty_like(level)
    tokens, heads, dim = o.shape
    grid = cdiv(tokens, MERGED_TOKENS), cdiv(heads, MERGED_HEADS)
    sizes = {"BLOCK_T": MERGED_TOKENS, "BLOCK_H": MERGED_HEADS, "BLOCK_D": next_power_of_2(dim)}
    pointers = o, level.contiguous(), other, other_level.contiguous(), out, levels
    launch(_merge_kernel, grid, *pointers, tokens, start, heads, dim, **sizes, num_warps=4)
    return out, levels


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
    """Merge rows of o (tokens, heads, dim) and L (heads, tokens) with those of another call that begins at `start`."""
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    # Tokens lie side by side in L, so they come first in a tile.
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
    level = largest + tl.log(tl.exp(mine - largest) + tl.exp(theirs - largest))
    tl.store(OUT_L + h * tokens.to(tl.int64) + t, level, mask=is_row)
    column = tl.arange(0, BLOCK_D)
    at = (t * heads + h)[:, None] * dim + column[None, :]
    is_number = is_row[:, None] & (column < dim)[None, :]
    o = tl.load(OWN + at, mask=is_number, other=0.0).to(tl.float32)
    before = (start.to(tl.int64) * heads) * dim
    is_theirs = is_other[:, None] & (column < dim)[None, :]
    other = tl.load(OTHER + at - before, mask=is_theirs, other=0.0).to(tl.float32)
    tl.store(OUT + at, o * share[:, None] + other * rest[:, None], mask=is_number)


# By PyTorch's flash attention


def _options(call: AttentionCall, scale: float) -> dict:
    if not call.causal:
        return {"scale": scale, "window_size_left": None, "window_size_right": None}
    left = -1 if call.window is None else call.window - 1
    return {"scale": scale, "window_size_left": left, "window_size_right": 0}


def _lengths(call: AttentionCall, device: torch.device) -> tuple:
    offsets = call.query_offsets.to(device), call.key_offsets.to(device)  # layers may be spread over devices
    return *offsets, call.most_queries, call.most_keys, 0.0, call.causal and call.window is None


def _by_flash(call: AttentionCall, q, k, v, scale: float):
    """(o, L, what its backward needs)."""
    o, level, *state, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, *_lengths(call, q.device), False, **_options(call, scale)
    )
    return o, level, state


def _gradients_by_flash(call: AttentionCall, state, do, q, k, v, o, level, scale: float):
    return torch.ops.aten._flash_attention_backward(
        do, q, k, v, o, level, *_lengths(call, q.device), *state, **_options(call, scale)
    )


# By the formulas


def _rows(call: AttentionCall):
    """The slices of queries and of keys of each row."""
    queries, keys = call.query_offsets.tolist(), call.key_offsets.tolist()
    for row in range(len(queries) - 1):
        yield slice(queries[row], queries[row + 1]), slice(keys[row], keys[row + 1])


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _heads(x: torch.Tensor, count: int) -> torch.Tensor:
    """x (N, G, D) as (H, N, D), wide."""
    return _wide(x).repeat_interleave(count // x.shape[1], 1).transpose(0, 1)


def _scores(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """(H, M, N), from q (M, H, D) and k (N, G, D) of one row."""
    scores = scale * (_heads(q, q.shape[1]) @ _heads(k, q.shape[1]).transpose(1, 2))
    if not call.causal:
        return scores
    at = torch.arange(k.shape[0], device=q.device)
    distance = at[k.shape[0] - q.shape[0] :, None] - at
    seen = distance >= 0
    if call.window is not None:
        seen &= distance < call.window
    return scores.masked_fill(~seen, float("-inf"))


def _explicitly(call: AttentionCall, q, k, v, scale: float):
    """(o, L, None)."""
    o = torch.empty_like(q)
    level = _wide(q.new_empty(0)).new_empty(q.shape[1], q.shape[0])
    for mine, theirs in _rows(call):
        scores = _scores(call, q[mine], k[theirs], scale)
        level[:, mine] = scores.logsumexp(-1)
        weights = torch.exp(scores - level[:, mine, None])
        o[mine] = (weights @ _heads(v[theirs], q.shape[1])).transpose(0, 1).to(o.dtype)
    return o, level, None


def _gradients_explicitly(call: AttentionCall, state, do, q, k, v, o, level, scale: float):
    heads, groups = q.shape[1], k.shape[1]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for mine, theirs in _rows(call):
        weights = torch.exp(_scores(call, q[mine], k[theirs], scale) - level[:, mine, None])
        upstream = _heads(do[mine], heads)
        delta = (upstream * _heads(o[mine], heads)).sum(-1, keepdim=True)
        of_scores = scale * weights * (upstream @ _heads(v[theirs], heads).transpose(1, 2) - delta)
        dq[mine] = (of_scores @ _heads(k[theirs], heads)).transpose(0, 1).to(q.dtype)
        of_keys = of_scores.transpose(1, 2) @ _heads(q[mine], heads)
        of_values = weights.transpose(1, 2) @ upstream
        dk[theirs] = of_keys.unflatten(0, (groups, -1)).sum(1).transpose(0, 1).to(k.dtype)
        dv[theirs] = of_values.unflatten(0, (groups, -1)).sum(1).transpose(0, 1).to(v.dtype)
    return dq, dk, dv
