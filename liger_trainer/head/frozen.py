"""Runs a frozen model as it will be served."""

from collections.abc import Iterator
from contextlib import contextmanager

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
