"""What the autograd functions share: derivatives they refuse, and stubs that carry a gradient in place of a result.

A layer keeps what its backward pass needs in a first function and computes its result in a second one, which keeps
nothing. In between is a stub: a tensor of the shape of the result without memory. A checkpoint that recomputes the
layer stops at the last tensor that is kept, so that it does not repeat the large product that the layer ends with.
"""

import functools
from collections.abc import Callable

import torch
from torch.autograd import forward_ad


def records_graph(*tensors: torch.Tensor) -> bool:
    """Whether a call must go through its `autograd.Function`: one of `tensors`, if there are any, gets a gradient, or
    forward-mode AD is running, which the function refuses. Skipping the function halves the time of the host."""
    if torch.is_grad_enabled() and (not tensors or any([t.requires_grad for t in tensors])):
        return True
    return forward_ad._current_level >= 0


def is_of_leaf(t: torch.Tensor) -> bool:
    """Whether `t` is a leaf or a view of one, whose owner reads it again."""
    return t.is_leaf or (t._base is not None and t._base.is_leaf)


def graph_is_kept() -> bool:
    """Whether the running backward pass may be repeated (`retain_graph=True`) and so must keep what a second one
    needs."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def once_differentiable(backward):
    """Marks the `backward` of an `autograd.Function` whose gradients have no derivative that PyTorch knows.

    It raises under `create_graph=True`. PyTorch's own decorator waits until a second backward pass comes to the
    gradients, which `torch.autograd.grad` never does, and it does nothing where the upstream gradient is the 1 of a
    loss: the gradients would count as constants, and a gradient penalty would be wrong in silence.
    """

    @functools.wraps(backward)
    def once(ctx, *upstream):
        if not torch.is_grad_enabled():  # as in every backward pass that does not build a graph of its own
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
    """A stub of this shape: it has one element of memory, whose value is never read."""
    return torch.empty((), dtype=dtype, device=like.device).expand(shape)  # zeros would be a launch


def in_shape(y: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A new y (T, N) as (*shape, N). A function may not return a view of it, which could not be changed in place."""
    shape = (*shape, y.shape[1])
    # The same in half the time of the host; a new tensor has no views that would see it.
    return y.resize_(shape) if y.is_contiguous() else torch.ops.aten._unsafe_view.default(y, shape)


def computed(compute: Callable[[], torch.Tensor], shape: tuple[int, ...], stub: torch.Tensor | None) -> torch.Tensor:
    """What `compute` returns, (T, N), as (*shape, N). Its gradient goes to what made the `stub`, if there is one."""
    if stub is not None:
        return _Computed.apply(compute, shape, stub)
    with torch.no_grad():
        return in_shape(compute(), shape)
