"""Patterns of modules that are swapped: a module is recognised, and proven once for its fingerprint."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn.utils.parametrize import is_parametrized

from liger_trainer.patching.core import probe
from liger_trainer.patching.core.binding import Binding
from liger_trainer.patching.core.guards import Guards, NotProven, guards_of

PLAIN_TENSORS = (nn.Parameter, torch.Tensor, FakeTensor)  # no DTensor, nothing quantised; fake while memory is counted
_MODULE_STATE = {*nn.Module().__dict__}
_OWN_NAME = "target_name"  # PEFT's layers keep their own name under this key, which no other layer has


class Proof(NamedTuple):
    """The formula that a module was proven to compute.

    Attributes:
        operation (`str`): A key of the report, or empty for what it does not list.
        variant: The formula. Its `str()` is what the report names.
        forward: The method that was shown to compute it, and is bound.
    """

    operation: str
    variant: Any
    forward: Callable


class PatchPattern(NamedTuple):
    """The way to recognise and prove modules of one sort.

    Attributes:
        is_candidate: Tells whether a module looks like one of this pattern.
        prove: Returns (`Proof`, None), or (None, the reason why we have no kernel for the module).
        guessed_operation: Names the operation under which a module is reported that could not be proven.
        why_not: Tells why a module with a proven formula still has to keep its own code, or returns None.
        guards: Makes the guards of a proof of the module, or raises `NotProven`.
        binding: Makes what is bound of a function, a slot and guards.
        method (`str`): The method that is replaced.
        is_rare (`bool`): Whether most models have no such module, so that one that is not proven was not recognised.
    """

    is_candidate: Callable[[nn.Module], bool]
    prove: Callable[[nn.Module], tuple[Proof | None, str | None]]
    guessed_operation: Callable[[nn.Module], str]
    why_not: Callable[[nn.Module], str | None] = lambda module: None
    guards: Callable[[nn.Module], Guards] = guards_of
    binding: Callable[..., Binding] = Binding
    method: str = "forward"
    is_rare: bool = False


class PatchMatch(NamedTuple):
    """A module that was recognised.

    Attributes:
        operation (`str`): A key of the report, or empty for what it does not list.
        name (`str`): The name of the module in the model.
        module (`nn.Module`): The module.
        text (`str`): The variant that it was proven to compute, or why it keeps its own code.
        binding (`Binding`, *optional*): What is to be bound. Unset: it keeps its own code.
        is_rare (`bool`): See `PatchPattern`.
    """

    operation: str
    name: str
    module: nn.Module
    text: str
    binding: Binding | None = None
    is_rare: bool = False


def match_modules(patterns: Iterable[PatchPattern], modules: Iterable[tuple[str, nn.Module]]) -> Iterator[PatchMatch]:
    """Recognise and prove modules of `patterns` among the named `modules`. Equal fingerprints share one proof."""
    proofs: dict[tuple, tuple[Proof | None, Guards | None, str | None]] = {}
    for name, module in modules:
        for pattern in patterns:
            if not pattern.is_candidate(module):
                continue
            proof = guards = None
            slot, reason = slot_of(module, pattern.method, around=pattern.binding is not Binding)
            if reason is None:
                key = (pattern, fingerprint(module))  # a model has the same norm in each layer
                if key not in proofs:
                    proofs[key] = prove_module(pattern, module)
                proof, guards, reason = proofs[key]
            # The proof may be of another module with this fingerprint, so the guards are asked about this one.
            if guards is not None and reason is None:
                reason = guards.broken(module) or pattern.why_not(module)
            if proof is None or reason is not None:
                operation = pattern.guessed_operation(module) if proof is None else proof.operation
                yield PatchMatch(operation, name, module, str(reason), None, pattern.is_rare)
            else:
                yield PatchMatch(
                    proof.operation,
                    name,
                    module,
                    str(proof.variant),
                    pattern.binding(proof.forward, slot, guards=guards),
                )


def prove_module(pattern: PatchPattern, module: nn.Module) -> tuple[Proof | None, Guards | None, str | None]:
    """Return (the proof, its guards, None), or (None, None, why it cannot be proven)."""
    if any(is_parametrized(part) for part in module.modules()):
        return None, None, "it has a parametrisation, which may count how often a weight is read"
    try:
        guards = pattern.guards(module)
    except NotProven as error:
        return None, None, str(error)
    proof, reason = attempt(pattern.prove, module)
    return proof, guards, reason


def attempt(prove: Callable[[Any], tuple[Any, str | None]], subject: Any) -> tuple[Any, str | None]:
    """Return `prove(subject)`, or (None, a reason that names the error) if the code of `subject` raises one."""
    try:
        return prove(subject)
    except Exception as error:  # noqa: BLE001 - whatever it is, the module keeps its own code and the report says why
        text = str(error).strip().split("\n")[0][:120]
        return None, f"it raised {type(error).__name__} on random inputs: {text}"


def slot_of(module: nn.Module, method: str = "forward", around: bool = False) -> tuple[str, str | None]:
    """Return (the attribute that is to hold our method, None), or (that attribute, why we cannot put a method there).

    accelerate's hooks (`device_map`) call `_old_forward`. A method that was put on the instance stays. With `around`,
    ours may stand around another one of ours.
    """
    hooked = method == "forward" and "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__
    slot = "_old_forward" if hooked else method
    present = module.__dict__.get(slot)  # unpickling leaves the class's own there
    own = getattr(present, "__func__", None) is getattr(type(module), method)
    if present is None or own or (around and isinstance(present, Binding)):
        return slot, None
    return slot, f"its {method} was replaced on the instance by {getattr(present, '__qualname__', present)!s}"


def fingerprint(module: nn.Module) -> tuple:
    """Class, shapes of the parameters, and attributes of a module and its children.

    Two modules with equal fingerprints compute the same formula.
    """
    left_out = {*_MODULE_STATE, *probe.SLOTS, Binding.key}
    own = sorted((name, value) for name, value in module.__dict__.items() if name not in left_out)
    return (
        type(module),
        tuple((name, None if p is None else probe.full_shape(p)) for name, p in module._parameters.items()),
        tuple((name, None if b is None else tuple(b.shape)) for name, b in module._buffers.items()),
        tuple((name, _comparable(value)) for name, value in own),
        tuple((name, None if child is None else fingerprint(child)) for name, child in module._modules.items()),
    )


def _comparable(value: Any) -> Any:
    """Something hashable that is equal for attributes that mean the same."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype) or inspect.isroutine(value):
        return value
    if isinstance(value, dict) and _OWN_NAME in value:
        value = {key: kept for key, kept in value.items() if key != _OWN_NAME}
    if isinstance(value, list | tuple | dict | set | frozenset) and len(value) < 64:
        return repr(value)
    return id(value)  # of a config, for example, which means the same only if it is the same object


def names_of(cls: type) -> tuple[str, str]:
    """Name a class of a library that need not be installed: (Python module, qualified name)."""
    return cls.__module__, cls.__qualname__
