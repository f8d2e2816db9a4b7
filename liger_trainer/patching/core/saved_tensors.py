"""Tensors that saved-tensor hooks leave unchanged, with autograd's own check that they were not written to."""

from collections.abc import Callable
from typing import Any

import torch

SavedTensor = tuple[torch.Tensor, int]
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def active_saved_tensor_hooks() -> Hooks | None:
    """Return the pair of saved-tensor hooks in force, pack and unpack; None without hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def save_with_version(tensor: torch.Tensor) -> SavedTensor:
    """Keep `tensor`: itself and its version.

    It is kept detached, since an operation that keeps its own result would own itself, a cycle that is never freed. A
    leaf is not: ZeRO-3 exchanges the data of its parameters, which a detached tensor would not follow.
    """
    return tensor if tensor.is_leaf else tensor.detach(), tensor._version


def load_checked(kept: SavedTensor) -> torch.Tensor:
    """Return the tensor. RuntimeError if it was changed in place since."""
    tensor, version = kept
    if tensor._version != version:
        raise RuntimeError(modified_message(kept))
    return tensor


def modified_message(kept: SavedTensor) -> str:
    """Return the text of the error."""
    tensor, version = kept
    return (
        f"A tensor {tuple(tensor.shape)} that the backward pass needs has been modified by an inplace operation: it "
        f"is at version {tensor._version}, expected {version}."
    )
