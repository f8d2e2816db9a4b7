"""Causal attention over concatenated rows, with an optional window, a soft cap of the scores, and sinks.

With s_ij = scale * q_i . k_j, capped to c * tanh(s_ij / c), over the tokens j of the row of i up to i and, with a
window w, after i - w; and with the sink z of the head:

    L_i  = log(exp(z) + sum_j exp(s_ij))        p_ij = exp(s_ij - L_i)        o_i = sum_j p_ij v_j
    d_i  = do_i . o_i                           dv_j = sum_i p_ij do_i
    ds_ij = p_ij (do_i . v_j - d_i) (1 - tanh^2(s_ij / c))                    dz = -sum_i exp(z - L_i) d_i

A sink is a key that every token sees, with value zero. So a backward pass without sinks gives dq, dk and dv if it gets
o and L with sinks. That is how this file uses PyTorch's flash attention. Flash attention has no cap and no fp32: for
those, the kernels of this file run.

Shapes  q and o (T, H, D), k and v (T, G, D), H a multiple of G, L and d (H, T). Rows by their offsets.
Dtypes  bf16, fp16, fp32, the same for q, k and v. Scores and sums in fp32. Probabilities are rounded to that dtype for
        the product with v, as in any flash attention.
Bytes   Kept for backward: q, k, v, o, L. Scores are never stored.
"""

import functools

import torch

from . import reference
from ._autograd import once_differentiable
from ._dispatch import is_float64, jit, tl, use_triton
from ._launch import cdiv, launch, next_power_of_2, shared_memory

MOST_HEAD_DIM = 256
LOG2E = 1.4426950408889634


@jit
def _scores(dots, scale, cap, CAPPED: tl.constexpr):
    """Return scores times log2(e) from products of q and k, and the slope of the cap. With a cap c, `scale` is the
    scale of the scores times 2 * log2(e) / c, and `cap` is c * log2(e). Without a cap, `scale` includes log2(e).

    r = 1 / (exp(2x) + 1) gives tanh(x) = 1 - 2r and 1 - tanh^2(x) = 4r(1 - r).
    """
    if CAPPED:
        r = 1.0 / (tl.exp2(dots * scale) + 1.0)
        score = cap - 2.0 * cap * r
        slope = 4.0 * r * (1.0 - r)
    else:
        score = dots * scale
        slope = 1.0
    return score, slope


@jit
def _seen(query, key, length, window, WINDOWED: tl.constexpr):
    near = (query >= key) & (query < length)
    if WINDOWED:
        near = near & (query - key < window)
    return near


@jit
def _places(X, start, at, length, head, heads, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return pointers to tokens `at` of a row in one head of X (T, heads, D), and the mask of tokens that exist."""
    d = tl.arange(0, BLOCK_D)
    places = X + ((start + at).to(tl.int64)[:, None] * heads + head) * D + d[None, :]
    return places, (at < length)[:, None] & (d < D)[None, :]


@jit
def _tile(X, start, at, length, head, heads, D: tl.constexpr, BLOCK_D: tl.constexpr):
    places, there = _places(X, start, at, length, head, heads, D, BLOCK_D)
    return tl.load(places, mask=there, other=0.0)


@jit
def _store_tile(X, x, start, at, length, head, heads, D: tl.constexpr, BLOCK_D: tl.constexpr):
    places, there = _places(X, start, at, length, head, heads, D, BLOCK_D)
    tl.store(places, x.to(X.dtype.element_ty), mask=there)


@jit
def _queries(OFFSETS, heads, groups, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr):
    """Return (head, its group of keys, start and length of the row, first query, first key) of this program."""
    head = tl.program_id(1)
    start = tl.load(OFFSETS + tl.program_id(2))
    length = tl.load(OFFSETS + tl.program_id(2) + 1) - start
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # programs with the longest loops start first
    low = 0
    if WINDOWED:
        low = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
    return head, head // (heads // groups), start, length, first, low


@jit
def _upstream(Q, DO, L, DELTA, start, at, length, head, tokens, heads, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load what backward needs of the queries: q, the gradient of their output, log2 of their sums, and delta."""
    q = _tile(Q, start, at, length, head, heads, D, BLOCK_D)
    do = _tile(DO, start, at, length, head, heads, D, BLOCK_D)
    place = head * tokens + start + at
    level = tl.load(L + place, mask=at < length, other=0.0) * 1.4426950408889634
    return q, do, level, tl.load(DELTA + place, mask=at < length, other=0.0)


@jit(do_not_specialize=["tokens"])
def _forward_kernel(
    Q,
    K,
    V,
    SINKS,
    OFFSETS,
    OUT,
    L,
    tokens,
    heads,
    groups,
    scale,
    cap,
    window,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head, group, start, length, first, low = _queries(OFFSETS, heads, groups, window, BLOCK_M, BLOCK_N, WINDOWED)
    if first < length:
        at = first + tl.arange(0, BLOCK_M)
        q = _tile(Q, start, at, length, head, heads, D, BLOCK_D)
        most = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if HAS_SINKS:
            most = tl.zeros([BLOCK_M], tl.float32) + tl.load(SINKS + head).to(tl.float32) * 1.4426950408889634
            total += 1.0
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for begin in range(low, tl.minimum(first + BLOCK_M, length), BLOCK_N):
            key = begin + tl.arange(0, BLOCK_N)
            k = _tile(K, start, key, length, group, groups, D, BLOCK_D)
            s, _ = _scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale, cap, CAPPED)
            s = tl.where(_seen(at[:, None], key[None, :], length, window, WINDOWED), s, float("-inf"))
            new = tl.maximum(most, tl.max(s, 1))
            safe = tl.where(new == float("-inf"), 0.0, new)  # no key seen yet
            p = tl.exp2(s - safe[:, None])
            shrink = tl.exp2(most - safe)
            total = total * shrink + tl.sum(p, 1)
            v = _tile(V, start, key, length, group, groups, D, BLOCK_D)
            acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            most = new
        total = tl.where(at < length, total, 1.0)
        _store_tile(OUT, acc / total[:, None], start, at, length, head, heads, D, BLOCK_D)
        tl.store(L + head * tokens + start + at, (most + tl.log2(total)) / 1.4426950408889634, mask=at < length)


@jit(do_not_specialize=["tokens"])
def _delta_kernel(
    OUT,
    DO,
    DELTA,
    tokens,
    heads,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    head = tl.program_id(1)
    at = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = _tile(OUT, 0, at, tokens, head, heads, D, BLOCK_D).to(tl.float32)
    do = _tile(DO, 0, at, tokens, head, heads, D, BLOCK_D).to(tl.float32)
    tl.store(DELTA + head * tokens + at, tl.sum(o * do, 1), mask=at < tokens)


@jit(do_not_specialize=["tokens"])
def _query_gradient_kernel(
    Q,
    K,
    V,
    DO,
    L,
    DELTA,
    OFFSETS,
    DQ,
    tokens,
    heads,
    groups,
    factor,
    scale,
    cap,
    window,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head, group, start, length, first, low = _queries(OFFSETS, heads, groups, window, BLOCK_M, BLOCK_N, WINDOWED)
    if first < length:
        at = first + tl.arange(0, BLOCK_M)
        q, do, level, delta = _upstream(Q, DO, L, DELTA, start, at, length, head, tokens, heads, D, BLOCK_D)
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for begin in range(low, tl.minimum(first + BLOCK_M, length), BLOCK_N):
            key = begin + tl.arange(0, BLOCK_N)
            k = _tile(K, start, key, length, group, groups, D, BLOCK_D)
            v = _tile(V, start, key, length, group, groups, D, BLOCK_D)
            s, slope = _scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale, cap, CAPPED)
            seen = _seen(at[:, None], key[None, :], length, window, WINDOWED)
            p = tl.exp2(tl.where(seen, s - level[:, None], float("-inf")))
            ds = p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None]) * slope
            dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
        _store_tile(DQ, dq * factor, start, at, length, head, heads, D, BLOCK_D)


@jit(do_not_specialize=["tokens"])
def _key_gradient_kernel(
    Q,
    K,
    V,
    DO,
    L,
    DELTA,
    OFFSETS,
    DK,
    DV,
    tokens,
    heads,
    groups,
    factor,
    scale,
    cap,
    window,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    group, row = tl.program_id(1), tl.program_id(2)
    start = tl.load(OFFSETS + row)
    length = tl.load(OFFSETS + row + 1) - start
    first = tl.program_id(0) * BLOCK_N
    if first < length:
        key = first + tl.arange(0, BLOCK_N)
        k = _tile(K, start, key, length, group, groups, D, BLOCK_D)
        v = _tile(V, start, key, length, group, groups, D, BLOCK_D)
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        high = length
        if WINDOWED:
            high = tl.minimum(first + BLOCK_N - 1 + window, length)
        low = first // BLOCK_M * BLOCK_M
        for head in range(group * (heads // groups), (group + 1) * (heads // groups)):
            for begin in range(low, high, BLOCK_M):
                at = begin + tl.arange(0, BLOCK_M)
                q, do, level, delta = _upstream(Q, DO, L, DELTA, start, at, length, head, tokens, heads, D, BLOCK_D)
                s, slope = _scores(tl.dot(k, tl.trans(q), input_precision=PRECISION), scale, cap, CAPPED)
                seen = _seen(at[None, :], key[:, None], length, window, WINDOWED)
                p = tl.exp2(tl.where(seen, s - level[None, :], float("-inf")))
                dv += tl.dot(p.to(do.dtype), do, input_precision=PRECISION)
                ds = p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :]) * slope
                dk += tl.dot(ds.to(q.dtype), q, input_precision=PRECISION)
        _store_tile(DK, dk * factor, start, key, length, group, groups, D, BLOCK_D)
        _store_tile(DV, dv, start, key, length, group, groups, D, BLOCK_D)


def _tiles(d: int, dtype: torch.dtype, device: torch.device, backward: bool) -> dict[str, int]:
    """Return the tile that a program keeps and the tile it loops over: the largest without register spills on sm_90,
    smaller if shared memory is too small."""
    wide = next_power_of_2(max(16, d))
    # Larger tiles spill registers on sm_90.
    mine = 64 if backward and wide > 128 else 128
    other = 32 if wide > 128 or (backward and wide > 64) else 64
    stages = 2
    room = shared_memory(device)
    width = wide * dtype.itemsize

    def bytes_of() -> int:
        return width * ((1 + backward) * mine + 2 * stages * other) + 2 * mine * other * dtype.itemsize

    while bytes_of() > room and (stages > 1 or mine > 16):
        if stages > 1:
            stages -= 1
        elif other > 16:
            other //= 2
        else:
            mine //= 2
    warps = 4 if mine < 64 or (wide <= 64 and not backward) else 8
    return {"mine": mine, "other": other, "BLOCK_D": wide, "num_warps": warps, "num_stages": stages}


def kernels_forward(q, k, v, offsets, longest, scale, window, softcap, sinks):
    """Return (o, L) by the kernel of this file."""
    (tokens, heads, d), groups = q.shape, k.shape[1]
    o = torch.empty_like(q)
    level = q.new_empty(heads, tokens, dtype=torch.float32)
    tile = _tiles(d, q.dtype, q.device, False)
    block = tile.pop("mine")
    launch(
        _forward_kernel,
        (cdiv(longest, block), heads, len(offsets) - 1),
        q,
        k,
        v,
        q if sinks is None else sinks,
        offsets,
        o,
        level,
        tokens,
        heads,
        groups,
        *_factors(scale, softcap),
        window or 0,
        D=d,
        BLOCK_M=block,
        BLOCK_N=tile.pop("other"),
        CAPPED=softcap is not None,
        WINDOWED=window is not None,
        HAS_SINKS=sinks is not None,
        PRECISION=_precision(q),
        **tile,
    )
    return o, level


def kernels_backward(do, q, k, v, o, level, offsets, longest, scale, window, softcap):
    (tokens, heads, d), groups = q.shape, k.shape[1]
    dq = torch.empty_like(q)
    dk = torch.empty_like(k)
    dv = torch.empty_like(v)
    delta = _delta(o, do)
    constants = {
        "D": d,
        "CAPPED": softcap is not None,
        "WINDOWED": window is not None,
        "PRECISION": _precision(q),
    }
    integers = tokens, heads, groups, scale, *_factors(scale, softcap), window or 0
    tile = _tiles(d, q.dtype, q.device, True)
    block = tile.pop("mine")
    launch(
        _query_gradient_kernel,
        (cdiv(longest, block), heads, len(offsets) - 1),
        q,
        k,
        v,
        do,
        level,
        delta,
        offsets,
        dq,
        *integers,
        BLOCK_M=block,
        BLOCK_N=tile.pop("other"),
        **constants,
        **tile,
    )
    tile = _tiles(d, q.dtype, q.device, True)
    block = tile.pop("mine")
    launch(
        _key_gradient_kernel,
        (cdiv(longest, block), groups, len(offsets) - 1),
        q,
        k,
        v,
        do,
        level,
        delta,
        offsets,
        dk,
        dv,
        *integers,
        BLOCK_N=block,
        BLOCK_M=tile.pop("other"),
        **constants,
        **tile,
    )
    return dq, dk, dv


def _factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return `scale` and `cap` as `_scores` takes them."""
    return (scale * LOG2E, 0.0) if softcap is None else (2 * LOG2E * scale / softcap, softcap * LOG2E)


def _precision(x: torch.Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _delta(o: torch.Tensor, do: torch.Tensor) -> torch.Tensor:
    tokens, heads, d = o.shape
    delta = o.new_empty(heads, tokens, dtype=torch.float32)
    wide = next_power_of_2(max(16, d))
    block = max(1, 8192 // wide)
    launch(_delta_kernel, (cdiv(tokens, block), heads), o, do, delta, tokens, heads, D=d, BLOCK_D=wide, BLOCK_M=block)
    return delta


def flash_forward(q, k, v, offsets, longest, scale, window):
    """Return o (T, H, D), L (H, T) in fp32 and two tensors for `flash_backward`, by PyTorch's flash attention."""
    o, level, seed, unused, _ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        offsets,
        offsets,
        longest,
        longest,
        0.0,
        window is None,
        False,
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )
    return o, level, seed, unused


def flash_backward(do, q, k, v, o, level, offsets, longest, scale, window, state):
    """Return dq, dk and dv. If `o` and `level` cover more keys than k, dq is the gradient through k alone."""
    return torch.ops.aten._flash_attention_backward(
        do,
        q,
        k,
        v,
        o,
        level,
        offsets,
        offsets,
        longest,
        longest,
        0.0,
        window is None,
        *state,
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )


class _RowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, offsets, longest, scale, window, softcap):
        ctx.given = (longest, scale, window, softcap)
        ctx.state = None
        if is_flash(q, softcap):
            o, level, *ctx.state = flash_forward(q, k, v, offsets, longest, scale, window)
            if sinks is not None:
                z = sinks.float()[:, None]
                # Not in place: a checkpoint that keeps the attention result for recomputation checks that it is
                # unchanged.
                o = torch.mul(o, torch.sigmoid(level - z).t()[..., None], out=torch.empty_like(o))
                level = torch.logaddexp(level, z)
        else:
            o, level = kernels_forward(q, k, v, offsets, longest, scale, window, softcap, sinks)
        ctx.save_for_backward(q, k, v, sinks, offsets, o, level)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, sinks, offsets, o, level = ctx.saved_tensors
        do = do.contiguous()
        longest, scale, window, softcap = ctx.given
        dz = None
        if ctx.state is not None:
            dq, dk, dv = flash_backward(do, q, k, v, o, level, offsets, longest, scale, window, ctx.state)
        else:
            dq, dk, dv = kernels_backward(do, q, k, v, o, level, offsets, longest, scale, window, softcap)
        if ctx.needs_input_grad[3]:
            dz = -(torch.exp(sinks.float()[:, None] - level) * _delta(o, do)).sum(1).to(sinks.dtype)
        return dq, dk, dv, dz, *(None,) * 5


def is_flash(q: torch.Tensor, softcap: float | None) -> bool:
    """Return whether PyTorch's flash attention takes the call: 16 bits, an Ampere GPU or later, no cap."""
    if softcap is not None or not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] % 8:
        return False
    return flash_is_built(q.device)


@functools.cache
def flash_is_built(device: torch.device) -> bool:
    """Return whether PyTorch was built with flash attention, and for this GPU."""
    built = torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability(device) >= (8, 0)


def row_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    longest: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention within each of the concatenated rows; differentiable in q, k, v and sinks.

    Args:
        q (`torch.Tensor`): (T, H, D), D at most 256. bf16, fp16, fp32 (float64: the PyTorch twin).
        k, v (`torch.Tensor`): (T, G, D) of the same dtype, H a multiple of G.
        offsets (`torch.Tensor`): int32 (rows + 1,): where each row begins, and T.
        longest (`int`): Tokens of the longest row. A smaller number leaves tokens out.
        scale (`float`, *optional*): Factor of the products of q and k. Unset: 1 / sqrt(D).
        window (`int`, *optional*): How many tokens a token sees, itself included. Unset: all of its row up to itself.
        softcap (`float`, *optional*): c: scores become c * tanh(score / c).
        sinks (`torch.Tensor`, *optional*): (H,), for each head the score of an extra key with value zero.

    Returns:
        `torch.Tensor`: (T, H, D).

    Raises:
        ValueError: Shapes or dtypes disagree, or D is more than 256.
    """
    fits = q.ndim == k.ndim == 3 and k.shape == v.shape and (q.shape[0], q.shape[2]) == (k.shape[0], k.shape[2])
    if not fits or q.shape[1] % k.shape[1] or q.shape[2] > MOST_HEAD_DIM or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q is {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype}; expected q "
            "(T, H, D), k and v (T, G, D) of one dtype, H a multiple of G and D at most 256."
        )
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks is {tuple(sinks.shape)}; expected one number for each of {q.shape[1]} heads.")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if is_float64(q, sinks) or not use_triton(q) or q.numel() == 0:
        return reference.row_attention(
            q, k, v, offsets, longest, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
    q = q.contiguous()
    k = k.contiguous()
    v = v.contiguous()
    return _RowAttention.apply(q, k, v, sinks, offsets, longest, scale, window, softcap)
