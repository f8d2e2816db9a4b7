"""Detects weights of a policy that were written after the completions were generated."""

from typing import Any, NamedTuple

import torch
from torch import nn


class _Held(NamedTuple):
    name: str  # its full name in the model
    own: dict[str, Any]  # the parameters of its module
    key: str  # its name there
    weight: torch.Tensor
    version: int


class PolicyWeights:
    """The weights of a model at one moment, by PyTorch's version counters. No value is copied or read.

    It does not see writes through `.data`, or modules that are added to the model later.

    Args:
        model (`torch.nn.Module`): The policy. It must not be sharded, because sharding swaps parameters.
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
        """Return the name of a weight that was written or replaced since then, or None."""
        for held in self._held:
            if held.weight._version != held.version or held.own.get(held.key) is not held.weight:
                return held.name
        return None
