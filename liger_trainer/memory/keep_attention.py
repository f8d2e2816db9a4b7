"""Selective checkpointing that keeps the results of attention: the recomputation of a layer skips its attention.

The cost of attention grows with the length of a row, and what it gives does not: one tensor as large as the hidden
states, and a number for each token and head. So for long rows these are the cheapest bytes that memory can hold.

PyTorch's `create_selective_checkpoint_contexts` is as fast. It refuses a second backward pass, and since torch 2.13 a
recomputation with more operations of any kind than the forward pass, such as the casts of a layer that is called twice
under one autocast. Here only attention has to be the same.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

LONG = 4096  # tokens; with 2,048 of them attention takes so little of a step of an 8B model that 0.4 % of it are saved
FUSED = {  # operations that compute attention as a whole, whose results are what is kept
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
    "torch_attn::_varlen_attn",
}


def is_possible(given: Callable[..., Any]) -> bool:
    """Whether layers that are checkpointed by `given` can be so by `checkpoint`."""
    if not isinstance(given, functools.partial) or given.func is not checkpoint_of_torch or given.args:
        return False
    options = given.keywords
    return options.get("use_reentrant") is False and "context_fn" not in options and not options.get("debug")


def checkpoint(given: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`given(function, *args)`, which checkpoints a layer, with the results of its attention kept."""
    kept: list[Any] = []

    def keep(func: Any, out: Any) -> None:
        kept.append((func, tree_map_only(torch.Tensor, _alias, out), _version(out)))

    return given(function, *args, context_fn=lambda: (_Attention(keep), _Attention(kept=kept)))


@contextmanager
def counting(note: Callable[[int], None]) -> Iterator[None]:
    """A context that calls `note` with the bytes of all results of attention in it."""
    sizes: list[int] = []
    with _Attention(lambda func, out: sizes.extend(x.nbytes for x in _tensors(out))):
        yield
    note(sum(sizes))


def _tensors(out: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]


def _version(out: Any) -> int:
    return sum(x._version for x in _tensors(out))


def _alias(x: torch.Tensor) -> torch.Tensor:
    """`x` without its graph, in which it would keep itself alive. A change of one in place is seen in the other."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


class _Attention(TorchDispatchMode):
    """Gives `note` the results of attention, or returns those in `kept` in place of attention, each time it is entered.

    Where they have been changed in place, attention runs again, and so it does with dropout: the random numbers that
    the layer draws after it would differ otherwise. Operations inside compiled functions are not seen.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, note: Callable[[Any, Any], None] = lambda func, out: None, kept: Sequence[Any] = ()):
        super().__init__()
        self.note, self.kept = note, kept

    def __enter__(self) -> "_Attention":
        self.left = iter(self.kept)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or func._schema.name not in FUSED:
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        if (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p"):
            return func(*args, **kwargs)
        kind, out, version = next(self.left, (None, None, None))
        if kind is func and version == _version(out):
            return tree_map_only(torch.Tensor, torch.Tensor.detach, out)  # autograd may make it part of another graph
        out = func(*args, **kwargs)
        self.note(func, out)
        return out
