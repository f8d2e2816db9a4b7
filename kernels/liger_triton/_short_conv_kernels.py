"""The kernels of `short_conv`. A program walks along tokens and keeps the last K vectors of channels in registers.

So a token is loaded once, and a and g are computed once for it. In a tile of tokens by channels, each tap would load
the tile again, and silu would be computed K times over.

The number of instructions decides as much as the bytes do: an element takes 13 forward and 27 backward. What depends on
where rows begin is therefore decided for a run of tokens at once. In a plain run every tap lies in its row, and every
token and channel exists: nothing is compared or masked. The others, where rows or tensors begin and end, compare for
each token and tap. Both give a row the same bits, wherever it lies. So products are added by `tl.fma`: in a sum of two
products the compiler would choose which one to round, and not in all runs the same.

A run is loaded while the one before it is computed. On an H200, for 8192 tokens of 8192 channels, that took 0.82 of the
time forward and 0.86 backward. Twice the channels in a program, and so twice the registers, were not faster.
"""

from ._dispatch import jit, tl

NO_ROW = tl.constexpr(2147483647)  # where the row after the last one begins


@jit
def _row_at(CU_SEQLENS, token, offsets, steps):
    """(how many of the ascending offsets are not above the token, where its row begins, where the next one begins)"""
    low = token * 0  # so many offsets are known not to be above the token
    high = low + offsets
    for _ in range(steps):
        middle = (low + high) // 2
        offset = tl.load(CU_SEQLENS + middle, mask=middle < offsets, other=NO_ROW)
        is_behind = offset <= token
        low = tl.where(is_behind, middle + 1, low)
        high = tl.where(is_behind, high, middle)
    start = tl.load(CU_SEQLENS + low - 1, mask=low > 0, other=0)
    after = tl.load(CU_SEQLENS + low, mask=low < offsets, other=NO_ROW)
    return low, start, after


@jit
def _row_of_next(CU_SEQLENS, token, offsets, row, start, after):
    """What `_row_at` returns for the token, from what it returns for one before it."""
    while after <= token:  # more than once past empty rows
        row += 1
        start = after
        after = tl.load(CU_SEQLENS + row, mask=row < offsets, other=NO_ROW)
    return row, start, after


@jit
def _among(token, low, high, here):
    """`here` if low <= token < high. Compared as a vector: Triton's interpreter makes no mask of a number."""
    tokens = token + tl.zeros_like(here).to(tl.int32)
    return here & (tokens >= low) & (tokens < high)


@jit
def _place(X, token, stride):
    """The address of a token, in 64 bits: 128k tokens of 16k channels are 2**31 elements."""
    return X + token.to(tl.int64) * stride


@jit
def _loaded(X, first, stride, end, col, here, TOKENS: tl.constexpr):
    """The vectors of some tokens, all loaded before any of them is needed; zeros outside of [0, end)."""
    xs = ()
    for i in tl.static_range(TOKENS):
        token = first + i
        xs = xs + (tl.load(_place(X, token, stride) + col, mask=_among(token, 0, end, here), other=0.0),)
    return xs


@jit
def _part_of(
    program, FIRST, SECOND, THIRD, stride, stride_2, stride_3, width, width_2, c, SPLIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """(how many vectors of channels there are, the tensor that holds these channels, the stride of
    its tokens, the first of these channels, and where the tensor's channels end)

    SPLIT: three tensors hold the channels, `width` and `width_2` of them the first two. No vector crosses from one to
    the next. The tensor is moved back by the channels before its first one, so that they count as those of x do.
    """
    if SPLIT:
        vectors_1 = tl.cdiv(width, BLOCK_C)
        vectors_2 = vectors_1 + tl.cdiv(width_2, BLOCK_C)
        vectors = vectors_2 + tl.cdiv(c - width - width_2, BLOCK_C)
        vector = program % vectors
        is_first = vector < vectors_1
        is_before_third = vector < vectors_2
        part = tl.where(is_first, 0, tl.where(is_before_third, width, width + width_2))
        end = tl.where(is_first, width, tl.where(is_before_third, width + width_2, c))
        channel = part + (vector - tl.where(is_first, 0, tl.where(is_before_third, vectors_1, vectors_2))) * BLOCK_C
        tensor = tl.where(is_first, FIRST, tl.where(is_before_third, SECOND, THIRD)) - part
        stride = tl.where(is_first, stride, tl.where(is_before_third, stride_2, stride_3))
    else:
        vectors = tl.cdiv(c, BLOCK_C)
        vector = program % vectors
        tensor = FIRST
        channel = vector * BLOCK_C
        end = c
    return vectors, tensor, stride, channel, end


@jit
def _begin(X, W, B, begin, x_stride, t, col, here, K: tl.constexpr, HAS_BIAS: tl.constexpr):
    """(the taps of each channel, the bias, the K - 1 tokens before the first one), in fp32"""
    taps, xs = (), ()
    for k in tl.static_range(K):
        taps = taps + (tl.load(W + col * K + k, mask=here, other=0.0).to(tl.float32),)
    bias = tl.zeros_like(taps[0])
    if HAS_BIAS:
        bias += tl.load(B + col, mask=here, other=0.0).to(tl.float32)
    before = _loaded(X, begin - (K - 1), x_stride, t, col, here, K - 1)
    for i in tl.static_range(K - 1):
        xs = xs + (before[i].to(tl.float32),)
    return taps, bias, xs


@jit
def _in_row(x, token, start, IS_IN: tl.constexpr):
    """x, or zeros if the row begins after the token. IS_IN: it is known that it does not."""
    if not IS_IN:
        x = tl.where(token >= start, x, 0.0)
    return x


@jit
def _sigmoid(a):
    """(s, 1 - s) of s = 1 / (1 + exp(-a)), which takes five instructions. The division of `tl.sigmoid` alone takes as
    many."""
    r = tl.rsqrt(1.0 + tl.exp2(a * -1.4426950408889634))
    return r * r, tl.fma(-r, r, 1.0)


@jit
def _convolved(xs, taps, bias, token, start, K: tl.constexpr, PLAIN: tl.constexpr):
    """a of a token, from its own vector, which is the last of `xs`, and from those of the K - 1 tokens before it."""
    a = bias
    for k in tl.static_range(K):
        a = tl.fma(taps[k], _in_row(xs[k], token - (K - 1) + k, start, PLAIN or k == K - 1), a)
    return a


@jit
def _forward_run(
    xs, loaded, taps, bias, Y, CU_SEQLENS, first, row, start, after, offsets, t, y_stride, col, here, K: tl.constexpr,
    SILU: tl.constexpr, RUN: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Store y of a run. Return the K - 1 tokens at its end, and what `_row_at` returns for the last one."""
    for i in tl.static_range(RUN):
        token = first + i
        if not PLAIN:
            row, start, after = _row_of_next(CU_SEQLENS, token, offsets, row, start, after)
        xs = xs + (loaded[i].to(tl.float32),)
        y = _convolved(xs, taps, bias, token, start, K, PLAIN)
        if SILU:
            s, _ = _sigmoid(y)
            y *= s
        place = _place(Y, token, y_stride) + col
        if PLAIN:
            tl.store(place, y)
        else:
            tl.store(place, y, mask=_among(token, 0, t, here))
        xs = xs[1:]
    return xs, row, start, after


@jit(do_not_specialize=["t", "offsets", "steps", "tokens"])
def _forward_kernel(
    X, W, B, CU_SEQLENS, Y, Y_2, Y_3, x_stride, t, c, width, width_2, offsets, steps, tokens,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, SPLIT: tl.constexpr, RUN: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    vectors, Y, y_stride, channel, end_channel = _part_of(
        program, Y, Y_2, Y_3, width, width_2, c - width - width_2, width, width_2, c, SPLIT, BLOCK_C
    )
    col = channel + tl.arange(0, BLOCK_C)
    here = col < end_channel
    is_whole = channel + BLOCK_C <= end_channel
    begin = program // vectors * tokens
    end = tl.minimum(begin + tokens, t)
    taps, bias, xs = _begin(X, W, B, begin, x_stride, t, col, here, K, HAS_BIAS)
    row, start, after = _row_at(CU_SEQLENS, begin, offsets, steps)
    upcoming = _loaded(X, begin, x_stride, end, col, here, RUN)
    for run in range(tokens // RUN):
        first = begin + run * RUN
        loaded = upcoming
        upcoming = _loaded(X, first + RUN, x_stride, end, col, here, RUN)
        if is_whole & (first + RUN <= t) & (start + (K - 1) <= first) & (first + RUN <= after):
            xs, row, start, after = _forward_run(
                xs, loaded, taps, bias, Y, CU_SEQLENS, first, row, start, after, offsets, t, y_stride, col, here, K,
                SILU, RUN, True,
            )  # fmt: skip
        else:
            xs, row, start, after = _forward_run(
                xs, loaded, taps, bias, Y, CU_SEQLENS, first, row, start, after, offsets, t, y_stride, col, here, K,
                SILU, RUN, False,
            )  # fmt: skip


@jit
def _backward_run(
    xs, dxs, dws, db, loaded, upstream, taps, bias, DX, CU_SEQLENS, first, row, start, after, offsets, begin, t, c, col,
    here, K: tl.constexpr, SILU: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr, NEED_DB: tl.constexpr,
    TOKENS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Add g of each token to dx of the token and of the K - 1 before it, to dw and to db, and store dx where it is
    complete: of the token K - 1 before each. Return the sums, and what `_forward_run` returns."""
    for i in tl.static_range(TOKENS):
        token = first + i
        if not PLAIN:
            row, start, after = _row_of_next(CU_SEQLENS, token, offsets, row, start, after)
        xs = xs + (loaded[i].to(tl.float32),)
        g = upstream[i].to(tl.float32)
        if SILU:
            a = _convolved(xs, taps, bias, token, start, K, PLAIN)
            s, rest = _sigmoid(a)
            g *= s * tl.fma(a, rest, 1.0)
        if not PLAIN:
            g = tl.where(token < t, g, 0.0)
        if NEED_DX:
            sums = ()
            for k in tl.static_range(K - 1):
                sums = sums + (tl.fma(taps[k], _in_row(g, token - (K - 1) + k, start, PLAIN), dxs[k]),)
            dxs = sums + (taps[K - 1] * g,)
            complete = token - (K - 1)
            place = _place(DX, complete, c) + col
            if PLAIN and i >= K - 1:
                tl.store(place, dxs[0])
            else:
                tl.store(place, dxs[0], mask=_among(complete, begin, t, here))
            dxs = dxs[1:]
        if NEED_DW:
            sums = ()
            for k in tl.static_range(K):
                x = _in_row(xs[k], token - (K - 1) + k, start, PLAIN or k == K - 1)
                sums = sums + (tl.fma(g, x, dws[k]),)
            dws = sums
        if NEED_DB:
            db += g
        xs = xs[1:]
    return xs, dxs, dws, db, row, start, after


@jit(do_not_specialize=["t", "offsets", "steps", "tokens"])
def _backward_kernel(
    DY, DY_2, DY_3, X, W, B, CU_SEQLENS, DX, SUMS, dy_stride, dy_stride_2, dy_stride_3, x_stride, t, c, width, width_2,
    offsets, steps, tokens,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, SPLIT: tl.constexpr, NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr, NEED_DB: tl.constexpr, RUN: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx of a token is complete when g of the token K - 1 after it is. So a program goes K - 1 tokens further for dx,
    whose part of dw and db the next program adds up."""
    program = tl.program_id(0)
    vectors, DY, dy_stride, channel, end_channel = _part_of(
        program, DY, DY_2, DY_3, dy_stride, dy_stride_2, dy_stride_3, width, width_2, c, SPLIT, BLOCK_C
    )
    group = program // vectors
    col = channel + tl.arange(0, BLOCK_C)
    here = col < end_channel
    is_whole = channel + BLOCK_C <= end_channel
    begin = group * tokens
    end = tl.minimum(begin + tokens, t)
    taps, bias, xs = _begin(X, W, B, begin, x_stride, t, col, here, K, HAS_BIAS)
    row, start, after = _row_at(CU_SEQLENS, begin, offsets, steps)
    zeros = tl.zeros([BLOCK_C], tl.float32)
    dxs, dws, db = (), (zeros,), zeros
    for _ in tl.static_range(K - 1):
        dxs = dxs + (zeros,)
        dws = dws + (zeros,)
    upcoming = _loaded(X, begin, x_stride, end, col, here, RUN)
    upcoming_dy = _loaded(DY, begin, dy_stride, end, col, here, RUN)
    for run in range(tokens // RUN):
        first = begin + run * RUN
        loaded = upcoming
        upstream = upcoming_dy
        upcoming = _loaded(X, first + RUN, x_stride, end, col, here, RUN)
        upcoming_dy = _loaded(DY, first + RUN, dy_stride, end, col, here, RUN)
        if is_whole & (first + RUN <= t) & (start + (K - 1) <= first) & (first + RUN <= after):
            xs, dxs, dws, db, row, start, after = _backward_run(
                xs, dxs, dws, db, loaded, upstream, taps, bias, DX, CU_SEQLENS, first, row, start, after, offsets,
                begin, t, c, col, here, K, SILU, NEED_DX, NEED_DW, NEED_DB, RUN, True,
            )  # fmt: skip
        else:
            xs, dxs, dws, db, row, start, after = _backward_run(
                xs, dxs, dws, db, loaded, upstream, taps, bias, DX, CU_SEQLENS, first, row, start, after, offsets,
                begin, t, c, col, here, K, SILU, NEED_DX, NEED_DW, NEED_DB, RUN, False,
            )  # fmt: skip
    if NEED_DX:
        first = begin + tokens
        loaded = _loaded(X, first, x_stride, t, col, here, K - 1)
        upstream = _loaded(DY, first, dy_stride, t, col, here, K - 1)
        _backward_run(
            xs, dxs, dws, db, loaded, upstream, taps, bias, DX, CU_SEQLENS, first, row, start, after, offsets, begin, t,
            c, col, here, K, SILU, True, False, False, K - 1, False,
        )  # fmt: skip
    if NEED_DW:
        for k in tl.static_range(K):
            tl.store(_place(SUMS, group * (K + NEED_DB) + k, c) + col, dws[k], mask=here)
    if NEED_DB:
        tl.store(_place(SUMS, group * (K * NEED_DW + 1) + K * NEED_DW, c) + col, db, mask=here)


@jit(do_not_specialize=["groups"])
def _sums_kernel(
    SUMS, DW, DB, groups, c, TAPS: tl.constexpr, NEED_DB: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Add up what the groups of tokens have found, in a fixed order: dw (C, TAPS), and db as one tap more."""
    tap = tl.program_id(1)
    col = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    group = tl.arange(0, GROUPS)
    found = tl.zeros([CHANNELS], tl.float32)
    for first in range(0, groups, GROUPS):
        place = ((first + group).to(tl.int64) * (TAPS + NEED_DB) + tap) * c
        here = (first + group < groups)[:, None] & (col < c)[None, :]
        found += tl.sum(tl.load(SUMS + place[:, None] + col[None, :], mask=here, other=0.0), axis=0)
    if tap < TAPS:
        tl.store(DW + col * TAPS + tap, found, mask=col < c)
    elif NEED_DB:
        tl.store(DB + col, found, mask=col < c)
