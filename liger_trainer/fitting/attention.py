"""Stands in for attention on a GPU: the kernels there never build the matrix of scores."""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from liger_trainer.memory import selective
from liger_trainer.varlen.proof import towers

NAME = "liger_fit"
_OF_TOWERS = "liger_fit_flash"  # with "flash" in it, a tower asks once for all images and windows
_OPERATION = "liger_trainer::fit_attention"


def _results(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (B, S, H, D), and one number for each query and head in fp32."""
    rows, heads, length, _ = query.shape
    out = query.new_empty(rows, length, heads, value.shape[-1])
    return out, query.new_empty(rows, heads, length, dtype=torch.float32)


# One operation, as on a GPU, so that selective checkpointing sees it
_operation = torch.library.custom_op(_OPERATION, _results, mutates_args=())
_operation.register_fake(_results)


class _Attention(torch.autograd.Function):
    """Allocates what PyTorch's flash attention does: (B, H, S, D) to (B, S, H, D).

    Forward saves query, key, value, the output, and one fp32 number for each query and head. Backward sums the gradient
    of the queries in fp32. If several heads share a key, backward computes the gradient of each head first.
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
        temporary = [torch.empty_like(sums), query.new_empty(rows, length, heads, width, dtype=torch.float32)]
        if key.shape[1] != heads:
            temporary += [t.new_empty(rows, heads, *t.shape[2:]) for t in (key, value)]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, **rest: Any
) -> tuple[torch.Tensor, None]:
    return _Attention.apply(query, key, value), None


def _mask(*args: Any, **kwargs: Any) -> None:
    """Return no mask: rows have no padding, and the kernels apply the causal mask."""


def register() -> None:
    """Register the stand-in with transformers as `attn_implementation=NAME`."""
    selective.FUSED.add(_OPERATION)
    for name in (NAME, _OF_TOWERS):
        AttentionInterface.register(name, _attention)
        AttentionMaskInterface.register(name, _mask)


def attend_once(model: torch.nn.Module) -> None:
    """Make the towers of `model` call attention once for all images and windows, as on a GPU."""
    for module in model.modules():
        if towers.is_candidate(module):
            module.config._attn_implementation = _OF_TOWERS  # type: ignore[union-attr]
