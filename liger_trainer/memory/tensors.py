"""The tensors in what is given to a layer or a micro-batch, and in what a layer returns."""

import collections
from collections.abc import Iterator
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """`value` itself if it is a tensor, or all tensors in a list, tuple, deque or dictionary, however deep they lie."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, collections.UserDict)):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, (tuple, list, collections.deque)):
        for part in value:
            yield from tensors_in(part)
