"""Running micro-batches again after one has run out of memory, as if they had not been run before.

The gradients that a micro-batch had added when it failed cannot be taken away again, so all micro-batches since the
last optimizer step are run again. For that their inputs are kept, and what a micro-batch changes beside the gradients:
the states of the random number generators, and what the trainer counts in its attributes, such as TRL's metrics. That
is numbers and words in all attributes, and containers and tensors in private ones: a public one may be the dataset.
"""

import collections
import copy
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from liger_trainer.checkpointing.tensors import tensors_in

_PLAIN = (int, float, str, bool, type(None))
_CONTAINERS = (dict, list, tuple, collections.deque)
# Bytes of a tensor whose values are kept, lest they are changed in place: of a batch, and of what a trainer counts in.
_OF_BATCH, _COUNTER = 2**20, 2**12


class _Kept(NamedTuple):
    """A tensor that a micro-batch may change in place, and what it was before."""

    tensor: torch.Tensor
    version: int
    values: torch.Tensor | None  # None: they are too many

    @classmethod
    def of(cls, tensor: torch.Tensor, most: int) -> "_Kept":
        small = type(tensor) is torch.Tensor and not tensor.requires_grad and tensor.nbytes <= most
        return cls(tensor, tensor._version, tensor.clone() if small else None)

    def restore(self) -> None:
        if self.tensor._version == self.version:
            return
        if self.values is None:
            raise RuntimeError(
                "A micro-batch ran out of memory and cannot be run again (activation_checkpointing: auto), because it "
                f"has changed a tensor in place that it was given, {tuple(self.tensor.shape)} {self.tensor.dtype}. "
                "Change a copy of it, or set memory_budget to fewer GiB."
            )
        self.tensor.copy_(self.values)


@dataclass
class Before:
    """A micro-batch that is about to be run: its arguments, and what it is going to change."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rng: tuple[Any, ...]
    attributes: dict[str, Any]
    tensors: list[_Kept]

    @classmethod
    def of(cls, trainer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Before":
        attributes = {
            name: _copied(value)
            for name, value in vars(trainer).items()
            if isinstance(value, _PLAIN) or (name.startswith("_") and isinstance(value, (*_CONTAINERS, torch.Tensor)))
        }
        args, kwargs = _copied((args, kwargs))
        tensors = [_Kept.of(tensor, _OF_BATCH) for tensor in _changeable_in((args, kwargs))]
        tensors += [_Kept.of(tensor, _COUNTER) for tensor in _changeable_in(attributes)]
        return cls(args, kwargs, _random_states(), attributes, tensors)

    def restore(self, trainer: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put everything back. Returns the arguments, with containers that the micro-batch may change."""
        _set_random_states(self.rng)
        for kept in self.tensors:
            kept.restore()
        vars(trainer).update({name: _copied(value) for name, value in self.attributes.items()})
        args, kwargs = _copied((self.args, self.kwargs))
        return args, kwargs


def _copied(value: Any) -> Any:
    """A copy of a container and the containers in it. Everything else is shared with the original."""
    if isinstance(value, dict):
        twin = copy.copy(value)  # of the same class, with the same default
        for key, inner in value.items():
            twin[key] = _copied(inner)
        return twin
    if isinstance(value, collections.deque):
        return type(value)((_copied(inner) for inner in value), value.maxlen)
    if type(value) in (list, tuple):
        return type(value)(_copied(inner) for inner in value)
    return value


def _changeable_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that somebody could change; nobody can change those of inference mode, which have no version."""
    return (tensor for tensor in tensors_in(value) if not tensor.is_inference())


def _random_states() -> tuple[Any, ...]:
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu


def _set_random_states(states: tuple[Any, ...]) -> None:
    of_python, of_numpy, of_torch, of_gpu = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    if of_gpu is not None:
        torch.cuda.set_rng_state(of_gpu)


def has_gradients(parameters: Iterable[nn.Parameter]) -> bool:
    return any(parameter.grad is not None for parameter in parameters)


def forget_gradients(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that the device's memory is full. cuBLAS and Triton have messages of their own for that."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("CUDA out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text)
    )
