"""The kernels of `short_conv`. A program walks along tokens and keeps the last K vectors of channels in registers.

Each token is loaded once, and its a and g are computed once. A tile of tokens by channels would be loaded again for
each tap, and would compute silu K times.

The instruction count matters as much as the bytes: 13 per element forward and 27 backward. So the boundaries of rows
are checked once for a run of tokens. In a plain run, every tap lies in the token's row and every token and channel
exists, so nothing is compared or masked. The other runs contain the start or the end of a row or a tensor, and compare
for each token and tap. Both kinds give a row the same bits, wherever it lies. That is why products are added with
`tl.fma`: in a sum of two products, the compiler chooses which one to round, and may choose differently in each kind.

The next run is loaded while the current one is computed. On an H200, with 8192 tokens of 8192 channels, the kernels
then took 0.82 of the time forward and 0.86 backward. Twice the channels per program, which needs twice the registers,
was not faster.
"""

from ._dispatch import jit, tl

NO_ROW = tl.constexpr(2147483647)  # start of the row after the last one


@jit
def _row_at(CU_SEQLENS, token, offsets, steps):
    """(number of offsets at or below the token, start of its row, start of the next row), by binary search."""
    low = token * 0  # this many offsets are known to be at or below the token
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
    """The result of `_row_at` for a token, from its result for an earlier token."""
    while after <= token:  # loops more than once only past empty rows
        row += 1
        start = after
        after = tl.load(CU_SEQLENS + row, mask=row < offsets, other=NO_ROW)
    return row, start, after


@jit
def _among(token, low, high, here):
    """`here` if low <= token < high, else all false. Triton's interpreter needs a vector to compare, not a scalar."""
    tokens = token + tl.zeros_like(here).to(tl.int32)
    return here & (tokens >= low) & (tokens < high)


@jit
def _place(X, token, stride):
    """The address of a token, with a 64-bit offset: 128k tokens of 16k channels are 2**31 elements."""
    return X + token.to(tl.int64) * stride


@jit
def _loaded(X, first, stride, end, col, here, TOKENS: tl.constexpr):
    """Load the vectors of TOKENS tokens before any of them is needed. Tokens outside [0, end) are zeros."""
    xs = ()
    for i in tl.static_range(TOKENS):
        token = first + i
        xs = xs + (tl.load(_place(X, token, stride) + col, mask=_among(token, 0, end, here), other=0.0),)
    return xs


@jit
def _part_of(
    program,
    FIRST,
    SECOND,
    THIRD,
    stride,
    stride_2,
    stride_3,
    width,
    width_2,
    c,
    SPLIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """(the number of vectors of channels, the tensor with this program's channels, the stride of its tokens, the first
    of these channels, the end of the tensor's channels).

    SPLIT: three tensors hold the channels, `width` and `width_2` of them in the first two. A vector never crosses from
    one to the next. The pointer is moved back to channel 0 of x, so that all three are indexed by the channels of x.
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
    """(the taps of each channel, the bias, the K - 1 tokens before the first one), in fp32."""
    taps = ()
    xs = ()
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
    """x, or zeros if the row starts after the token. IS_IN: the row is known to start earlier."""
    if not IS_IN:
        x = tl.where(token >= start, x, 0.0)
    return x


@jit
def _sigmoid(a):
    """(s, 1 - s) with s = 1 / (1 + exp(-a)), in five instructions. The division in `tl.sigmoid` alone takes as many."""
    r = tl.rsqrt(1.0 + tl.exp2(a * -1.4426950408889634))
    return r * r, tl.fma(-r, r, 1.0)


@jit
def _convolved(xs, taps, bias, token, start, K: tl.constexpr, PLAIN: tl.constexpr):
    """Compute a of a token from `xs`: the vectors of the K - 1 tokens before it, and its own last."""
    a = bias
    for k in tl.static_range(K):
        a = tl.fma(taps[k], _in_row(xs[k], token - (K - 1) + k, start, PLAIN or k == K - 1), a)
    return a


@jit
def _forward_run(
    xs,
    loaded,
    taps,
    bias,
    Y,
    CU_SEQLENS,
    first,
    row,
    start,
    after,
    offsets,
    t,
    y_stride,
    col,
    here,
    K: tl.constexpr,
    SILU: tl.constexpr,
    RUN: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Store y of a run. Return its last K - 1 tokens, and the result of `_row_at` for the last one."""
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
    X,
    W,
    B,
    CU_SEQLENS,
    Y,
    Y_2,
    Y_3,
    x_stride,
    t,
    c,
    width,
    width_2,
    offsets,
    steps,
    tokens,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    SPLIT: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
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
    xs,
    dxs,
    dws,
    db,
    loaded,
    upstream,
    taps,
    bias,
    DX,
    CU_SEQLENS,
    first,
    row,
    start,
    after,
    offsets,
    begin,
    t,
    c,
    col,
    here,
    K: tl.constexpr,
    SILU: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    TOKENS: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Add g of each token to dx of the last K tokens, to dw and to db. Store dx of the token K - 1 earlier, which is
    complete then. Return the sums, and what `_forward_run` returns."""
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
    DY,
    DY_2,
    DY_3,
    X,
    W,
    B,
    CU_SEQLENS,
    DX,
    SUMS,
    dy_stride,
    dy_stride_2,
    dy_stride_3,
    x_stride,
    t,
    c,
    width,
    width_2,
    offsets,
    steps,
    tokens,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    SPLIT: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """dx of a token needs g of the next K - 1 tokens. So a program reads K - 1 tokens past its own for dx. The next
    program adds those tokens to dw and db."""
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
    dxs = ()
    dws = (zeros,)
    db = zeros
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
            xs,
            dxs,
            dws,
            db,
            loaded,
            upstream,
            taps,
            bias,
            DX,
            CU_SEQLENS,
            first,
            row,
            start,
            after,
            offsets,
            begin,
            t,
            c,
            col,
            here,
            K,
            SILU,
            True,
            False,
            False,
            K - 1,
            False,
        )
    if NEED_DW:
        for k in tl.static_range(K):
            tl.store(_place(SUMS, group * (K + NEED_DB) + k, c) + col, dws[k], mask=here)
    if NEED_DB:
        tl.store(_place(SUMS, group * (K * NEED_DW + 1) + K * NEED_DW, c) + col, db, mask=here)


@jit(do_not_specialize=["groups"])
def _sums_kernel(
    SUMS, DW, DB, groups, c, TAPS: tl.constexpr, NEED_DB: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Sum the partial dw (C, TAPS) of all groups in a fixed order, and db, which is stored as one more tap."""
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
