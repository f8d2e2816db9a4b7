"""Find what a replay would leave out: writes to buffers and random numbers drawn on the host."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from liger_trainer.varlen.graphs.graph_recorder import GraphRecorder


class SideEffects:
    """Watches one call of a backbone for effects that a replay would leave out.

    Args:
        modules (`list[nn.Module]`): The modules that the call runs.
        recorder (`GraphRecorder`): The recorder of the device.
        device (`torch.device`): The device of the batch.
    """

    def __init__(self, modules: list[nn.Module], recorder: GraphRecorder, device: torch.device):
        self._recorder, self._device = recorder, device
        self._buffers = []
        for module in modules:
            for name, x in module._buffers.items():
                if x is not None and not x.is_inference():
                    self._buffers.append((type(module), name, x))
        self._versions = [x._version for *_, x in self._buffers]
        self._drawn_on_device = recorder.random_state()
        self._drawn_on_host = _random_states_of_host(device)

    def draws(self) -> bool:
        """Return whether the call has drawn random numbers on the device. A replay draws such numbers too."""
        return not torch.equal(self._recorder.random_state(), self._drawn_on_device)

    def why_not(self) -> str | None:
        """Name what a replay would leave out, or return None."""
        for (owner, name, x), version in zip(self._buffers, self._versions, strict=True):
            if x._version != version:  # for example a count of tokens: a replay would count the filler row
                return f"it writes to {name} of a {owner.__name__}"
        if _random_states_of_host(self._device) != self._drawn_on_host:  # for example to choose layers to skip
            return "it draws random numbers on the host"
        return None


def _random_states_of_host(device: torch.device) -> list[Any]:
    """Return the states of Python's and NumPy's generators and, unless `device` is the CPU, PyTorch's for the CPU."""
    of_numpy: Any = np.random.get_state(legacy=True)
    states = [random.getstate(), of_numpy[1].tobytes(), *of_numpy[2:]]
    if device.type != "cpu":
        states.append(torch.get_rng_state().tolist())
    return states
