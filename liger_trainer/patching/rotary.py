"""Rotary functions, which are globals of modeling modules, replaced for the attentions of one model only.

A patched attention runs its own code, with globals in which the name of the rotary function leads to ours
(`forward_with_globals`). Ours checks each call, and hands those of shapes for which nothing was proven to the original
function.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from liger_trainer.instance.binding import Binding, bind, is_aside
from liger_trainer.instance.hooks import hook_on, step_aside
from liger_trainer.instance.report import LigerReport, Place
from liger_trainer.patching import probe
from liger_trainer.patching.rebuild import forward_rebuilding
from liger_trainer.patching.rotary_proof import Proof, Signature, layouts_of, makes_angles, prove, size_of
from liger_triton import rope
from liger_triton.rope import misfit

Embedding = tuple[nn.Module, Callable]  # a module that makes cos and sin, and the forward that its class had
Plan = tuple[Proof, frozenset[int] | None]  # a proof, and the widths of cos for which it holds (None: all)


class RotaryBinding(Binding):
    """What is bound to an attention.

    Attributes:
        functions (`list`): The rotary functions that its forward would call.
        embeddings (`list`): The modules that make its angles, each with the forward that its class had.
    """

    def __init__(
        self, function: Callable, slot: str, place: Place, functions: list[Callable], embeddings: list[Embedding]
    ):
        super().__init__(function, slot, place)
        self.functions, self.embeddings = functions, embeddings


def rotary_names(forward: Callable) -> list[str]:
    """The globals that a forward calls by a name like `apply_rotary_pos_emb`."""
    code, scope = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    names = [] if code is None else [n for n in code.co_names if "apply" in n and "rot" in n]
    return [n for n in names if callable(scope.get(n)) and not inspect.isclass(scope[n])]


def swap(model: nn.Module, report: LigerReport, wanted: dict[str, bool | float]) -> None:
    """Bind a forward that sees our rotary functions to every attention of `model` whose functions are proven.

    `wanted` is the checked config.
    """
    if not wanted["rope"]:
        return
    operation = report["rope"]
    proofs: dict[Callable, tuple[tuple[Proof, ...] | None, str | None]] = {}
    layouts: dict[str, frozenset[tuple[int, str]]] = {}
    makers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if makes_angles(module):
            layouts[name], makers[name] = layouts_of(module), module
    for name, module in model.named_modules():
        decorated = type(module).forward
        own = inspect.unwrap(decorated)
        names = rotary_names(own)
        if not names:
            continue
        slot, reason = probe.slot_of(module)
        if own is not decorated and not _is_without_grad(decorated):
            reason = "its forward is decorated"
        if reason is not None:
            operation.skipped[name] = reason
            continue
        nearest = _nearest_embeddings(name, layouts)
        seen = frozenset().union(*(layouts[other] for other in nearest))
        embeddings = [(makers[other], type(makers[other]).forward) for other in nearest]
        functions = [own.__globals__[rotary_name] for rotary_name in names]
        replaced, geometries, reasons = [], [], []
        for rotary_name, function in zip(names, functions, strict=True):
            if function not in proofs:
                proofs[function] = probe.attempt(prove, function)
            proven, reason = proofs[function]
            plans = _plans(proven or (), seen)
            if reason is None and not plans:
                reason = f"{rotary_name} reads each angle of cos twice, and nothing was seen to make cos that way"
                if {width for width, _ in seen} == {0}:
                    reason = f"{rotary_name} has nothing to turn: a rotary width of 0"
            if reason is None:
                reason = _why_not_now([function], embeddings)
            if reason is None:
                replaced.append((rotary_name, replacement(function, Signature.of(function), plans)))
                geometries += [str(proof.geometry) for proof, _ in plans]
            else:
                reasons.append(reason)
        if reasons:
            operation.skipped[name] = "; ".join(reasons)
        else:
            forward = forward_rebuilding(forward_with_globals(own, tuple(replaced)))
            forward = _asking_before_each_call(forward if own is decorated else _without_grad(forward))
            bind(module, RotaryBinding(forward, slot, Place(operation, name), functions, embeddings))
            operation.swapped[name] = f"{', '.join(names)}: {' | '.join(dict.fromkeys(geometries))}"


def _is_without_grad(forward: Callable) -> bool:
    """Whether a forward is a function under `@torch.no_grad()` and no other decorator, as in the indexer of DeepSeek
    V3.2, which chooses tokens and is not trained."""
    inner = getattr(forward, "__wrapped__", None)
    contexts = [cell.cell_contents for cell in getattr(forward, "__closure__", None) or ()]
    contexts = [getattr(context, "__self__", None) for context in contexts]
    return not hasattr(inner, "__wrapped__") and any(type(context) is torch.no_grad for context in contexts)


@functools.cache
def _without_grad(forward: Callable) -> Callable:
    return torch.no_grad()(forward)


def _nearest_embeddings(name: str, layouts: dict[str, frozenset[tuple[int, str]]]) -> list[str]:
    """The names of the rotary embeddings that make the angles for the module `name`.

    These are the children of the module's nearest ancestor that has any. Those of a sibling are not among them: the
    rotary embedding of a text model says nothing about a vision tower that makes its own cos.
    """
    parts = name.split(".") if name else []
    for depth in range(len(parts), -1, -1):
        near = [other for other in layouts if other.split(".")[:-1] == parts[:depth]]
        if near:
            return near
    return []


def _why_not_now(functions: Iterable[Callable], embeddings: Iterable[Embedding]) -> str | None:
    """Why our rotary functions may not take the place of `functions` now, or None.

    A hook on a module that makes cos and sin may change them, and ours reads only half of their numbers. With the
    library `kernels` a rotary function is a module. It may have a hook too, which ours would not call.
    """
    for module, proven_forward in embeddings:
        if type(module).forward is not proven_forward:
            return f"the forward of {type(module).__name__}, which makes the angles, has been replaced"
        if (attached := hook_on(module)) is not None:
            return f"{attached} on {type(module).__name__} may change the angles"
    for function in functions:
        if isinstance(function, nn.Module) and (attached := hook_on(function)) is not None:
            return f"{attached} on {type(function).__name__} would not be called"
    return None


@functools.cache
def _asking_before_each_call(forward: Callable) -> Callable:
    """The method `forward`, which hands its calls to the class's own as soon as `_why_not_now` has a reason."""

    @functools.wraps(forward)
    def call(self, *args, **kwargs):
        if is_aside(self):
            return type(self).forward(self, *args, **kwargs)
        binding = RotaryBinding.of(self)
        if (reason := _why_not_now(binding.functions, binding.embeddings)) is not None:
            step_aside(self, reason)
            return type(self).forward(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return call


def _plans(proven: tuple[Proof, ...], seen: frozenset[tuple[int, str]]) -> tuple[Plan, ...]:
    """The proofs that hold for the angles of a module, whose (width of cos, layout) are `seen`."""
    plans: list[Plan] = []
    for proof in proven:
        if proof.layout is None:
            plans.append((proof, None))
            continue
        widths = {width for width, layout in seen if layout == proof.layout and (width, "other") not in seen}
        if widths:
            plans.append((proof, frozenset(widths)))
    return tuple(plans)


@functools.cache
def replacement(function: Callable, signature: Signature, plans: tuple[Plan, ...]) -> Callable:
    """A function with the signature of `function` that calls our kernel where a plan fits the call, else `function`."""
    table = {}
    for proof, widths in plans:
        q_dims, cos_dims, heads_dim = proof.call
        key = (q_dims, cos_dims, heads_dim if signature.unsqueeze_dim is not None else None, proof.size)
        table[key] = (heads_dim, widths, proof.geometry.sign, proof.geometry.arguments())
    names, turned_names, single = signature.names, signature.turned, len(signature.turned) == 1
    proven_names = (*turned_names, signature.cos, signature.sin, "unsqueeze_dim")

    def apply_rotary(*args, **kwargs):
        given = dict(zip(names, args))  # noqa: B905 - parameters at the end have defaults
        given.update(kwargs)
        q = given.get(turned_names[0])
        k = q if single else given.get(turned_names[1])
        sin = given.get(signature.sin)
        cos = sin if signature.cos is None else given.get(signature.cos)
        if q is None or k is None or cos is None or sin is None:
            return function(*args, **kwargs)
        for name in given:
            if name not in proven_names and given[name] is not None:  # nothing was proven of what this argument means
                return function(*args, **kwargs)
        if signature.cos is None:
            cos, sin = cos.real, sin.imag
        unsqueeze_dim = None if signature.unsqueeze_dim is None else given.get("unsqueeze_dim", signature.unsqueeze_dim)
        row = table.get((q.ndim, cos.ndim, unsqueeze_dim, size_of(q.shape[-1], cos.shape[-1])))
        if row is None:
            return function(*args, **kwargs)
        heads_dim, widths, sign, arguments = row
        if widths is not None and cos.shape[-1] not in widths:  # the proof does not hold for this cos
            return function(*args, **kwargs)
        if misfit(q, k, cos, sin, arguments["cos_layout"], heads_dim) is not None:  # the kernel does not take these
            return function(*args, **kwargs)
        sin = sin if sign > 0 else -sin
        q, k = rope(q, None if single else k, cos, sin, unsqueeze_dim=heads_dim, **arguments)
        return q if single else (q, k)

    return apply_rotary


_forwards: dict[tuple, tuple[Callable, list[Any]]] = {}


def forward_with_globals(own: types.FunctionType, replaced: tuple[tuple[str, Callable], ...]) -> Callable:
    """The function `own` with its code unchanged and a dict of globals of its own: those it names, some replaced.

    The globals are those of this moment. A dict that looked further, into the globals of the modeling module, would
    follow later changes there. But torch.compile guards on the keys of this dict, and on that module if the dict has a
    `__name__`.
    """
    scope, replacements = own.__globals__, dict(replaced)
    names = [name for name in _global_names(own.__code__) if name in scope]
    key = (own, replaced, tuple((name, id(scope[name])) for name in names))
    if key not in _forwards:
        own_globals = {name: replacements.get(name, scope[name]) for name in names}
        own_globals["__builtins__"] = scope["__builtins__"]
        own_globals["__package__"] = scope.get("__package__")  # for an import inside the function
        function = types.FunctionType(own.__code__, own_globals, own.__name__, own.__defaults__, own.__closure__)
        function.__kwdefaults__, function.__annotations__ = own.__kwdefaults__, own.__annotations__
        function.__doc__, function.__module__, function.__qualname__ = own.__doc__, own.__module__, own.__qualname__
        # The globals are kept as well, so that no other object gets one of their ids, which are part of the key.
        _forwards[key] = (probe.named(function, own.__name__), [scope[name] for name in names])
    return _forwards[key][0]


def _global_names(code: types.CodeType) -> list[str]:
    """The globals that a function and the functions inside it name. Attributes are among them, which does no harm."""
    functions = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for inner in functions for name in _global_names(inner))]))
