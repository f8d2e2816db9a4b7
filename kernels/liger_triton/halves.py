"""The two parts of a fused projection, halves [gate | up] or pairs [gate, up, gate, up, ...], whose gradients are put
together without a copy.

That is possible because the gates of this package write the gradients of two parts of one tensor into such parts of one
tensor.
"""

import torch


def joined(first: torch.Tensor, second: torch.Tensor, pairs: bool = False) -> torch.Tensor | None:
    """The contiguous tensor (..., 2 N) whose halves the two (..., N) are, without a copy; with `pairs`, whose even and
    odd columns they are. None if they are not."""
    if (
        first.ndim == 0
        or (first.shape, first.stride(), first.dtype) != (second.shape, second.stride(), second.dtype)
        or second.storage_offset() - first.storage_offset() != (1 if pairs else first.shape[-1])
        or first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    ):
        return None
    shape, strides, step = (*first.shape[:-1], 2 * first.shape[-1]), [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    parts = (*strides[:-1], 2) if pairs else strides
    if any(size > 1 and got != want for size, got, want in zip(first.shape, first.stride(), parts, strict=True)):
        return None
    return first.detach().as_strided(shape, strides)


def parts_of(x: torch.Tensor, pairs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The halves of x or, with `pairs`, its even and odd columns."""
    return (x[..., ::2], x[..., 1::2]) if pairs else x.chunk(2, dim=-1)


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, pairs):
        ctx.pairs = pairs
        return parts_of(x, pairs)

    @staticmethod
    def backward(ctx, da, db):
        whole = None if torch.is_grad_enabled() else joined(da, db, ctx.pairs)
        if whole is None:
            whole = torch.stack((da, db), dim=-1).flatten(-2) if ctx.pairs else torch.cat((da, db), dim=-1)
        return whole, None


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x.chunk(2, dim=-1)`. Its gradient is not copied if the gradients of the two are halves of one tensor."""
    return parts_of(x, False) if torch.compiler.is_compiling() else _Parts.apply(x, False)


def pairs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x[..., ::2], x[..., 1::2]`. Its gradient is not copied if the gradients of the two are such parts of one
    tensor."""
    return parts_of(x, True) if torch.compiler.is_compiling() else _Parts.apply(x, True)
