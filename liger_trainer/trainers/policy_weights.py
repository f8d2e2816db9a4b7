"""Notices weights of a policy that somebody has changed."""

from typing import Any, NamedTuple

import torch
from torch import nn


class _Held(NamedTuple):
    name: str  # in the model
    own: dict[str, Any]  # the parameters of the module that has it
    key: str  # in these
    weight: torch.Tensor
    version: int


class PolicyWeights:
    """The weights of a model at one moment, known by PyTorch's counters of writes, so that no value is copied or read.

    A write through `.data` is not counted, nor is one in a module that was put into the model since.

    Args:
        model (`torch.nn.Module`): The policy. It may not be sharded: that swaps parameters, and counts otherwise.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held: list[_Held] = []
        for path, module in model.named_modules():
            for key, weight in module._parameters.items():
                if weight is None or weight.is_inference():  # no counter
                    continue
                name = f"{path}.{key}" if path else key
                self._held.append(_Held(name, module._parameters, key, weight, weight._version))

    def changed(self) -> str | None:
        """Return the name of a weight that was written or replaced since, or None."""
        for held in self._held:
            if held.weight._version != held.version or held.own.get(held.key) is not held.weight:
                return held.name
        return None
