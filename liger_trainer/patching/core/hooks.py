"""Hooks of others on modules that our code does not call, or calls in another way than the model does.

Our code leaves out some children, such as the activation of an MLP, and calls the fused LM head for a loss. A hook
there would miss what the model's own code shows it, so that code runs instead. Hooks of FSDP2 and DeepSpeed
that gather weights do not count: our code calls the modules that own weights, so they run.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from liger_trainer.patching.core.binding import Binding, is_bound

HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = [getattr(nn.modules.module, f"_global{attribute}") for attribute in HOOK_DICTS]
# Hooks from Python modules with these prefixes run in our calls too, or have nothing to see there.
_HOOKS_THAT_MISS_NOTHING = (
    "torch.distributed.",
    "deepspeed.",
    "accelerate.",
    "liger_trainer.",
    "trl.models.activation_offloading",
)

_OF_LIBRARIES = ("torch.", "transformers.", "peft.", "trl.")  # which read no logits of a whole model


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of `module` runs hooks around its forward, in the forward or in the backward pass."""
    return any(map(module.__dict__.get, HOOK_DICTS)) or any(_GLOBAL_HOOKS)


def with_hooks(modules: list[nn.Module]) -> list[nn.Module]:
    """Return the modules with hooks, as `has_hooks` does for one of them."""
    if any(_GLOBAL_HOOKS):
        return modules
    found = []
    for module in modules:
        if any(map(module.__dict__.get, HOOK_DICTS)):
            found.append(module)
    return found


def hook_on(module: nn.Module, ours: Binding | None = None, allowed: tuple[str, ...] = ()) -> str | None:
    """Describe what was attached to `module` that the model's own code would run: a hook, or a forward; None without.

    These do not count: hooks that gather sharded weights, `ours`, and code from Python modules with a prefix in
    `allowed`. A description is, for example, `"a forward hook (count_calls)"`.
    """
    found = module.__dict__.get("forward")
    is_as_bound = found is None or (ours is not None and found is ours and ours.previous is None)
    if is_as_bound and not has_hooks(module):  # as nearly always; this is asked in every call
        return None
    not_counted = (*_HOOKS_THAT_MISS_NOTHING, *allowed)
    forward = ours.previous if ours is not None and is_bound(module, ours) else module.__dict__.get("forward")
    replaced = replaced_forward(module, forward, allowed)
    if replaced is not None:
        return replaced
    for attribute, global_hooks in zip(HOOK_DICTS, _GLOBAL_HOOKS, strict=True):
        for hook in (*getattr(module, attribute).values(), *global_hooks.values()):
            if _counts(hook, not_counted):
                return f"a {attribute.strip('_').removesuffix('s').replace('_', ' ')} ({_name(_function(hook))})"
    return None


def replaced_forward(module: nn.Module, forward: Any, allowed: tuple[str, ...] = ()) -> str | None:
    """Describe `forward`, which `module` has in place of its class's own one; None where it is the module's code."""
    if forward is None:
        return None
    function = _function(forward)
    not_counted = (*_HOOKS_THAT_MISS_NOTHING, *allowed)
    if function is type(module).forward or home(function).startswith(not_counted):
        return None
    return f"a forward of its own ({_name(function)})"


def output_seen_by(module: nn.Module, ours: Binding | None) -> str | None:
    """Describe a hook, or a forward around `ours`, which gets what `module` returns; None without."""
    forward = module.__dict__.get("forward")
    if forward is not None and (ours is None or not is_bound(module, ours)):
        replaced = replaced_forward(module, forward, _OF_LIBRARIES)
        if replaced is not None:
            return replaced
    for hook in module._forward_hooks.values():
        if _counts(hook, (*_HOOKS_THAT_MISS_NOTHING, *_OF_LIBRARIES)):
            return f"a forward hook ({_name(_function(hook))})"
    return None


def as_of_a_user(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a hook of this package, so that it counts as one of a user: no operation leaves out what it would see."""
    hook.counts_as_of_a_user = True  # type: ignore[attr-defined]
    return hook


def name_of_unknown(hook: Callable[..., Any], known: tuple[str, ...]) -> str | None:
    """Return the name of a hook that is in no Python module with a prefix in `known`; None for others."""
    return _name(_function(hook)) if _counts(hook, known) else None


def _counts(hook: Any, not_counted: tuple[str, ...]) -> bool:
    function = _function(hook)
    return getattr(function, "counts_as_of_a_user", False) or not home(function).startswith(not_counted)


def _function(hook: Any) -> Any:
    """Unwrap a bound method, a partial or `torch.compiler.disable`, which DeepSpeed puts around its hooks."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    inside = getattr(function, "_torchdynamo_orig_callable", None)  # `functools.wraps` copies it to other functions
    return inside if inside is not None and home(function).startswith("torch._dynamo.") else function


def home(function: Any) -> str:
    """Name the Python module that holds the code of `function`. Decorators copy `__module__`, so it may be wrong."""
    scope = getattr(function, "__globals__", None)
    return str(type(function).__module__ if scope is None else scope.get("__name__", ""))


def comes_from(function: Any, rooms: str | tuple[str, ...]) -> bool:
    """Return whether a function, and all that it wraps, stands in Python modules with one of these prefixes."""
    inner = getattr(function, "__wrapped__", None)
    return home(function).startswith(rooms) and (inner is None or comes_from(inner, rooms))


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
