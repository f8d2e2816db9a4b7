"""Detects weights of a policy that were written after the completions were generated."""

import weakref
from typing import NamedTuple

import torch
from torch import nn


class _Noted(NamedTuple):
    name: str  # its full name in the model
    module: weakref.ref[nn.Module]
    key: str  # its name in the module
    weight: weakref.ref[torch.Tensor]
    version: int


class PolicyWeights:
    """The weights of a model at one moment, by PyTorch's version counters. No value is copied or read.

    It keeps neither the model nor a weight alive. It does not see writes through `.data`, or modules that are added to
    the model later.

    Args:
        model (`torch.nn.Module`): The policy. It must not be sharded, because sharding swaps parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._noted: list[_Noted] = []
        for path, module in model.named_modules():
            owner = weakref.ref(module)
            for key, weight in module._parameters.items():
                if weight is None or weight.is_inference():  # no counter
                    continue
                name = f"{path}.{key}" if path else key
                self._noted.append(_Noted(name, owner, key, weakref.ref(weight), weight._version))

    def changed(self) -> str | None:
        """Return the name of a weight that was written or replaced since then, or None."""
        for noted in self._noted:
            module, weight = noted.module(), noted.weight()
            if module is None or weight is None or module._parameters.get(noted.key) is not weight:
                return noted.name
            if weight._version != noted.version:
                return noted.name
        return None
