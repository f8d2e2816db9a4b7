"""Selective checkpointing that keeps the results of attention: recomputing a layer skips its attention.

The cost of attention grows with the length of a row. Its results do not: one tensor as large as the hidden states, and
a number for each token and head. So for long rows they save the most time per byte.

PyTorch's `create_selective_checkpoint_contexts` is as fast. It refuses a second backward pass. Since torch 2.13 it also
refuses a recomputation with more operations of any kind than the forward pass, such as the casts of a layer that is
called twice under one autocast. Here only attention has to be the same.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from liger_trainer.memory.switches import options_of, tensors_in

LONG = 4096  # tokens; with 2,048, the attention of an 8B model takes so little that 0.4 % of a step are saved
FUSED = {  # operations that compute attention as a whole; their results are kept
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
    "torch_attn::_varlen_attn",
}


_Result = tuple[torch._ops.OpOverload, Any, int]  # an operation, its result, and the versions of its tensors


def is_possible(checkpointed: Callable[..., Any]) -> bool:
    """Return whether `checkpoint` can checkpoint layers that are checkpointed by `checkpointed`."""
    options = options_of(checkpointed)
    return options is not None and "context_fn" not in options and not options.get("debug")


def checkpoint(checkpointed: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return `checkpointed(function, *args)`, which checkpoints a layer, and keep the results of its attention."""
    kept: list[_Result] = []

    def keep(func: torch._ops.OpOverload, out: Any) -> None:
        kept.append((func, tree_map_only(torch.Tensor, _alias, out), _version(out)))

    return checkpointed(function, *args, context_fn=lambda: (_Attention(keep), _Attention(kept=kept)))


@contextmanager
def measuring(note: Callable[[int], None]) -> Iterator[None]:
    """Return a context that calls `note` with the bytes of all results of attention in it."""
    sizes: list[int] = []
    with _Attention(lambda func, out: sizes.extend(x.nbytes for x in tensors_in(out))):
        yield
    note(sum(sizes))


def _version(out: Any) -> int:
    """Return a number that grows when a tensor in `out` is written to."""
    return sum(x._version for x in tensors_in(out))


def _alias(x: torch.Tensor) -> torch.Tensor:
    """Detach `x`, with the same version counter. With its graph it would keep itself alive."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


class _Attention(TorchDispatchMode):
    """Calls `note` with each result of attention, or returns the results in `kept` in place of attention.

    Attention runs again where a result has been changed in place, and with dropout: the random numbers that the layer
    draws after it would differ otherwise. Operations inside compiled functions are not seen.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(
        self, note: Callable[[torch._ops.OpOverload, Any], None] = lambda func, out: None, kept: Sequence[_Result] = ()
    ):
        super().__init__()
        self.note = note
        self.kept = kept

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
