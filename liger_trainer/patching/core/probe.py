"""Running a module and its replacement side by side, on clones with small random parameters on the CPU.

A proof is about the formula of the module and needs neither its weights nor its device, so it works for models that are
on `meta`, sharded or quantised. The tests of `liger_triton` show that a kernel computes the same as its CPU twin.
"""

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from liger_trainer.patching.core.binding import Binding

SEED = 20240817
SLOTS = ("forward", "_old_forward", "_apply_gate")  # where methods are bound
FP32_RTOL = 2e-5  # a few roundings of fp32 in another order; a wrong formula is off by 1e-4 and more


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Return a context for a few numbers on the CPU.

    Waking threads takes longer, 14 times where other work has the cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Return a context for proofs: on the CPU, with gradients, without autocast.

    It leaves the global random state alone.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_thread())
        stack.enter_context(torch.random.fork_rng(devices=[]))  # a module with dropout draws from the global generator
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.get_default_device().type != "cpu":  # the context calls Python in every function of torch
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        yield


def generator() -> torch.Generator:
    """Return a source of random numbers that gives the same ones in every proof."""
    return torch.Generator("cpu").manual_seed(SEED)


def randn(shape: Sequence[int], source: torch.Generator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers on the CPU, drawn in fp32 whatever `dtype` is."""
    return torch.randn(shape, generator=source, dtype=torch.float32, device="cpu").to(dtype)


def _rand(shape: Sequence[int], source: torch.Generator) -> torch.Tensor:
    """Uniform numbers on the CPU in fp32, whatever the default dtype is."""
    return torch.rand(shape, generator=source, dtype=torch.float32, device="cpu")


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a whole parameter, also where it is sharded."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 leaves an empty parameter


def clone(
    module: nn.Module,
    source: torch.Generator,
    parameters: bool = True,
    children: dict[str, nn.Module] | None = None,
) -> nn.Module:
    """A module of the same class and attributes, with fresh random parameters and buffers on the CPU and no hooks.

    With `parameters=False` it has neither, so that reading one raises. `children` replace its own of these names.
    """
    copy = object.__new__(type(module))
    state = dict(module.__dict__)
    for name, value in state.items():
        if name.endswith("_hooks") or name.startswith(("_forward_hooks_", "_forward_pre_hooks_")):
            state[name] = OrderedDict() if isinstance(value, dict) else value
    for slot in (*SLOTS, "_hf_hook", Binding.key):
        state.pop(slot, None)
    copy.__dict__.update(state)
    children = children or {}
    copy.__dict__["_parameters"] = {
        name: None if p is None else nn.Parameter(1 + 0.5 * randn(full_shape(p), source))
        for name, p in module._parameters.items()
        if parameters
    }
    copy.__dict__["_buffers"] = {
        name: None if b is None else (0.5 + _rand(tuple(b.shape), source))
        for name, b in module._buffers.items()
        if parameters
    }
    copy.__dict__["_modules"] = {
        name: children[name] if name in children else (None if child is None else clone(child, source, parameters))
        for name, child in module._modules.items()
    }
    return copy


def set_training(module: nn.Module, training: bool) -> None:
    """Set the mode of a clone and its children, without `train()`, which a class may have overridden."""
    for child in module.modules():
        child.__dict__["training"] = training


def inputs_of(forward: Callable) -> list[str] | None:
    """Names of the positional inputs of an unbound `forward` after `self`; None if it takes `*args` or `**kwargs`."""
    names = []
    for parameter in list(inspect.signature(forward).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return None
        names.append(parameter.name)
    return names


def allclose_to_max(got: torch.Tensor, want: torch.Tensor, rtol: float, by_row: bool = False) -> bool:
    """Return whether shapes and dtypes are equal, and no element differs by more than `rtol` times the largest one.

    That is the largest of all elements or, with `by_row`, of the row. A NaN in either tensor counts as a difference.
    """
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        return False
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    got, want = got.detach().double(), want.detach().double()
    scale = want.abs().amax(-1, keepdim=True) if by_row and want.ndim else want.abs().max()
    return bool(((got - want).abs() <= rtol * scale).all())


def trained(
    forward: Callable, module: nn.Module, widths: tuple[int, int], source: torch.Generator, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return the result of `forward` for random rows, and the gradients of these and of the parameters that learn."""
    x = randn((2, 5, widths[0]), source, dtype).requires_grad_()
    torch.default_generator.manual_seed(SEED)  # of a dropout; `torch.manual_seed` would seed the GPUs as well
    y = forward(module, x)
    leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
    dy = randn((2, 5, widths[1]), source, dtype)
    return [y, *torch.autograd.grad(y, leaves, dy, materialize_grads=True)]


def changed_share(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the share of the elements that are not equal bit for bit, or 1.0 if shape or dtype differ."""
    if not isinstance(want, torch.Tensor) or got.shape != want.shape or got.dtype != want.dtype:
        return 1.0
    return float((got != want).float().mean())
