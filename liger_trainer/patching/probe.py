"""How a module is run beside its replacement: on clones with small random parameters on the CPU.

What is proven is the formula of the module, so neither its real weights nor its device are touched: a model on `meta`,
sharded by FSDP or ZeRO-3, or quantised is probed like any other. That a kernel computes what its CPU twin does is shown
by the tests of `liger_triton`.
"""

import contextlib
import inspect
from collections import OrderedDict

import torch
from torch import nn

from liger_trainer.instance.binding import KEY

SEED = 20240817
FP32_RTOL = 2e-5  # a few roundings of fp32 in another order; a wrong formula is off by 1e-4 and more


@contextlib.contextmanager
def isolated():
    """CPU, gradients on, no autocast, and the random state of the process as before on leaving."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))  # dropout of a probed module draws from the global one
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        yield


def generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(SEED)


def randn(shape, source: torch.Generator, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=source, dtype=torch.float32, device="cpu").to(dtype)


def full_shape(parameter) -> tuple[int, ...]:
    """The shape of a parameter that ZeRO-3 may have emptied (FSDP2 keeps the whole shape on the shard)."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def clone(module: nn.Module, source: torch.Generator, parameters=True, children=None) -> nn.Module:
    """A module of the same class and attributes, with fresh random parameters and buffers on the CPU and no hooks.

    `parameters=False` leaves them out: reading one then raises. `children` replaces children by name.
    """
    copy = object.__new__(type(module))
    state = dict(module.__dict__)
    for name, value in state.items():
        if name.endswith("_hooks") or name.startswith(("_forward_hooks_", "_forward_pre_hooks_")):
            state[name] = OrderedDict() if isinstance(value, dict) else value
    for slot in ("forward", "_old_forward", "_hf_hook", "_apply_gate", KEY):
        state.pop(slot, None)
    copy.__dict__.update(state)
    children = children or {}
    copy.__dict__["_parameters"] = {
        name: None if p is None else nn.Parameter(1 + 0.5 * randn(full_shape(p), source))
        for name, p in module._parameters.items()
        if parameters
    }
    copy.__dict__["_buffers"] = {
        name: None if b is None else (0.5 + torch.rand(tuple(b.shape), generator=source, device="cpu"))
        for name, b in module._buffers.items()
        if parameters
    }
    copy.__dict__["_modules"] = {
        name: children[name] if name in children else (None if child is None else clone(child, source, parameters))
        for name, child in module._modules.items()
    }
    return copy


def set_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    for child in module.modules():
        for name, p in child._parameters.items():
            if p is not None:
                child._parameters[name] = nn.Parameter(p.detach().to(dtype))


def set_training(module: nn.Module, training: bool) -> None:
    for child in module.modules():
        child.__dict__["training"] = training


def fingerprint(module: nn.Module) -> tuple:
    """Class, parameter shapes and every plain attribute of a module and its children: equal ones behave alike."""
    attributes = []
    for name, value in sorted(module.__dict__.items()):
        if name == "training" or name.startswith("_") and name.lstrip("_") in _MODULE_STATE:
            continue
        if name in ("forward", "_old_forward", "_apply_gate"):
            continue
        attributes.append((name, _plain(value)))
    return (
        type(module),
        tuple((name, None if p is None else full_shape(p)) for name, p in module._parameters.items()),
        tuple((name, None if b is None else tuple(b.shape)) for name, b in module._buffers.items()),
        tuple(attributes),
        tuple((name, None if child is None else fingerprint(child)) for name, child in module._modules.items()),
    )


_MODULE_STATE = {name.lstrip("_") for name in nn.Module().__dict__}


def _plain(value):
    if value is None or isinstance(value, bool | int | float | str | torch.dtype) or inspect.isroutine(value):
        return value
    if isinstance(value, list | tuple | dict | set | frozenset) and len(value) < 64:
        return repr(value)
    return id(value)  # a config, say: one object, one meaning


def inputs_of(forward) -> list[str] | None:
    """Names of the positional inputs of an unbound `forward` after `self`; None if it takes `*args` or `**kwargs`."""
    names = []
    for parameter in list(inspect.signature(forward).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return None
        names.append(parameter.name)
    return names


def attempt(prove, subject) -> tuple:
    """`prove(subject)`; where a stranger's code raises on the probe, no proof, and the error as the reason."""
    try:
        return prove(subject)
    except Exception as error:  # noqa: BLE001 - whatever it is, the module keeps its own code, and the report says why
        text = str(error).strip().split("\n")[0][:120]
        return None, f"it raised {type(error).__name__} on random inputs: {text}"


def same(got: torch.Tensor, want: torch.Tensor, rtol: float, by_row: bool = False) -> bool:
    """Equal shape and dtype, and no element further apart than rtol times the largest one (of its row, or of all)."""
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        return False
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    got, want = got.detach().double(), want.detach().double()
    scale = want.abs().amax(-1, keepdim=True) if by_row and want.ndim else want.abs().max()
    return bool(((got - want).abs() <= rtol * scale).all())  # False where either has a NaN


def changed_share(got: torch.Tensor, want: torch.Tensor) -> float:
    """Share of the elements that are not bit for bit equal; 1.0 if shape or dtype differ."""
    if not isinstance(want, torch.Tensor) or got.shape != want.shape or got.dtype != want.dtype:
        return 1.0
    return float((got != want).float().mean())


def slot_of(module: nn.Module) -> tuple[str | None, str | None]:
    """(attribute that holds the forward to swap, None), or (None, why it cannot be swapped).

    Under accelerate's hooks (`device_map`) that is `_old_forward`, which the hook calls. A bound method of the class
    itself, as unpickling leaves it, counts as none.
    """
    hooked = "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__
    slot = "_old_forward" if hooked else "forward"
    present = module.__dict__.get(slot)
    if present is None or getattr(present, "__func__", None) is type(module).forward:
        return slot, None
    return None, f"its forward was replaced on the instance by {getattr(present, '__qualname__', present)!s}"


def named(function, name: str):
    """`function` with the name of the class's method that it replaces: pickle stores no more than that."""
    function.__name__ = name
    return function
