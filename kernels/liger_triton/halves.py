"""Split a fused projection into its halves [gate | up], and join their gradients without a copy.

That works because the gates of this package write the gradients of two halves into two halves of one tensor.
"""

import torch


def joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    """Return the contiguous (..., 2 N) if the two tensors (..., N) are its halves, without a copy; else None."""
    if (
        first.ndim == 0
        or (first.shape, first.stride(), first.dtype) != (second.shape, second.stride(), second.dtype)
        or second.storage_offset() - first.storage_offset() != first.shape[-1]
        or first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    ):
        return None
    shape = (*first.shape[:-1], 2 * first.shape[-1])
    strides = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    if any(size > 1 and got != want for size, got, want in zip(first.shape, first.stride(), strides, strict=True)):
        return None
    return first.detach().as_strided(shape, strides)


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.chunk(2, dim=-1)

    @staticmethod
    def backward(ctx, da, db):
        whole = None if torch.is_grad_enabled() else joined(da, db)
        return torch.cat((da, db), dim=-1) if whole is None else whole


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x.chunk(2, dim=-1)`. Backward copies nothing if both gradients are halves of one tensor."""
    return x.chunk(2, dim=-1) if torch.compiler.is_compiling() else _Halves.apply(x)
