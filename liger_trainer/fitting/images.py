"""Builds rows with images, and computes real numbers where a model derives sizes from them.

A model computes the number of patches, windows and tokens from the sizes of its images. A fake tensor has no values, so
in a step with images every operation that reads known numbers only runs for real.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TEXT = ("input_ids", "attention_mask")
_SEQUENCES = (torch.ops.aten.arange, torch.ops.aten.linspace)
_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


class UnknownSizes(Exception):
    """Raised when a size in the model depends on the values of pixels, which are not there."""


@contextmanager
def known_numbers() -> Iterator[None]:
    """Context manager for a `FakeTensorMode`: operations without fake inputs compute real numbers.

    Raises:
        UnknownSizes: A size depends on a fake tensor.
    """
    try:
        with _Known():
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnknownSizes(f"the result of {error.func} depends on the values of pixels") from error


@dataclass(frozen=True)
class RowImages:
    """The images of a row.

    Args:
        ids (`torch.Tensor`): (1, tokens): the image tokens and the tokens around them.
        inputs (`dict`): Further arguments of the model. A tensor with the shape of `ids` has one entry per token. The
            first dimension of the others grows with the rows.
    """

    ids: torch.Tensor
    inputs: dict[str, torch.Tensor]

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]

    def batch(self, rows: int, length: int) -> dict[str, torch.Tensor]:
        """Return the arguments of a model for `rows` rows of `length` tokens, each with these images."""
        arguments = {}
        for name, value in {"input_ids": self.ids, **self.inputs}.items():
            if value.is_floating_point():
                arguments[name] = torch.empty(rows * value.shape[0], *value.shape[1:], dtype=value.dtype)
                continue
            with unset_fake_temporarily():
                if value.shape == self.ids.shape:
                    value = torch.nn.functional.pad(value, (0, length - self.tokens))
                arguments[name] = value.repeat(rows, *[1] * (value.ndim - 1))
        return arguments


def row_images(processor: Any, sizes: Sequence[tuple[int, int]]) -> RowImages:
    """Process a row that has images of `sizes` (width, height) and no other text."""
    from PIL import Image

    content = [{"type": "image"} for _ in sizes]
    text = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    images = [Image.new("RGB", size) for size in sizes]
    processed = processor(text=[text], images=[images], return_tensors="pt")
    inputs = {name: value for name, value in processed.items() if name not in _TEXT}
    return RowImages(processed["input_ids"], inputs)


class _Known(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(not _is_known(x) for x in inputs):
            if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and _is_known(args[0]):
                raise UnknownSizes(f"{func} writes pixels into a tensor of known numbers")
            return func(*_with_numbers(func, args), **kwargs)
        if not inputs:
            out = func(*args, **kwargs)
            outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            is_float = any(x.is_floating_point() for x in outputs)
            if not outputs or (func.overloadpacket not in _SEQUENCES and is_float):
                return out  # a buffer for the result of a kernel
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _is_known(x: torch.Tensor) -> bool:
    return not (isinstance(x, FakeTensor) or x.is_meta)


def _with_numbers(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `args` with known masks replaced by their indices: the size of the result depends on their number."""
    if func not in _INDEXED:
        return args
    places: list[Any] = []
    for x in args[1]:
        if x is None or x.dtype is not torch.bool or not _is_known(x):
            places.append(x)
        else:
            with unset_fake_temporarily():
                places += x.nonzero(as_tuple=True)
    return (args[0], places, *args[2:])
