"""Helpers of the autograd functions: they refuse second derivatives and make stubs that carry a gradient.

A layer runs as two functions. The first saves what backward needs and returns a stub: a tensor that has the shape of
the result and no memory. The second computes the result and saves nothing. A checkpoint that recomputes the layer stops
at the last saved tensor, so it does not repeat the large product at the end of the layer.
"""

import functools
from collections.abc import Callable

import torch
from torch.autograd import forward_ad


def records_graph(*tensors: torch.Tensor) -> bool:
    """Return whether a call must go through its `autograd.Function`.

    It must if one of `tensors` needs a gradient, if grad mode is on and no tensors are given, or if forward-mode AD is
    running (the function then refuses it). Skipping the function halves the host time of a call.
    """
    if torch.is_grad_enabled() and (not tensors or any([t.requires_grad for t in tensors])):
        return True
    return forward_ad._current_level >= 0


def is_of_leaf(t: torch.Tensor) -> bool:
    """Return whether `t` is a leaf or a view of a leaf. Its owner will read such a tensor again."""
    return t.is_leaf or (t._base is not None and t._base.is_leaf)


def graph_is_kept() -> bool:
    """Return whether the running backward pass may be repeated (`retain_graph=True`), so it must not free tensors."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def once_differentiable(backward):
    """Make the `backward` of an `autograd.Function` raise under `create_graph=True`.

    For functions with gradients that PyTorch cannot differentiate. PyTorch's own decorator raises only when a second
    backward pass reaches the gradients. `torch.autograd.grad` never starts one, and the decorator does nothing where
    the upstream gradient is the 1 of a loss. The gradients would then count as constants, and a gradient penalty would
    be wrong without an error.
    """

    @functools.wraps(backward)
    def once(ctx, *upstream):
        if not torch.is_grad_enabled():  # the usual case: this backward pass builds no graph
            return backward(ctx, *upstream)
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return backward(ctx, *upstream)
        raise RuntimeError(
            "A second derivative was asked for (create_graph=True) through a fused kernel of liger_triton, which "
            "has none. Use the plain PyTorch operation there; in a patched model, switch it off in liger_config."
        )

    return once


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, compute, shape, stub):
        ctx.set_materialize_grads(False)
        return in_shape(compute(), shape)

    @staticmethod
    def backward(ctx, dy):
        return None, None, dy


def without_memory(shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Return a stub of this shape. It has one element of memory, and its value is never read."""
    return torch.empty((), dtype=dtype, device=like.device).expand(shape)  # zeros would be a launch


def in_shape(y: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a new y (T, N) as (*shape, N). Not a view: autograd forbids in-place changes of those."""
    shape = (*shape, y.shape[1])
    # resize_ takes half the host time, and a new tensor has no other views that would notice.
    return y.resize_(shape) if y.is_contiguous() else torch.ops.aten._unsafe_view.default(y, shape)


def computed(compute: Callable[[], torch.Tensor], shape: tuple[int, ...], stub: torch.Tensor | None) -> torch.Tensor:
    """Call `compute` and return its result (T, N) as (*shape, N). Its gradient goes to `stub`."""
    if stub is not None:
        return _Computed.apply(compute, shape, stub)
    with torch.no_grad():
        return in_shape(compute(), shape)
