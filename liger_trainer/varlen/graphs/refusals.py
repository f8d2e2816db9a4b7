"""Why a call of a backbone is not captured: hooks, modes of PyTorch, and what its code does besides computing."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from liger_trainer.patching.core.binding import Binding
from liger_trainer.patching.core.hooks import HOOK_DICTS, home
from liger_trainer.patching.core.kept import hooks_in_force
from liger_trainer.varlen.graphs.recorder import Recorder

_GLOBAL_HOOKS = [getattr(nn.modules.module, f"_global{name}") for name in HOOK_DICTS]


class NotCapturable(Exception):  # noqa: N818 - no error of the user's
    """Raised where a call cannot be captured; the message is the reason in the report."""


def refuse_process() -> None:
    """Raise `NotCapturable` where the process does more than run the model."""
    if hooks_in_force() is not None:
        raise NotCapturable("hooks decide about the tensors that autograd saves")
    if torch.is_inference_mode_enabled() or torch.is_anomaly_enabled() or torch._C._len_torch_function_stack():
        raise NotCapturable("a mode of PyTorch is on (inference, anomaly detection or a function mode)")
    if any(_GLOBAL_HOOKS):
        raise NotCapturable("a hook is registered for all modules")


def refuse_hooks(backbone: nn.Module) -> None:
    """Raise `NotCapturable` where Python code is attached to a module in the capture.

    Hooks by which transformers collects outputs do nothing where none is asked for. A forward that is not ours is, for
    example, that by which accelerate calls its hooks.
    """
    outside = {id(module) for module in backbone.get_input_embeddings().modules()}  # type: ignore[operator]
    for module in backbone.modules():
        if module is backbone or id(module) in outside:
            continue
        for name in HOOK_DICTS:
            hooks = module.__dict__[name].values()
            if not all(home(hook).startswith("transformers.") for hook in hooks):
                raise NotCapturable(f"a {type(module).__name__} has a hook")
        forward = module.__dict__.get("forward")
        while isinstance(forward, Binding):
            forward = forward.previous
        if forward is not None:
            raise NotCapturable(f"a {type(module).__name__} has a forward of its own")


class SideEffects:
    """What the code of a backbone does in a call besides computing, which a replay would leave out.

    Args:
        modules (`list[nn.Module]`): Those that run.
        recorder (`Recorder`): Of the device.
        device (`torch.device`): Of the batch.
    """

    def __init__(self, modules: list[nn.Module], recorder: Recorder, device: torch.device):
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
        """Return whether it has drawn random numbers on the device."""
        return not torch.equal(self._recorder.random_state(), self._drawn_on_device)

    def why_not(self) -> str | None:
        """Name what a replay would leave out, or return None."""
        for (owner, name, x), version in zip(self._buffers, self._versions, strict=True):
            if x._version != version:  # such as a count of tokens, in which the filling row would count too
                return f"it writes to {name} of a {owner.__name__}"
        if _random_states_of_host(self._device) != self._drawn_on_host:  # such as which layers are left out
            return "it draws random numbers on the host"
        return None


def _random_states_of_host(device: torch.device) -> list[Any]:
    """Return the states of Python's, NumPy's and, beside another device, PyTorch's generators of the host."""
    of_numpy: Any = np.random.get_state(legacy=True)
    states = [random.getstate(), of_numpy[1].tobytes(), *of_numpy[2:]]
    if device.type != "cpu":
        states.append(torch.get_rng_state().tolist())
    return states
