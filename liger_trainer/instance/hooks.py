"""Hooks of others on modules that our code does not call, or calls in another way than the model does.

What is swapped leaves out modules (the activation of an MLP, say), and the fused LM head is called with a request
instead of logits to make. Whoever has a hook there would not see what the model's own code shows, so there the model's
own code runs. Hooks by which FSDP2 and DeepSpeed gather weights are no such hooks: they are ours to trigger.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn

from liger_trainer._logging import logger
from liger_trainer.instance.binding import KEY, Binding, binding_of, is_bound

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL = [getattr(nn.modules.module, f"_global{kind}") for kind in _KINDS]
_OURS_TO_TRIGGER = ("torch.distributed.", "deepspeed.", "accelerate.", "liger_trainer.")


def has_hooks(module: nn.Module) -> bool:
    """Whether anything runs when `module` is called beside its forward, or when its gradient is there."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or any(_GLOBAL)
    )


def hook_on(module: nn.Module, ours: Binding | None = None, allowed: str | None = None) -> str | None:
    """What somebody has attached to `module` that a call of its own forward would show, or None: a hook, a forward.

    Args:
        ours (`Binding`, *optional*): What we have bound to the module, which does not count.
        allowed (`str`, *optional*): A prefix of modules of Python whose forwards and hooks do not count.

    Returns:
        `str` or `None`: Such as `"a forward hook (count_calls)"`. Hooks that shard weights are left out.
    """
    if not has_hooks(module) and "forward" not in module.__dict__:  # nearly always: asked in every call
        return None
    known = _OURS_TO_TRIGGER if allowed is None else (*_OURS_TO_TRIGGER, allowed)
    bound = ours is not None and is_bound(module, ours)
    forward = ours.previous if bound else module.__dict__.get("forward")
    function = _function(forward)
    if forward is not None and function is not type(module).forward and not _is_from(function, known):
        return f"a forward of its own ({_name(function)})"
    for kind, everywhere in zip(_KINDS, _GLOBAL, strict=True):
        for hook in (*getattr(module, kind).values(), *everywhere.values()):
            if not _is_from(_function(hook), known):
                return f"a {kind.strip('_').removesuffix('s').replace('_', ' ')} ({_name(_function(hook))})"
    return None


def seen_by_others(module: nn.Module, left_out: tuple[tuple[str, type, Callable], ...]) -> str | None:
    """Why a forward that calls none of the children `left_out` would not do now, or None.

    `left_out`: name, class and the class's forward of each child, as they were when the replacement was proven.
    """
    for name, known, forward in left_out:
        child = module._modules.get(name)
        if type(child) is not known:
            return f"{name} is a {type(child).__name__} now; it was a {known.__name__}"
        if known.forward is not forward:
            return f"the forward of {known.__name__}, which {name} is, has been replaced"
        if (attached := hook_on(child)) is not None:
            return f"{attached} on {name} would not be called"
    return None


def step_aside(module: nn.Module, reason: str) -> None:
    """Have `module`, which is swapped, run its own code from now on; said in the log and in its report."""
    if torch.compiler.is_compiling():
        return
    binding = binding_of(module, KEY)
    binding.aside, place = True, binding.place
    if place is not None:
        place.kept(reason)
    logger.warning_once(f"{type(module).__name__} runs its own code instead of a fused kernel: {reason}.")


def _function(hook):
    """The function behind a bound method or a partial."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__func__", hook)


def _is_from(function, prefixes: tuple[str, ...]) -> bool:
    return str(getattr(function, "__module__", None)).startswith(prefixes)


def _name(function) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
