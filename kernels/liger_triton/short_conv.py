"""Causal depthwise convolution of K taps along the tokens of each row, as in linear attention and state space layers.

    a[t, c] = b[c] + sum_k w[c, k] x[t - (K - 1) + k, c],   y = a or silu(a)

A tap before the first token of its row reads zero. With s = sigmoid(a), and sums over the tokens of one row,

    g = dy, or dy * s * (1 + a * (1 - s)),   dx[t, c] = sum_m w[c, K - 1 - m] g[t + m, c],
    dw[c, k] = sum_t g[t, c] x[t - (K - 1) + k, c],   db[c] = sum_t g[t, c]

Shapes  x, y and their gradients (T, C), the T tokens of all rows concatenated; w (C, K); b (C,) or missing. Tokens of x
        may be strided, as in a slice of a projection's output. y and dy may be three tensors that hold consecutive
        channels.
Dtypes  bf16, fp16, fp32; w and b may have other dtypes than x. Arithmetic in fp32, one rounding per store. PyTorch also
        rounds a before silu, so 16-bit results here are closer to float64 than PyTorch's.
Bytes   b per element. Forward reads x and writes y: 2TCb. Backward reads dy and x, recomputes a, and writes dx: 3TCb.
        It also writes partial sums of dw and db in fp32, one for each group of at most 256 tokens, and a second kernel
        adds them up in a fixed order. Saved for backward: x and the row offsets.

`_short_conv_kernels` explains the algorithm.
"""

from collections.abc import Sequence
from typing import overload

import torch

from . import reference
from ._autograd import once_differentiable, records_graph
from ._dispatch import kernel_op, runs_triton
from ._launch import cdiv, launch, not_among
from ._short_conv_kernels import _backward_kernel, _forward_kernel, _sums_kernel

MOST_TAPS = 8
ACTIVATIONS = ("silu",)
CHANNELS = 128  # per program, which is one warp: four for each thread
# Tokens that a program loads at once, while it computes the ones before.
FORWARD_RUN = 8
BACKWARD_RUN = 4
# Tokens per program, which loads its weights once and stores its sums once.
FORWARD_TOKENS = 64
BACKWARD_TOKENS = 256
PROGRAMS = 1536  # With fewer programs, each takes fewer tokens. An H200 runs 2112 at once.
PARTS = 3  # the tensors of a split result
# Partial sums that a program adds up at once.
SUM_GROUPS = 32
SUM_CHANNELS = 64


def _tokens_of_program(x: torch.Tensor, most: int, run: int) -> int:
    """Tokens per program: `most`, or fewer if there would be too few programs to fill a GPU."""
    t, c = x.shape
    tokens = most
    while tokens > 2 * run and cdiv(t, tokens) * cdiv(c, CHANNELS) < PROGRAMS:
        tokens //= 2
    return tokens


def _rows_of(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> tuple[torch.Tensor, int, int]:
    """(the offsets, their number, the steps of a binary search among them). Without offsets there is one row."""
    if cu_seqlens is None:
        return torch.empty(0, dtype=torch.int32, device=x.device), 0, 0
    count = cu_seqlens.shape[0]
    return cu_seqlens.contiguous(), count, count.bit_length()


def _with_dense_channels(x: torch.Tensor) -> torch.Tensor:
    """x (T, C) with unit stride in channels. It is copied only if its channels are strided."""
    return x if x.stride(1) == 1 else x.contiguous()


@kernel_op("short_conv_fwd")
def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    silu: bool,
    widths: list[int],
) -> list[torch.Tensor]:
    """y in parts of these widths, from a weight (C, K). `widths` is C alone, or three widths that sum to C."""
    t, c = x.shape
    tokens = _tokens_of_program(x, FORWARD_TOKENS, FORWARD_RUN)
    rows = _with_dense_channels(x)
    offsets, count, steps = _rows_of(rows, cu_seqlens)
    parts = [torch.empty((t, width), dtype=x.dtype, device=x.device) for width in widths]
    launch(
        _forward_kernel,
        (_vectors_of(widths) * cdiv(t, tokens),),
        rows,
        weight.contiguous(),
        rows if bias is None else bias.contiguous(),
        offsets,
        *_as_three(parts),
        rows.stride(0),
        t,
        c,
        *_first_two(widths),
        count,
        steps,
        tokens,
        K=weight.shape[1],
        HAS_BIAS=bias is not None,
        SILU=silu,
        SPLIT=len(widths) > 1,
        RUN=FORWARD_RUN,
        BLOCK_C=CHANNELS,
        num_warps=1,
    )
    return parts


@_forward.register_fake
def _(x, weight, bias, cu_seqlens, silu, widths):
    return [torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device) for width in widths]


@kernel_op("short_conv_bwd")
def _backward(
    x: torch.Tensor,
    dy_parts: list[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    silu: bool,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dw, db). One that is not needed has no elements."""
    t, c = x.shape
    taps = weight.shape[1]
    tokens = _tokens_of_program(x, BACKWARD_TOKENS, BACKWARD_RUN)
    groups = cdiv(t, tokens)
    rows = _with_dense_channels(x)
    dy_rows = [_with_dense_channels(dy) for dy in dy_parts]
    widths = [dy.shape[1] for dy in dy_parts]
    offsets, count, steps = _rows_of(rows, cu_seqlens)
    dx, dw, db = _gradients(x, weight, bias, need_dx, need_dw, need_db)
    sums = torch.empty((groups, taps * need_dw + need_db, c), dtype=torch.float32, device=x.device)
    launch(
        _backward_kernel,
        (_vectors_of(widths) * groups,),
        *_as_three(dy_rows),
        rows,
        weight.contiguous(),
        rows if bias is None else bias.contiguous(),
        offsets,
        dx,
        sums,
        *_as_three([dy.stride(0) for dy in dy_rows]),
        rows.stride(0),
        t,
        c,
        *_first_two(widths),
        count,
        steps,
        tokens,
        K=taps,
        HAS_BIAS=bias is not None,
        SILU=silu,
        SPLIT=len(widths) > 1,
        NEED_DX=need_dx,
        NEED_DW=need_dw,
        NEED_DB=need_db,
        RUN=BACKWARD_RUN,
        BLOCK_C=CHANNELS,
        num_warps=1,
    )
    if need_dw or need_db:
        launch(
            _sums_kernel,
            (cdiv(c, SUM_CHANNELS), taps * need_dw + need_db),
            sums,
            dw,
            db,
            groups,
            c,
            TAPS=taps * need_dw,
            NEED_DB=need_db,
            GROUPS=SUM_GROUPS,
            CHANNELS=SUM_CHANNELS,
        )
    return dx, dw, db


def _vectors_of(widths: list[int]) -> int:
    """The number of vectors of channels in parts of these widths. A vector never crosses from one part to the next."""
    return sum([cdiv(width, CHANNELS) for width in widths])


def _as_three(parts: list) -> list:
    """Three arguments for a kernel. A single part is repeated, since the kernel then reads only the first."""
    return parts if len(parts) == PARTS else parts * PARTS


def _first_two(widths: list[int]) -> tuple[int, int]:
    """The first two widths. The kernel computes the third from them."""
    return (widths[0], widths[1]) if len(widths) == PARTS else (widths[0], 0)


def _gradients(x, weight, bias, need_dx: bool, need_dw: bool, need_db: bool) -> tuple[torch.Tensor, ...]:
    """Allocate dx, dw and db. One that is not needed has no elements."""
    dx = torch.empty(x.shape if need_dx else (0,), dtype=x.dtype, device=x.device)
    dw = torch.empty(weight.shape if need_dw else (0,), dtype=weight.dtype, device=x.device)
    db = torch.empty(weight.shape[:1] if need_db else (0,), dtype=bias.dtype if need_db else x.dtype, device=x.device)
    return dx, dw, db


@_backward.register_fake
def _(x, dy_parts, weight, bias, cu_seqlens, silu, need_dx, need_dw, need_db):
    return _gradients(x, weight, bias, need_dx, need_dw, need_db)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, cu_seqlens, silu, widths):
        ctx.silu = silu
        ctx.save_for_backward(x, weight, bias, cu_seqlens)
        return tuple(_forward(x, weight, bias, cu_seqlens, silu, widths))

    @staticmethod
    @once_differentiable
    def backward(ctx, *dy_parts):
        x, weight, bias, cu_seqlens = ctx.saved_tensors
        need_dx, need_dw, need_db, *_ = ctx.needs_input_grad
        dx, dw, db = _backward(x, list(dy_parts), weight, bias, cu_seqlens, ctx.silu, need_dx, need_dw, need_db)
        return dx if need_dx else None, dw if need_dw else None, db if need_db else None, None, None, None


@overload
def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    activation: str | None = None,
    split: None = None,
) -> torch.Tensor: ...


@overload
def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    activation: str | None = None,
    split: Sequence[int],
) -> tuple[torch.Tensor, ...]: ...


def short_conv(
    x: torch.Tensor,  # (T, C)
    weight: torch.Tensor,  # (C, K) or (C, 1, K)
    bias: torch.Tensor | None = None,  # (C,)
    *,
    cu_seqlens: torch.Tensor | None = None,  # (rows + 1,)
    activation: str | None = None,
    split: Sequence[int] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Convolve each channel along the tokens of each row, without looking ahead; differentiable in x, weight and bias.

    For one row it computes `F.conv1d(x.t()[None], weight, bias, padding=K - 1, groups=C)[0, :, :T].t()` and then the
    activation, with one rounding at the end and without a transpose. The gradients of weight and bias are summed in a
    fixed order, so every run gives the same bits.

    Args:
        x (`torch.Tensor`): (T, C), the tokens of all rows concatenated, any strides; bf16, fp16 or fp32 (float64 runs
            the PyTorch twin).
        weight (`torch.Tensor`): (C, K) or (C, 1, K) with K from 2 to 8; the last tap is for the token itself. On the
            device of `x`, any floating dtype.
        bias (`torch.Tensor`, *optional*): (C,), on the device of `x`, any floating dtype. Unset: nothing is added.
        cu_seqlens (`torch.Tensor`, *optional*): (rows + 1,), int32, ascending, on the device of `x`: the start of each
            row, and the end of the last. Rows may be empty. Tokens after the last offset are one more row. The host
            does not read the values. Unset: one row.
        activation (`str`, *optional*): `"silu"`, applied at the end. Unset: no activation.
        split (`Sequence[int]`, *optional*): Three widths that sum to C, such as the widths of queries, keys and values.
            The result is written as three tensors, and backward reads their gradients in place, so nothing is copied.
            Unset: one tensor.

    Returns:
        `torch.Tensor`: (T, C), contiguous, of the dtype of `x`. With `split`, a tuple of three (T, width).

    Raises:
        ValueError: A shape, dtype or device does not fit, K is not from 2 to 8, the activation is unknown, or `split`
            is not three widths that sum to C.
    """
    _check(x, weight, bias, cu_seqlens, activation)
    widths = [x.shape[1]] if split is None else _checked_widths(split, x)
    matrix = weight.flatten(1)
    if not runs_triton(x, matrix, bias):
        return reference.short_conv(x, matrix, bias, cu_seqlens=cu_seqlens, activation=activation, split=split)
    parts = _by_kernel(x, matrix, bias, cu_seqlens, activation == "silu", widths)
    return parts[0] if split is None else tuple(parts)


def _by_kernel(x, matrix, bias, cu_seqlens, silu: bool, widths: list[int]) -> Sequence[torch.Tensor]:
    """Convolve on a GPU, and return y in parts of these widths."""
    if not records_graph():
        return _forward(x, matrix, bias, cu_seqlens, silu, widths)
    if cu_seqlens is not None and not torch.compiler.is_compiling() and cu_seqlens.is_inference():
        cu_seqlens = cu_seqlens.clone()  # autograd cannot save an inference tensor
    return _ShortConv.apply(x, matrix, bias, cu_seqlens, silu, widths)


def _checked_widths(split: Sequence[int], x: torch.Tensor) -> list[int]:
    widths = list(split)
    if len(widths) != PARTS or sum(widths) != x.shape[1] or min(widths) < 1:
        raise ValueError(
            f"split is {tuple(widths)}, x {tuple(x.shape)}; expected three widths of at least 1 that sum to "
            f"{x.shape[1]}. Leave it unset for one tensor."
        )
    return widths


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
