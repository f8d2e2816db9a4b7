"""Rotary functions, which are globals of modeling modules, replaced for the attentions of one model only.

A patched attention runs its own code with globals of its own, where the name of the rotary function leads to ours
(`forward_with_globals`). Ours hands calls of unproven shapes to the original function.
"""

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from liger_trainer.memory.rebuild import forward_rebuilding
from liger_trainer.patching.core import guards
from liger_trainer.patching.core.binding import Binding, WeakModuleRef, own_class
from liger_trainer.patching.core.guards import Guards, NotProven, code_guards_of, global_lookups, key_of, lookups_of
from liger_trainer.patching.core.hooks import comes_from, home, hook_on
from liger_trainer.patching.core.own_globals import decorated_like, forward_with_globals, is_decorated_by
from liger_trainer.patching.core.pattern import PatchMatch, attempt, slot_of
from liger_trainer.patching.rotary_proof import Rotation, Signature, layouts_of, makes_angles, prove
from liger_triton.rope import misfit, rope_unchecked

OPERATION = "rope"
ProvenForWidths = tuple[Rotation, frozenset[int] | None]  # a proof, and the widths of cos that it holds for (None: all)


class RotaryGuards(Guards):
    """The guards of an attention, and of the modules that make its angles.

    Attributes:
        parent (`WeakModuleRef`): The parent of what makes its angles.
        parts (`list`): (name in `parent`, module, guards) of what makes the angles, and with an empty name, of what
            turns by them. A hook on one may change the angles, and ours reads only half of the numbers.
    """

    def __init__(self, cls: type, lookups: Iterable[guards.Lookup], parent: nn.Module, parts: list):
        super().__init__(cls, lookups)
        self.parent = WeakModuleRef(parent)
        self.parts = [(name, part, code_guards_of(own_class(part))) for name, part in parts]

    def __deepcopy__(self, memo: dict[int, Any]) -> "RotaryGuards":
        """Guard the modules of the copy."""
        twin = copy.copy(self)
        twin.parent = copy.deepcopy(self.parent, memo)
        twin.parts = copy.deepcopy(self.parts, memo)
        return twin

    def all_lookups(self) -> Iterator[guards.Lookup]:
        yield from super().all_lookups()
        for _, _, its_guards in self.parts:
            yield from its_guards.all_lookups()

    def broken(self, module: nn.Module, label: str = "it") -> str | None:
        reason = super().broken(module, label)
        for name, part, its_guards in self.parts:
            parent = self.parent.to()
            part_class = type(part).__name__
            if name and (parent is None or parent._modules.get(name) is not part):
                return f"{name}, which makes the angles, is not the {part_class} any more that it was"
            if reason is None:
                reason = its_guards.broken(part, part_class)
            if reason is None:
                attached = hook_on(part)
                reason = attached and f"{attached} on {part_class} may change the angles"
        return reason


def rotary_names(forward: Callable) -> list[str]:
    """Return the globals that a forward calls by a name like `apply_rotary_pos_emb`."""
    code, scope = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    names = [] if code is None else [n for n in code.co_names if "apply" in n and "rot" in n]
    return [n for n in names if callable(scope.get(n)) and not inspect.isclass(scope[n])]


def find_attentions(model: nn.Module) -> Iterator[PatchMatch]:
    """Find the attentions of `model`, each with a forward that sees our rotary functions where they are proven."""
    modules = dict(model.named_modules())
    layouts = {name: layouts_of(module) for name, module in modules.items() if makes_angles(module)}
    prove_once = functools.cache(_proven)
    for name, module in modules.items():
        if rotary_names(inspect.unwrap(type(module).forward)):
            makers = _nearest_embeddings(name, layouts)
            seen = frozenset().union(*(layouts[maker] for maker in makers))
            above = makers[0].count(".") if makers else name.count(".") + 1  # the parts of the makers' parent's name
            parts = name.split(".")
            way = [modules[".".join(parts[:depth])] for depth in range(above, len(parts) + 1)]
            try:
                binding, text = _binding_of(way, [maker.split(".")[-1] for maker in makers], seen, prove_once)
            except NotProven as error:
                yield PatchMatch(OPERATION, name, module, str(error))
            else:
                yield PatchMatch(OPERATION, name, module, text, binding)


def _binding_of(
    way: list[nn.Module], makers: list[str], seen: frozenset[tuple[int, str]], prove_once: Callable
) -> tuple[Binding, str]:
    """Make the binding of an attention, and say what it computes. Raises `NotProven` where it keeps its own code.

    Args:
        way (`list`): The modules from the parent of what makes the angles down to the attention, each inside the last.
        makers (`list`): The names of the children of that parent that make the angles.
        seen (`frozenset`): What was seen of these: (width of cos, its layout).
        prove_once (`Callable`): `prove` of a rotary function, or an earlier result of it.
    """
    module = way[-1]
    decorated = type(module).forward
    own = inspect.unwrap(decorated)
    slot, reason = slot_of(module)
    if not is_decorated_by(decorated, _is_known):
        reason = "its forward is decorated"
    parts = [(name, way[0]._modules[name]) for name in makers]
    for cls in map(own_class, (*way, *(maker for _, maker in parts))):
        if reason is None and not comes_from(cls.forward, guards.KNOWN):
            reason = f"the forward of {cls.__module__}.{cls.__qualname__} may change the angles"
    if reason is not None:
        raise NotProven(reason)
    names, scope = rotary_names(own), own.__globals__
    lookups = [*global_lookups(own), *code_guards_of(*map(own_class, way)).lookups]
    turned_by, texts = {}, []
    for name in names:
        function = scope[name]
        proven, reason = prove_once(function)
        plans = _plans(proven or (), seen)
        if reason is None and not plans:
            reason = f"{name} reads each angle of cos twice, and nothing was seen to make cos that way"
            if {width for width, _ in seen} == {0}:
                reason = f"{name} has nothing to turn: a rotary width of 0"
        if reason is not None:
            raise NotProven(reason)
        lookups += lookups_of(function)
        turned_by[name] = replacement(function, Signature.of(function), plans)
        texts += [str(proof.geometry) for proof, _ in plans]
    forward = forward_rebuilding(forward_with_globals(own, tuple(turned_by.items())))
    forward = decorated_like(decorated, forward)
    parts += [("", scope[name]) for name in names if isinstance(scope[name], nn.Module)]
    of_attention = RotaryGuards(own_class(module), lookups, way[0], parts)
    reason = of_attention.broken(module)
    if reason is not None:
        raise NotProven(reason)
    return Binding(forward, slot, guards=of_attention), f"{', '.join(names)}: {' | '.join(dict.fromkeys(texts))}"


def _proven(function: Callable) -> tuple[Any, str | None]:
    """Prove a rotary function, in a process once for each state of code that is known."""
    try:
        key = key_of(function) if isinstance(function, types.FunctionType) else None
    except (NotProven, TypeError):
        key = None
    return attempt(prove, function) if key is None else _proven_at(function, key)


@functools.lru_cache(maxsize=64)
def _proven_at(function: Callable, key: tuple) -> tuple[Any, str | None]:
    return attempt(prove, function)


def _is_known(decorated: Any, cells: list) -> bool:
    """Return whether the decorator is `@torch.no_grad()` or transformers' `@deprecate_kwarg`."""
    without_grad = any(type(getattr(cell, "__self__", None)) is torch.no_grad for cell in cells)
    room = home(decorated)
    return room == "transformers.utils.deprecation" or (room == "torch.utils._contextlib" and without_grad)


def _nearest_embeddings(name: str, layouts: dict[str, frozenset[tuple[int, str]]]) -> list[str]:
    """The names of the rotary embeddings that make the angles for the module `name`: children of its nearest ancestor.

    The rotary embedding of a sibling says nothing about it: a text model's does not turn a vision tower.
    """
    parts = name.split(".") if name else []
    for depth in range(len(parts), -1, -1):
        near = [other for other in layouts if other.split(".")[:-1] == parts[:depth]]
        if near:
            return near
    return []


def _plans(proven: tuple[Rotation, ...], seen: frozenset[tuple[int, str]]) -> tuple[ProvenForWidths, ...]:
    """Return the proofs that hold for the angles of a module. `seen` has their (width of cos, layout)."""
    plans: list[ProvenForWidths] = []
    for proof in proven:
        if proof.layout is None:
            plans.append((proof, None))
            continue
        widths = {width for width, layout in seen if layout == proof.layout and (width, "other") not in seen}
        if widths:
            plans.append((proof, frozenset(widths)))
    return tuple(plans)


def size_of(head_size: int, angles: int) -> str | None:
    """Return the key of `HEAD_SIZES` for a head size and the numbers in a row of cos.

    None where the head is too small.
    """
    if head_size <= angles:
        return "equal" if head_size == angles else None
    if head_size <= 2 * angles:
        return "double" if head_size == 2 * angles else "between"
    return "over"


@functools.cache
def replacement(function: Callable, signature: Signature, plans: tuple[ProvenForWidths, ...]) -> Callable:
    """Make a function like `function` that calls our kernel where a plan fits the call, else `function`."""
    table = {}
    for proof, widths in plans:
        q_dims, cos_dims, heads_dim = proof.call
        key = (q_dims, cos_dims, heads_dim if signature.unsqueeze_dim is not None else None, proof.size)
        table[key] = (heads_dim, widths, proof.geometry.sign, proof.geometry.arguments())
    names = signature.names
    turned_names = signature.turned
    single = len(signature.turned) == 1
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
        q, k = rope_unchecked(q, None if single else k, cos, sin, unsqueeze_dim=heads_dim, **arguments)
        return q if single else (q, k)

    return apply_rotary
