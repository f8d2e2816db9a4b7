"""Causal depthwise convolution of K taps along the tokens of each row, as in linear attention and state space layers.

    a[t, c] = b[c] + sum_k w[c, k] x[t - (K - 1) + k, c],   y = a or silu(a)

Taps that reach before the first token of a row count as zero. With s = sigmoid(a), and sums over tokens of one row,

    g = dy, or dy * s * (1 + a * (1 - s)),   dx[t, c] = sum_m w[c, K - 1 - m] g[t + m, c],
    dw[c, k] = sum_t g[t, c] x[t - (K - 1) + k, c],   db[c] = sum_t g[t, c]

Shapes  x, y and their gradients (T, C), T tokens of all rows one after the other; w (C, K); b (C,) or missing. Tokens
        of x may lie apart, as in a slice of what a projection returns.
Dtypes  bf16, fp16, fp32; w and b may have dtypes of their own. Arithmetic in fp32, one rounding per store. Where
        PyTorch rounds a before silu, there is none, so that 16-bit results are nearer float64 than its own.
Bytes   b per element. Forward reads x and writes y: 2TCb. Backward reads dy and x, computes a again, and writes dx:
        3TCb, and for each group of at most 256 tokens an fp32 row of every tap of dw, and of db, which a second kernel
        adds up in a fixed order. Kept for backward: x and the offsets of the rows.

`_short_conv_kernels` says how it is computed.
"""

import torch

from . import reference
from ._autograd import once_differentiable, records_graph
from ._dispatch import kernel_op, runs_triton
from ._launch import cdiv, launch, not_among
from ._short_conv_kernels import _backward_kernel, _forward_kernel, _sums_kernel

MOST_TAPS = 8
ACTIVATIONS = ("silu",)
CHANNELS = 128  # of a program, which is one warp: four for each of its threads
FORWARD_RUN, BACKWARD_RUN = 8, 4  # tokens whose vectors a program loads while it computes those before
FORWARD_TOKENS, BACKWARD_TOKENS = 64, 256  # of a program, which loads its weights and stores its sums once
PROGRAMS = 1536  # If there are fewer, each takes fewer tokens. An H200 runs 2112 at once.
SUM_GROUPS, SUM_CHANNELS = 32, 64  # partial sums that a program adds up at once


def _tokens_of_program(x: torch.Tensor, most: int, run: int) -> int:
    """Tokens of a program: `most`, or fewer where there would be too few programs for a GPU."""
    t, c = x.shape
    tokens = most
    while tokens > 2 * run and cdiv(t, tokens) * cdiv(c, CHANNELS) < PROGRAMS:
        tokens //= 2
    return tokens


def _rows_of(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> tuple[torch.Tensor, int, int]:
    """The offsets, how many they are, and the steps of a search among them. Without offsets there is one row."""
    if cu_seqlens is None:
        return torch.empty(0, dtype=torch.int32, device=x.device), 0, 0
    count = cu_seqlens.shape[0]
    return cu_seqlens.contiguous(), count, count.bit_length()


def _in_line(x: torch.Tensor) -> torch.Tensor:
    """x (T, C) with unit stride in channels. A view but where channels lie apart."""
    return x if x.stride(1) == 1 else x.contiguous()


@kernel_op("short_conv_fwd")
def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cu_seqlens: torch.Tensor | None, silu: bool
) -> torch.Tensor:
    """y of a weight (C, K)."""
    t, c = x.shape
    tokens = _tokens_of_program(x, FORWARD_TOKENS, FORWARD_RUN)
    rows = _in_line(x)
    offsets, count, steps = _rows_of(rows, cu_seqlens)
    y = torch.empty((t, c), dtype=x.dtype, device=x.device)
    launch(
        _forward_kernel, (cdiv(c, CHANNELS) * cdiv(t, tokens),),
        rows, weight.contiguous(), rows if bias is None else bias.contiguous(), offsets, y, rows.stride(0), t, c, count,
        steps, tokens,
        K=weight.shape[1], HAS_BIAS=bias is not None, SILU=silu, RUN=FORWARD_RUN, BLOCK_C=CHANNELS, num_warps=1,
    )  # fmt: skip
    return y


@_forward.register_fake
def _(x, weight, bias, cu_seqlens, silu):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@kernel_op("short_conv_bwd")
def _backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    silu: bool, need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dx, dw, db), each empty unless needed."""
    t, c = x.shape
    taps = weight.shape[1]
    tokens = _tokens_of_program(x, BACKWARD_TOKENS, BACKWARD_RUN)
    groups = cdiv(t, tokens)
    rows, dy_rows = _in_line(x), _in_line(dy)
    offsets, count, steps = _rows_of(rows, cu_seqlens)
    dx, dw, db = _gradients(x, weight, bias, need_dx, need_dw, need_db)
    sums = torch.empty((groups, taps * need_dw + need_db, c), dtype=torch.float32, device=x.device)
    launch(
        _backward_kernel, (cdiv(c, CHANNELS) * groups,),
        dy_rows, rows, weight.contiguous(), rows if bias is None else bias.contiguous(), offsets, dx, sums,
        dy_rows.stride(0), rows.stride(0), t, c, count, steps, tokens,
        K=taps, HAS_BIAS=bias is not None, SILU=silu, NEED_DX=need_dx, NEED_DW=need_dw, NEED_DB=need_db,
        RUN=BACKWARD_RUN, BLOCK_C=CHANNELS, num_warps=1,
    )  # fmt: skip
    if need_dw or need_db:
        launch(
            _sums_kernel, (cdiv(c, SUM_CHANNELS), taps * need_dw + need_db), sums, dw, db, groups, c,
            TAPS=taps * need_dw, NEED_DB=need_db, GROUPS=SUM_GROUPS, CHANNELS=SUM_CHANNELS,
        )  # fmt: skip
    return dx, dw, db


def _gradients(x, weight, bias, need_dx: bool, need_dw: bool, need_db: bool) -> tuple[torch.Tensor, ...]:
    """Room for dx, dw and db, empty unless needed."""
    dx = torch.empty(x.shape if need_dx else (0,), dtype=x.dtype, device=x.device)
    dw = torch.empty(weight.shape if need_dw else (0,), dtype=weight.dtype, device=x.device)
    db = torch.empty(weight.shape[:1] if need_db else (0,), dtype=bias.dtype if need_db else x.dtype, device=x.device)
    return dx, dw, db


@_backward.register_fake
def _(dy, x, weight, bias, cu_seqlens, silu, need_dx, need_dw, need_db):
    return _gradients(x, weight, bias, need_dx, need_dw, need_db)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, cu_seqlens, silu):
        ctx.silu = silu
        ctx.save_for_backward(x, weight, bias, cu_seqlens)
        return _forward(x, weight, bias, cu_seqlens, silu)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, bias, cu_seqlens = ctx.saved_tensors
        need_dx, need_dw, need_db, *_ = ctx.needs_input_grad
        dx, dw, db = _backward(dy, x, weight, bias, cu_seqlens, ctx.silu, need_dx, need_dw, need_db)
        return dx if need_dx else None, dw if need_dw else None, db if need_db else None, None, None


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
        return _forward(x, matrix, bias, cu_seqlens, activation == "silu")
    if cu_seqlens is not None and not torch.compiler.is_compiling() and cu_seqlens.is_inference():
        cu_seqlens = cu_seqlens.clone()  # autograd keeps no tensor that was made in inference mode
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
        if activation not in ACTIVATIONS:
            raise not_among("activation", activation, ACTIVATIONS)
