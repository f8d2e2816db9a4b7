"""Runs the short convolution of layers that keep a state with `liger_triton.short_conv` on a GPU.

transformers transposes the input and the output, and calls PyTorch's `conv1d`. `short_conv` reads the layout that
projections write, so nothing is transposed.

A modeling file calls `causal_conv1d_fn`, one of its globals. If the package `causal_conv1d` is installed, that function
calls the package, and stays. Otherwise it is transformers' own code. That code is compared with ours before a layer
runs ours instead.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from liger_trainer.patching.core import probe
from liger_trainer.patching.core.pattern import PLAIN_TENSORS, attempt
from liger_trainer.varlen.proof.deferred_convolution import DeferredConvolution
from liger_trainer.varlen.proof.packed_rows import kernel_behind
from liger_trainer.varlen.rows import NotForRows
from liger_trainer.varlen.state_layers import current_layer_rows
from liger_triton import short_conv
from liger_triton.short_conv import MOST_TAPS

NAME = "causal_conv1d_fn"
_ROW_ARGUMENTS = ("seq_idx", "cu_seqlens")
_ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_RTOL = 1e-5  # of the largest element, in fp32


def replacement(scope: dict[str, Any], in_parts: bool = False) -> tuple[tuple[str, Callable], ...]:
    """Return (name, function) of the global to replace in a modeling file. Empty if its own function stays.

    Args:
        scope (`dict`): The globals of the file.
        in_parts (`bool`, *optional*, defaults to `False`): Return a `DeferredConvolution`, so that a layer that splits
            the result gets three tensors.
    """
    own = scope.get(NAME)
    if not isinstance(own, types.FunctionType) or kernel_behind(own) is not None or not _is_proven(own):
        return ()
    return ((NAME, _convolution(own, in_parts)),)


def cuts_result(forward: types.FunctionType) -> bool:
    """Return whether a forward calls the convolution and `torch.split`."""
    return {NAME, "split"} <= {*forward.__code__.co_names}


@functools.cache
def _convolution(own: Callable, in_parts: bool) -> Callable:
    """Return the function that replaces `own`. It calls the kernel if that supports the call, and else `own`."""

    @functools.wraps(own)
    def convolve(
        hidden_states: torch.Tensor,  # (B, C, L)
        weight: torch.Tensor,  # (C, K)
        bias: torch.Tensor | None = None,  # (C,)
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        # With these arguments transformers' own code raises an error, so such a call is left to it.
        has_rows = any(kwargs.get(name) is not None for name in _ROW_ARGUMENTS)
        rows = current_layer_rows()
        offsets = None
        if rows is not None:
            if has_rows or not fits(hidden_states, weight, bias, activation):
                raise NotForRows("liger_triton.short_conv does not take the convolution of its layers")
            offsets = rows.offsets.to(hidden_states.device)  # layers may be spread over devices
        elif has_rows or not _takes(hidden_states, weight, bias, activation):
            return own(hidden_states, weight, bias, activation=activation, **kwargs)
        if not in_parts:
            return by_kernel(hidden_states, weight, bias, activation, offsets)

        def compute(widths: tuple[int, ...] | None) -> Any:
            if widths is None:
                return by_kernel(hidden_states, weight, bias, activation, offsets)
            return parts_by_kernel(hidden_states, weight, bias, activation, offsets, widths)

        return DeferredConvolution(compute, hidden_states.shape)

    return convolve


def _takes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> bool:
    """Return whether the kernel runs this call: on a GPU, with few taps, not being traced."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return False
    return fits(x, weight, bias, activation)


def fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> bool:
    """Return whether `by_kernel` supports this call, on any device."""
    tensors = [t for t in (x, weight, bias) if t is not None]
    same = all(t.device == x.device and t.dtype in _DTYPES and type(t) in PLAIN_TENSORS for t in tensors)
    return (
        same and x.ndim == 3 and weight.ndim == 2 and 2 <= weight.shape[1] <= MOST_TAPS and activation in _ACTIVATIONS
    )


def by_kernel(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve x (B, C, L) along L. If x is stored as (B, L, C), neither x nor the result is copied.

    Args:
        x, weight, bias, activation: The arguments of transformers' function.
        offsets (`torch.Tensor`, *optional*): int32 (rows + 1,), the start of each row concatenated in x (1, C, L), and
            the end. Unset: each element of the batch is a row.

    Returns:
        `torch.Tensor`: (B, C, L), stored as (B, L, C).
    """
    batch, channels, length = x.shape
    tokens, offsets = _rows_of_tokens(x, offsets)
    y = short_conv(tokens, weight, bias, cu_seqlens=offsets, activation=_ACTIVATIONS[activation])
    return y.view(batch, length, channels).transpose(1, 2)


def parts_by_kernel(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    offsets: torch.Tensor | None,
    widths: tuple[int, ...],
) -> tuple[torch.Tensor, ...]:
    """Convolve like `by_kernel`, and return the channels as three contiguous tensors (B, L, width)."""
    batch, _, length = x.shape
    tokens, offsets = _rows_of_tokens(x, offsets)
    parts = short_conv(tokens, weight, bias, cu_seqlens=offsets, activation=_ACTIVATIONS[activation], split=widths)
    return tuple(part.view(batch, length, part.shape[1]) for part in parts)


def _rows_of_tokens(x: torch.Tensor, offsets: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return x (B, C, L) as (B * L, C), and the offsets of its rows, or None for one row."""
    batch, channels, length = x.shape
    tokens = x.transpose(1, 2).reshape(batch * length, channels)
    if offsets is None and batch > 1:
        offsets = _equal_rows(batch, length, x.device)
    return tokens, offsets


@functools.lru_cache(maxsize=32)
def _equal_rows(batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Return the offsets int32 (batch + 1,) of rows of one length. Cached: all layers of a call need the same ones."""
    with torch.inference_mode(False):  # autograd saves the offsets
        return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)


@functools.cache
def _is_proven(own: Callable) -> bool:
    """Return whether `own` gives the values and gradients of the kernel, with and without bias and SiLU."""
    agrees, _ = attempt(lambda function: (all(_agrees(function, taps) for taps in (2, 3, 4, 8)), None), own)
    return bool(agrees)


def _agrees(own: Callable, taps: int) -> bool:
    """Return whether `own` and the kernel agree for a convolution with so many taps."""
    source = probe.generator()
    drawn = [probe.randn(shape, source) for shape in ((2, 11, 6), (6, taps), (6,))]
    for activation in (None, "silu"):
        for with_bias in (True, False):
            results = []
            for function in (own, by_kernel):
                tokens, weight, bias = (t.clone().requires_grad_() for t in drawn)
                given = (tokens.transpose(1, 2), weight, bias if with_bias else None)
                y = function(*given, activation=activation)
                leaves = (tokens, weight, bias) if with_bias else (tokens, weight)
                grads = torch.autograd.grad(y, leaves, probe.randn(y.shape, probe.generator()))
                results.append((y, *grads))
            if not all(probe.allclose_to_max(one, other, _RTOL) for one, other in zip(*results, strict=True)):
                return False
    return True
