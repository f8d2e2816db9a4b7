"""Causal depthwise convolution of K taps along the tokens of each row, as in linear attention and state space layers.

    a[t, c] = b[c] + sum_k w[c, k] x[t - (K - 1) + k, c],   y = a or silu(a)

Taps that reach before the first token of a row count as zero. With s = sigmoid(a), and sums over tokens of one row,

    g = dy, or dy * s * (1 + a * (1 - s)),   dx[t, c] = sum_m w[c, K - 1 - m] g[t + m, c],
    dw[c, k] = sum_t g[t, c] x[t - (K - 1) + k, c],   db[c] = sum_t g[t, c]

Shapes  x, y and their gradients (T, C), T tokens of all rows one after the other; w (C, K); b (C,) or missing. Tokens
        of x may lie apart, as in a slice of what a projection returns. starts (T,), int32: where the row of each token
        begins.
Dtypes  bf16, fp16, fp32; w and b may have dtypes of their own. Arithmetic in fp32, one rounding per store. Where
        PyTorch rounds a before silu, there is none, so that 16-bit results are nearer float64 than its own.
Bytes   b per element. Forward reads x and writes y: 2TCb. Backward reads dy and x, computes a again, and writes dx:
        3TCb, and for each group of 256 tokens an fp32 row of every tap of dw, and of db, which a second pass adds up in
        a fixed order. Kept for backward: x and starts.

A program takes one vector of channels, a warp wide, and walks along the tokens. A token's neighbours are then tensors
in the same registers, and a and g are computed once for a token. In a tile of tokens by channels, each tap would load
the tile again, and silu would be computed K times over, which takes longer than the memory.
"""

import torch

from . import reference
from ._autograd import once_differentiable, records_graph
from ._dispatch import jit, kernel_op, runs_triton, tl
from ._launch import as_dtype, cdiv, check_in, launch

MOST_TAPS = 8
ACTIVATIONS = ("silu",)
RUN = 8  # tokens whose vectors a program loads before it computes
FORWARD_TOKENS, BACKWARD_TOKENS = 64, 256  # of a program, which loads its weights and stores its sums once
FORWARD_BYTES, BACKWARD_BYTES = 512, 256  # that a warp loads at once; backward, more would not fit its registers
SEARCHED = 1024  # tokens whose rows a program searches for


@jit(do_not_specialize=["t", "offsets", "steps"])
def _starts_kernel(CU_SEQLENS, STARTS, t, offsets, steps, BLOCK: tl.constexpr):
    """The first token of the row of each token: the last of the ascending offsets that is not above the token."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)  # so many offsets are known not to be above the token
    high = tl.zeros([BLOCK], tl.int32) + offsets
    for _ in range(steps):
        middle = (low + high) // 2
        offset = tl.load(CU_SEQLENS + middle, mask=middle < offsets, other=2147483647)
        is_behind = offset <= token
        low = tl.where(is_behind, middle + 1, low)
        high = tl.where(is_behind, high, middle)
    start = tl.load(CU_SEQLENS + low - 1, mask=low > 0, other=0)
    tl.store(STARTS + token, start, mask=token < t)


@jit
def _start(STARTS, token, t, HAS_ROWS: tl.constexpr):
    start = token * 0
    if HAS_ROWS:
        start += tl.load(STARTS + token, mask=token < t, other=0)
    return start


@jit
def _among(token, low, high, here):
    """`here` if low <= token < high. Compared as a vector: Triton's interpreter makes no mask of a number."""
    tokens = token + tl.zeros_like(here).to(tl.int64)
    return here & (tokens >= low) & (tokens < high)


@jit
def _vector(X, token, stride, t, col, here):
    """Channels `col` of a token in fp32; zeros if there is no such token."""
    return tl.load(X + token * stride + col, mask=_among(token, 0, t, here), other=0.0).to(tl.float32)


@jit
def _weights(W, B, col, here, K: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The taps of each channel, a vector each, and the bias."""
    taps = ()
    for k in tl.static_range(K):
        taps = taps + (tl.load(W + col * K + k, mask=here, other=0.0).to(tl.float32),)
    bias = tl.zeros_like(taps[0])
    if HAS_BIAS:
        bias += tl.load(B + col, mask=here, other=0.0).to(tl.float32)
    return taps, bias


@jit
def _before(X, first, stride, t, col, here, K: tl.constexpr):
    """The vectors of the K - 1 tokens before `first`."""
    xs = ()
    for i in tl.static_range(K - 1):
        xs = xs + (_vector(X, first - (K - 1) + i, stride, t, col, here),)
    return xs


@jit
def _run(X, first, stride, t, col, here, RUN: tl.constexpr):
    """The vectors of RUN tokens, loaded before any of them is needed."""
    xs = ()
    for i in tl.static_range(RUN):
        xs = xs + (_vector(X, first + i, stride, t, col, here),)
    return xs


@jit
def _convolved(xs, taps, bias, start, token, K: tl.constexpr):
    """a of a token, from its own vector, which is the last of `xs`, and from those of the K - 1 tokens before it."""
    a = bias
    for k in tl.static_range(K):
        a += taps[k] * tl.where(token - (K - 1) + k >= start, xs[k], 0.0)
    return a


@jit(do_not_specialize=["t"])
def _forward_kernel(
    X, W, B, STARTS, Y, x_stride, t, c,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, HAS_ROWS: tl.constexpr, TOKENS: tl.constexpr,
    RUN: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    vectors = tl.cdiv(c, BLOCK_C)
    col = tl.program_id(0) % vectors * BLOCK_C + tl.arange(0, BLOCK_C)
    here = col < c
    begin = (tl.program_id(0) // vectors).to(tl.int64) * TOKENS  # int64: token * stride passes 2**31
    taps, bias = _weights(W, B, col, here, K, HAS_BIAS)
    xs = _before(X, begin, x_stride, t, col, here, K)
    for run in range(TOKENS // RUN):
        first = begin + run * RUN
        loaded = _run(X, first, x_stride, t, col, here, RUN)
        for i in tl.static_range(RUN):
            token = first + i
            xs = xs + (loaded[i],)
            y = _convolved(xs, taps, bias, _start(STARTS, token, t, HAS_ROWS), token, K)
            if SILU:
                y *= tl.sigmoid(y)
            tl.store(Y + token * c + col, y, mask=_among(token, 0, t, here))
            xs = xs[1:]


@jit(do_not_specialize=["t"])
def _backward_kernel(
    DY, X, W, B, STARTS, DX, DW, DB, dy_stride, x_stride, t, c,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, HAS_ROWS: tl.constexpr, NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr, NEED_DB: tl.constexpr, TOKENS: tl.constexpr, RUN: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx of a token is complete when g of the token K - 1 after it is. So the last K - 1 of the tokens that a program
    walks along are those that the next program begins with, which adds them to its sums."""
    vectors = tl.cdiv(c, BLOCK_C)
    group = (tl.program_id(0) // vectors).to(tl.int64)
    col = tl.program_id(0) % vectors * BLOCK_C + tl.arange(0, BLOCK_C)
    here = col < c
    begin = group * (TOKENS - (K - 1))
    end = begin + TOKENS - (K - 1)
    taps, bias = _weights(W, B, col, here, K, HAS_BIAS)
    zeros = tl.zeros([BLOCK_C], tl.float32)
    xs = _before(X, begin, x_stride, t, col, here, K)
    gs, starts, dw, db = (), (), (), zeros
    for _ in tl.static_range(K - 1):
        gs = gs + (zeros,)
        starts = starts + (begin,)
    for _ in tl.static_range(K):
        dw = dw + (zeros,)
    for run in range(TOKENS // RUN):
        first = begin + run * RUN
        loaded = _run(X, first, x_stride, t, col, here, RUN)
        upstream = _run(DY, first, dy_stride, t, col, here, RUN)
        for i in tl.static_range(RUN):
            token = first + i
            start = _start(STARTS, token, t, HAS_ROWS)
            xs = xs + (loaded[i],)
            g = upstream[i]
            if SILU:
                a = _convolved(xs, taps, bias, start, token, K)
                s = tl.sigmoid(a)
                g *= s * (1 + a * (1 - s))
            gs = gs + (g,)
            starts = starts + (start,)
            if NEED_DX:
                complete = token - (K - 1)
                dx = zeros
                for m in tl.static_range(K):
                    dx += taps[K - 1 - m] * tl.where(starts[m] <= complete, gs[m], 0.0)
                tl.store(DX + complete * c + col, dx, mask=_among(complete, begin, t, here))
            g = tl.where(token < end, g, 0.0)
            if NEED_DW:
                sums = ()
                for k in tl.static_range(K):
                    sums = sums + (dw[k] + g * tl.where(token - (K - 1) + k >= start, xs[k], 0.0),)
                dw = sums
            if NEED_DB:
                db += g
            xs, gs, starts = xs[1:], gs[1:], starts[1:]
    if NEED_DW:
        for k in tl.static_range(K):
            tl.store(DW + (group * K + k) * c + col, dw[k], mask=here)
    if NEED_DB:
        tl.store(DB + group * c + col, db, mask=here)


def _row_starts(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """(T,), int32, where the row of each token begins. Empty where there is one row."""
    if cu_seqlens is None:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    starts = torch.empty(x.shape[0], dtype=torch.int32, device=x.device)
    offsets = cu_seqlens.shape[0]
    launch(
        _starts_kernel, (cdiv(x.shape[0], SEARCHED),), cu_seqlens.contiguous(), starts, x.shape[0], offsets,
        offsets.bit_length(), BLOCK=SEARCHED,
    )  # fmt: skip
    return starts


def _channels(x: torch.Tensor, bytes_of_warp: int) -> int:
    """Channels of a program, which is one warp. At least four for each of its threads are loaded at once."""
    return max(128, bytes_of_warp // x.element_size())


def _in_line(x: torch.Tensor) -> torch.Tensor:
    """x (T, C) with unit stride in channels. A view but where channels lie apart."""
    return x if x.stride(1) == 1 else x.contiguous()


@kernel_op("short_conv_fwd")
def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cu_seqlens: torch.Tensor | None, silu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, starts) of a weight (C, K)."""
    t, c = x.shape
    block = _channels(x, FORWARD_BYTES)
    rows = _in_line(x)
    starts = _row_starts(x, cu_seqlens)
    y = torch.empty((t, c), dtype=x.dtype, device=x.device)
    launch(
        _forward_kernel, (cdiv(c, block) * cdiv(t, FORWARD_TOKENS),),
        rows, weight.contiguous(), rows if bias is None else bias.contiguous(), starts, y, rows.stride(0), t, c,
        K=weight.shape[1], HAS_BIAS=bias is not None, SILU=silu, HAS_ROWS=cu_seqlens is not None, TOKENS=FORWARD_TOKENS,
        RUN=RUN, BLOCK_C=block, num_warps=1,
    )  # fmt: skip
    return y, starts


@_forward.register_fake
def _(x, weight, bias, cu_seqlens, silu):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, x.new_empty(0 if cu_seqlens is None else x.shape[0], dtype=torch.int32)


@kernel_op("short_conv_bwd")
def _backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, starts: torch.Tensor,
    silu: bool, need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dx, dw, db), the last two in fp32, and each empty unless needed."""
    t, c = x.shape
    taps = weight.shape[1]
    block = _channels(x, BACKWARD_BYTES)
    rows, dy_rows = _in_line(x), _in_line(dy)
    groups = cdiv(t, BACKWARD_TOKENS - (taps - 1))
    dx = torch.empty((t, c) if need_dx else (0,), dtype=x.dtype, device=x.device)
    dw = torch.empty((groups, taps, c) if need_dw else (0,), dtype=torch.float32, device=x.device)
    db = torch.empty((groups, c) if need_db else (0,), dtype=torch.float32, device=x.device)
    launch(
        _backward_kernel, (cdiv(c, block) * groups,),
        dy_rows, rows, weight.contiguous(), rows if bias is None else bias.contiguous(), starts, dx, dw, db,
        dy_rows.stride(0), rows.stride(0), t, c,
        K=taps, HAS_BIAS=bias is not None, SILU=silu, HAS_ROWS=starts.numel() > 0, NEED_DX=need_dx, NEED_DW=need_dw,
        NEED_DB=need_db, TOKENS=BACKWARD_TOKENS, RUN=RUN, BLOCK_C=block, num_warps=1,
    )  # fmt: skip
    return dx, dw.sum(0).t().contiguous() if need_dw else dw, db.sum(0) if need_db else db


@_backward.register_fake
def _(dy, x, weight, bias, starts, silu, need_dx, need_dw, need_db):
    dx = torch.empty(x.shape if need_dx else (0,), dtype=x.dtype, device=x.device)
    dw = torch.empty(weight.shape if need_dw else (0,), dtype=torch.float32, device=x.device)
    db = torch.empty(weight.shape[:1] if need_db else (0,), dtype=torch.float32, device=x.device)
    return dx, dw, db


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, cu_seqlens, silu):
        y, starts = _forward(x, weight, bias, cu_seqlens, silu)
        ctx.silu = silu
        ctx.save_for_backward(x, weight, bias, starts)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, bias, starts = ctx.saved_tensors
        need_dx, need_dw, need_db, *_ = ctx.needs_input_grad
        dx, dw, db = _backward(dy, x, weight, bias, starts, ctx.silu, need_dx, need_dw, need_db)
        return (
            dx if need_dx else None,
            as_dtype(dw, weight.dtype) if need_dw else None,
            as_dtype(db, bias.dtype) if need_db else None,
            None,
            None,
        )


def short_conv(
    x: torch.Tensor,  # (T, C)
    weight: torch.Tensor,  # (C, K) or (C, 1, K)
    bias: torch.Tensor | None = None,  # (C,)
    *,
    cu_seqlens: torch.Tensor | None = None,  # (rows + 1,)
    activation: str | None = None,
) -> torch.Tensor:
    """Convolve each channel along the tokens of each row, without looking ahead; differentiable in x, weight and bias.

    For one row it is `F.conv1d(x.t()[None], weight, bias, padding=K - 1, groups=C)[0, :, :T].t()`, followed by the
    activation, with one rounding at the end. Nothing is transposed. The gradients of weight and bias are summed in a
    fixed order, so that they are the same in every run.

    Args:
        x (`torch.Tensor`): (T, C), the tokens of all rows one after the other, any strides; bf16, fp16 or fp32
            (float64: the PyTorch twin).
        weight (`torch.Tensor`): (C, K) or (C, 1, K) with K from 2 to 8, the tap of the token itself last; on the
            device of `x`, of any floating dtype.
        bias (`torch.Tensor`, *optional*): (C,), the same. Unset: nothing is added.
        cu_seqlens (`torch.Tensor`, *optional*): (rows + 1,), int32, ascending, on the device of `x`: where each row
            begins, and where the last one ends. Rows may be empty. Tokens from the last number on are a row of their
            own. Their values are not looked at by the host. Unset: one row.
        activation (`str`, *optional*): `"silu"`, applied at the end. Unset: none.

    Returns:
        `torch.Tensor`: (T, C), contiguous, of the dtype of `x`.

    Raises:
        ValueError: A shape, dtype or device does not fit, K is not from 2 to 8, or the activation is unknown.
    """
    _check(x, weight, bias, cu_seqlens, activation)
    matrix = weight.flatten(1)
    if not runs_triton(x, matrix, bias):
        return reference.short_conv(x, matrix, bias, cu_seqlens=cu_seqlens, activation=activation)
    if not records_graph():
        return _forward(x, matrix, bias, cu_seqlens, activation == "silu")[0]
    return _ShortConv.apply(x, matrix, bias, cu_seqlens, activation == "silu")


def _check(x, weight, bias, cu_seqlens, activation) -> None:
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}; expected a floating-point tensor (tokens, channels).")
    c = x.shape[1]
    as_given = f"weight is {tuple(weight.shape)}, x {tuple(x.shape)}"
    if weight.ndim not in (2, 3) or weight.shape[0] != c or (weight.ndim == 3 and weight.shape[1] != 1):
        raise ValueError(f"{as_given}; expected weight ({c}, taps) or ({c}, 1, taps).")
    if not 2 <= weight.shape[-1] <= MOST_TAPS:
        raise ValueError(f"{as_given}: {weight.shape[-1]} taps; expected 2 to {MOST_TAPS}. Use F.conv1d for others.")
    if bias is not None and bias.shape != (c,):
        raise ValueError(f"bias is {tuple(bias.shape)}, x {tuple(x.shape)}; expected bias ({c},) or None.")
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None and not p.is_floating_point():
            raise ValueError(f"{name} is {p.dtype}; expected a floating-point tensor, such as {x.dtype}.")
    if cu_seqlens is not None and (cu_seqlens.ndim != 1 or cu_seqlens.dtype != torch.int32 or not len(cu_seqlens)):
        raise ValueError(
            f"cu_seqlens is {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}; expected (rows + 1,) torch.int32, the first "
            "token of each row and the number of tokens."
        )
    for name, p in (("weight", weight), ("bias", bias), ("cu_seqlens", cu_seqlens)):
        if p is not None and p.device != x.device:
            raise ValueError(f"{name} is on {p.device}, x on {x.device}; move {name} to {x.device}.")
    if activation is not None:
        check_in("activation", activation, ACTIVATIONS)
