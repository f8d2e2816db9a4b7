"""Runs a frozen model as it will be served, and heads beside it in its dtype."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn


@contextmanager
def as_served(model: nn.Module) -> Iterator[None]:
    """Context manager: the frozen model runs as it will be served, without dropout and without a graph."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def in_dtype_of(weight: torch.Tensor, heads: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which `heads` compute in the dtype of `weight`, a weight of their model.

    Heads that were trained in mixed precision have fp32 weights beside a model in 16 bits, and autocast computed them.
    """
    differs = next(heads.parameters()).dtype != weight.dtype
    is_narrow = weight.dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(weight.device.type, dtype=weight.dtype, enabled=differs and is_narrow)
