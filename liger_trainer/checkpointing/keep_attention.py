"""Checkpointing that keeps the results of attention: in its backward pass a layer runs again, all but its attention.

The cost of attention grows with the length of a row, and what it gives does not: one tensor as large as the hidden
states, and a number for each token and head. So for long rows these are the cheapest bytes that memory can hold.

PyTorch's `create_selective_checkpoint_contexts` does nearly that. It refuses a second backward pass and results that
are changed in place, which train without it. Here attention runs again in the second case, and where it draws random
numbers, since those that the layer draws after it would differ otherwise.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

LONG = 4096  # tokens; with 2,048 of them attention takes so little of a step of an 8B model that 0.4 % of it are saved
_FUSED = {  # operations that compute attention as a whole, whose results are what is kept
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
    "torch_attn::_varlen_attn",
}


def also_fused(name: str) -> None:
    """Keep the results of the operation `name` too, for example of `"mine::attention"`."""
    _FUSED.add(name)
    _dropout_of.cache_clear()


def is_possible(given: Callable[..., Any]) -> bool:
    """Whether layers that are checkpointed by `given` can be so by `checkpoint`."""
    if not isinstance(given, functools.partial) or given.func is not checkpoint_of_torch or given.args:
        return False
    options = given.keywords
    return options.get("use_reentrant") is False and "context_fn" not in options and not options.get("debug")


def checkpoint(given: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`given(function, *args)`, which checkpoints a layer, with the results of its attention kept."""
    results: list[_Result] = []
    return given(function, *args, context_fn=lambda: (_Attention(results.append), _Attention(None, results)))


@contextmanager
def counting(note: Callable[[int], None]) -> Iterator[None]:
    """A context that calls `note` with the bytes of all results of attention in it."""
    sizes: list[int] = []
    with _Attention(lambda result: sizes.append(result.nbytes)):
        yield
    note(sum(sizes))


class _Result:
    """What one operation has returned."""

    def __init__(self, func: Any, out: Any):
        self.func, self.out = func, tree_map_only(torch.Tensor, _alias, out)
        self.versions = self._versions()

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in tree_leaves(self.out) if isinstance(x, torch.Tensor))

    def _versions(self) -> list[int]:
        return [x._version for x in tree_leaves(self.out) if isinstance(x, torch.Tensor)]

    def is_of(self, func: Any) -> bool:
        return func is self.func and self._versions() == self.versions

    def get(self) -> Any:
        """The same values in new tensors, which autograd may make part of another graph."""
        return tree_map_only(torch.Tensor, torch.Tensor.detach, self.out)


def _alias(x: torch.Tensor) -> torch.Tensor:
    """`x` without its graph, in which it would keep itself alive. A change of one in place is seen in the other."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


class _Attention(TorchDispatchMode):
    """Sees each operation of a layer; those inside of compiled functions are left to them.

    Args:
        note (`Callable`, *optional*): Is given the results of attention.
        results (`list`, *optional*): Given in place of attention, one after the other, each time this is entered.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, note: Callable[[_Result], None] | None, results: list[_Result] | None = None):
        super().__init__()
        self.note, self.results = note, results

    def __enter__(self) -> "_Attention":
        self.left = iter(self.results or ())
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = _dropout_of(func)
        if place is None or (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)):
            return func(*args, **kwargs)
        found = next(self.left, None)
        if found is not None and found.is_of(func):
            return found.get()
        out = func(*args, **kwargs)
        if self.note is not None:
            self.note(_Result(func, out))
        return out


@functools.cache
def _dropout_of(func: Any) -> int | None:
    """The place of `dropout_p` among the arguments of an operation of attention; None for all others."""
    if not isinstance(func, torch._ops.OpOverload) or func._schema.name not in _FUSED:
        return None
    names = [argument.name for argument in func._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else len(names)
