"""Refuse to capture a call of a backbone because of hooks or modes of PyTorch."""

import torch
from torch import nn

from liger_trainer.patching.core.binding import Binding
from liger_trainer.patching.core.hooks import HOOK_DICTS, home
from liger_trainer.patching.core.saved_tensors import active_saved_tensor_hooks

_GLOBAL_HOOKS = [getattr(nn.modules.module, f"_global{name}") for name in HOOK_DICTS]


class NotCapturable(Exception):  # noqa: N818 - the user has made no error
    """Raised if a call cannot be captured. The message is the reason in the report."""


def refuse_process() -> None:
    """Raise `NotCapturable` if a mode or a global hook of PyTorch has to see each operation or module."""
    if active_saved_tensor_hooks() is not None:
        raise NotCapturable("hooks decide about the tensors that autograd saves")
    if torch.is_inference_mode_enabled() or torch.is_anomaly_enabled() or torch._C._len_torch_function_stack():
        raise NotCapturable("a mode of PyTorch is on (inference, anomaly detection or a function mode)")
    if any(_GLOBAL_HOOKS):
        raise NotCapturable("a hook is registered for all modules")


def refuse_hooks(backbone: nn.Module, before: list[nn.Module]) -> None:
    """Raise `NotCapturable` if a hook or a forward of its own is attached to a module in the capture.

    `before` are the modules that run before each replay, outside of the capture. transformers' own hooks are allowed:
    they collect outputs, and do nothing unless a call asks for outputs. A forward that is not ours is refused, because
    it may be accelerate's, which calls accelerate's hooks.
    """
    outside = set(map(id, before))
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
