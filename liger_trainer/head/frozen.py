"""Runs a frozen model as it will be served, and the heads on it in its dtype."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn


@contextmanager
def as_served(model: nn.Module) -> Iterator[None]:
    """Context manager: the frozen model runs as it will be served, without dropout and without an autograd graph."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def in_dtype_of(weight: torch.Tensor, heads: nn.Module) -> AbstractContextManager[None]:
    """Return a context that makes `heads` compute in the dtype of `weight`, a weight of their model.

    Mixed precision trains heads with fp32 weights on a 16-bit model, under autocast.
    """
    differs = next(heads.parameters()).dtype != weight.dtype
    is_narrow = weight.dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(weight.device.type, dtype=weight.dtype, enabled=differs and is_narrow)
