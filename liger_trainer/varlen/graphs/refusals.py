"""Refuse to capture a call of a backbone because of hooks or modes of PyTorch."""

import torch
from torch import nn

from liger_trainer.patching.core.binding import Binding
from liger_trainer.patching.core.hooks import HOOK_DICTS, home
from liger_trainer.patching.core.saved_tensors import active_saved_tensor_hooks

_GLOBAL_HOOKS = [getattr(nn.modules.module, f"_global{name}") for name in HOOK_DICTS]


class NotCapturable(Exception):  # noqa: N818 - no error of the user's
    """Raised where a call cannot be captured; the message is the reason in the report."""


def refuse_process() -> None:
    """Raise `NotCapturable` where the process does more than run the model."""
    if active_saved_tensor_hooks() is not None:
        raise NotCapturable("hooks decide about the tensors that autograd saves")
    if torch.is_inference_mode_enabled() or torch.is_anomaly_enabled() or torch._C._len_torch_function_stack():
        raise NotCapturable("a mode of PyTorch is on (inference, anomaly detection or a function mode)")
    if any(_GLOBAL_HOOKS):
        raise NotCapturable("a hook is registered for all modules")


def refuse_hooks(backbone: nn.Module, before: list[nn.Module]) -> None:
    """Raise `NotCapturable` where Python code is attached to a module in the capture.

    `before` are the modules that run before each replay.

    transformers' hooks that collect outputs do nothing unless outputs are asked for. A forward that is not ours may be
    accelerate's, which calls its hooks.
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
