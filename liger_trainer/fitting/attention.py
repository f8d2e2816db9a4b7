"""The memory that attention takes on a GPU, whose kernels neither keep nor build the scores of all pairs of tokens."""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from liger_trainer.memory import keep_attention

NAME = "counted"
_OPERATION = "liger_trainer::counted_attention"


def _results(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention returns: its output (B, S, H, D), and one number for each query and head in fp32."""
    rows, heads, length, _ = query.shape
    out = query.new_empty(rows, length, heads, value.shape[-1])
    return out, query.new_empty(rows, heads, length, dtype=torch.float32)


# One operation, as on a GPU, so that it is seen by what keeps the results of attention
_operation = torch.library.custom_op(_OPERATION, _results, mutates_args=())
_operation.register_fake(_results)


class _Attention(torch.autograd.Function):
    """What the flash attention of PyTorch allocates: (B, H, S, D) to (B, S, H, D).

    It keeps query, key, value, the output, and one number for each query and head in fp32. The backward pass sums the
    gradient of the queries in fp32. Where several heads share a key, it makes gradients for each of them first.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out, sums = _operation(query, key, value)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, sums = ctx.saved_tensors
        rows, heads, length, width = query.shape
        gradient = gradient.contiguous()
        summed = [torch.empty_like(sums), query.new_empty(rows, length, heads, width, dtype=torch.float32)]
        of_query = torch.empty_like(query)
        if key.shape[1] == heads:
            of_key, of_value = torch.empty_like(key), torch.empty_like(value)
        else:
            several = [t.new_empty(rows, heads, t.shape[2], t.shape[3]) for t in (key, value)]
            of_key, of_value = torch.empty_like(key), torch.empty_like(value)
            del several
        del summed
        return of_query, of_key, of_value


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **options: Any
) -> tuple[torch.Tensor, None]:
    return _Attention.apply(query, key, value), None


def _mask(*args: Any, **kwargs: Any) -> None:
    """No mask: rows are full, and the kernels know what is causal."""


def register() -> None:
    """Let models of transformers have `attn_implementation=NAME`."""
    keep_attention.FUSED.add(_OPERATION)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
