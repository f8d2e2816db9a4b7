"""The two parts of a fused projection, halves [gate | up] or pairs [gate, up, gate, up, ...], whose gradients are put
together without a copy.

That is possible because the gates of this package write the gradients of two parts of one tensor into such parts of one
tensor.
"""

import torch


def every_other(x: torch.Tensor) -> bool:
    """Whether the numbers of x are every other one of a contiguous tensor twice as long: x is `t[..., ::2]` of it."""
    step = 2
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return x.ndim > 0 and x.shape[-1] > 1


def joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    """The contiguous tensor (..., 2 N) whose halves the two (..., N) are, without a copy. None if they are not."""
    if (
        first.ndim == 0
        or (first.shape, first.stride(), first.dtype) != (second.shape, second.stride(), second.dtype)
        or first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
        or second.storage_offset() - first.storage_offset() != first.shape[-1]
    ):
        return None
    shape, strides, step = (*first.shape[:-1], 2 * first.shape[-1]), [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    if any(size > 1 and got != want for size, got, want in zip(first.shape, first.stride(), strides, strict=True)):
        return None
    return first.detach().as_strided(shape, strides)


def joined_pairs(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    """The contiguous tensor (..., 2 N) whose even and odd columns the two (..., N) are. None if they are not."""
    if (
        (first.shape, first.dtype) != (second.shape, second.dtype)
        or not (every_other(first) and every_other(second))
        or first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
        or second.storage_offset() - first.storage_offset() != 1
    ):
        return None
    shape = (*first.shape[:-1], 2 * first.shape[-1])
    return first.detach().as_strided(shape, torch.empty(shape, device="meta").stride())


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.chunk(2, dim=-1)

    @staticmethod
    def backward(ctx, da, db):
        whole = None if torch.is_grad_enabled() else joined(da, db)
        return torch.cat((da, db), dim=-1) if whole is None else whole


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x.chunk(2, dim=-1)`. Its gradient is not copied if the gradients of the two are halves of one tensor."""
    return x.chunk(2, dim=-1) if torch.compiler.is_compiling() else _Halves.apply(x)


class _Pairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x[..., ::2], x[..., 1::2]

    @staticmethod
    def backward(ctx, da, db):
        whole = None if torch.is_grad_enabled() else joined_pairs(da, db)
        return torch.stack((da, db), dim=-1).flatten(-2) if whole is None else whole


def pairs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x[..., ::2], x[..., 1::2]`. Its gradient is not copied if the gradients of the two are such parts of one
    tensor."""
    return (x[..., ::2], x[..., 1::2]) if torch.compiler.is_compiling() else _Pairs.apply(x)
