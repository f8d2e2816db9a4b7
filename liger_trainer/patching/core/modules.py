"""The modules of a model in one sweep, and whether they lie on several devices.

PyTorch's `modules()` is a generator for each level, which takes some microseconds a module. An 8B model with adapters
has 2,665 modules.
"""

from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model`, each once, in the order of `nn.Module.modules`."""
    visited: dict[nn.Module, None] = {}
    stack = [model]
    while stack:
        module = stack.pop()
        if module is None or module in visited:
            continue
        visited[module] = None
        children = module.__dict__["_modules"]
        if children:
            stack.extend(reversed(children.values()))
    return list(visited)


def is_spread(model: nn.Module) -> bool:
    """Return whether accelerate has spread the layers of `model` over several devices (`device_map`)."""
    devices = getattr(model, "hf_device_map", None) or {}
    return len(set(devices.values())) > 1
