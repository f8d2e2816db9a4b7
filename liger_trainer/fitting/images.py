"""Rows with images: what a processor makes of them, and the numbers from which a model computes their sizes.

From the sizes of images a model computes how many patches, windows and tokens they become. Tensors without values have
no sizes to tell, so that in a step with images all that follows from known numbers alone is computed.
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
    """What a model does with images depends on values that are not there."""


@contextmanager
def known_numbers() -> Iterator[None]:
    """Within it, under a `FakeTensorMode`, what depends on no tensor without values is computed.

    Raises:
        UnknownSizes: A size depends on such a tensor.
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
        ids (`torch.Tensor`): (1, tokens): their tokens, and those around them.
        inputs (`dict`): What a model gets besides. A tensor of the shape of `ids` says something of each token; of the
            others, the first dimension grows with the rows.
    """

    ids: torch.Tensor
    inputs: dict[str, torch.Tensor]

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]

    def batch(self, rows: int, length: int) -> dict[str, torch.Tensor]:
        """Return the arguments of a model for `rows` rows of `length` tokens, each with these images."""
        found = {}
        for name, value in {"input_ids": self.ids, **self.inputs}.items():
            if value.is_floating_point():
                found[name] = torch.empty(rows * value.shape[0], *value.shape[1:], dtype=value.dtype)
                continue
            with unset_fake_temporarily():
                if value.shape == self.ids.shape:
                    value = torch.nn.functional.pad(value, (0, length - self.tokens))
                found[name] = value.repeat(rows, *[1] * (value.ndim - 1))
        return found


def row_images(processor: Any, sizes: Sequence[tuple[int, int]]) -> RowImages:
    """Return what `processor` makes of a row with images of `sizes` (width, height), and without text of its own."""
    from PIL import Image

    content = [{"type": "image"} for _ in sizes]
    text = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    images = [Image.new("RGB", size) for size in sizes]
    found = processor(text=[text], images=[images], return_tensors="pt")
    return RowImages(found["input_ids"], {name: value for name, value in found.items() if name not in _TEXT})


class _Known(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(not _is_known(x) for x in given):
            if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and _is_known(args[0]):
                raise UnknownSizes(f"{func} writes pixels into a tensor of known numbers")
            return func(*_with_numbers(func, args), **kwargs)
        if not given:
            out = func(*args, **kwargs)
            made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            if not made or (func.overloadpacket not in _SEQUENCES and any(x.is_floating_point() for x in made)):
                return out  # room for results of kernels
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _is_known(x: torch.Tensor) -> bool:
    return not (isinstance(x, FakeTensor) or x.is_meta)


def _with_numbers(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `args` with the places of known masks, whose number decides how large the result is, as integers."""
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
