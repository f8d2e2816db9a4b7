"""Rotary functions: a global of the modeling module, replaced for the attentions of one model only.

A patched attention runs its own code with globals in which the name of the rotary function leads to ours
(`forward_with`). Each call is checked: what was not proven for its shapes goes to the original function.
"""

import functools
import inspect
import types

from torch import nn

from liger_trainer.instance.binding import KEY, bind, binding_of, is_aside
from liger_trainer.instance.hooks import hook_on, step_aside
from liger_trainer.instance.report import Place
from liger_trainer.patching import probe
from liger_trainer.patching.rebuild import forward_rebuilding
from liger_trainer.patching.rotary_proof import Proof, Signature, layouts_of, makes_angles, prove, size_of
from liger_triton import rope
from liger_triton.rope import misfit


def rotary_names(forward) -> list[str]:
    """Globals that a forward calls by a name like `apply_rotary_pos_emb`."""
    code, scope = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    names = [] if code is None else [n for n in code.co_names if "apply" in n and "rot" in n]
    return [n for n in names if callable(scope.get(n)) and not inspect.isclass(scope[n])]


def swap(model: nn.Module, report, wanted: dict) -> None:
    """Bind a forward that sees our rotary functions to every attention of `model` whose functions are proven."""
    if not wanted["rope"]:
        return
    part = report["rope"]
    proofs, layouts, makers = {}, {}, {}
    for name, module in model.named_modules():
        if makes_angles(module):
            layouts[name], makers[name] = layouts_of(module), module
    for name, module in model.named_modules():
        own = type(module).forward
        names = rotary_names(inspect.unwrap(own))
        if not names:
            continue
        slot, reason = probe.slot_of(module)
        if inspect.unwrap(own) is not own:
            reason = "its forward is decorated"
        if reason is not None:
            part.skipped[name] = reason
            continue
        near = _nearest(name, layouts)
        seen = frozenset().union(*(layouts[other] for other in near))
        watched = [(makers[other], type(makers[other]).forward) for other in near]
        functions = [own.__globals__[rotary_name] for rotary_name in names]
        replaced, texts, reasons = [], [], []
        for rotary_name in names:
            function = own.__globals__[rotary_name]
            if function not in proofs:
                proofs[function] = probe.attempt(prove, function)
            proven, reason = proofs[function]
            plans = _plans(proven or (), seen)
            if reason is None and not plans:
                reason = f"{rotary_name} reads each angle of cos twice, and nothing was seen to make cos that way"
                if {size for size, _ in seen} == {0}:
                    reason = f"{rotary_name} has nothing to turn: a rotary width of 0"
            if reason is None:
                reason = _seen_by_others([function], watched)
            if reason is None:
                replaced.append((rotary_name, replacement(function, Signature.of(function), plans)))
                texts += [str(p.geometry) for p, _ in plans]
            else:
                reasons.append(reason)
        if reasons:
            part.skipped[name] = "; ".join(reasons)
        else:
            forward = _unless_seen_by_others(forward_rebuilding(forward_with(own, tuple(replaced))))
            bind(module, KEY, forward, slot, place=Place(part, name), functions=functions, makers=watched)
            part.swapped[name] = f"{', '.join(names)}: {' | '.join(dict.fromkeys(texts))}"


def _nearest(name: str, layouts: dict[str, frozenset]) -> list[str]:
    """The rotary embeddings whose angles a module is given: those that sit in its nearest ancestor to hold any.

    Not those of a sibling: a vision tower that makes its own cos is not told by the rotary embedding of the text model.
    """
    parts = name.split(".") if name else []
    for depth in range(len(parts), -1, -1):
        near = [other for other in layouts if other.split(".")[:-1] == parts[:depth]]
        if near:
            return near
    return []


def _seen_by_others(functions, makers) -> str | None:
    """Why the angles may not be what was proven, or a call of a rotary function would be missed, or None.

    A hook on what makes cos and sin may change them, and ours reads half of their numbers. With the library `kernels` a
    rotary function is a module, which has hooks too.
    """
    for module, known in makers:
        if type(module).forward is not known:
            return f"the forward of {type(module).__name__}, which makes the angles, has been replaced"
        if (attached := hook_on(module)) is not None:
            return f"{attached} on {type(module).__name__} may change the angles"
    for function in functions:
        if isinstance(function, nn.Module) and (attached := hook_on(function)) is not None:
            return f"{attached} on {type(function).__name__} would not be called"
    return None


@functools.cache
def _unless_seen_by_others(forward):
    """The method `forward`, or the class's own while there are hooks that `forward` would pass by."""

    @functools.wraps(forward)
    def call(self, *args, **kwargs):
        if is_aside(self):
            return type(self).forward(self, *args, **kwargs)
        binding = binding_of(self)
        if (reason := _seen_by_others(binding.functions, binding.makers)) is not None:
            step_aside(self, reason)
            return type(self).forward(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return call


def _plans(proven: tuple[Proof, ...], seen: frozenset) -> tuple[tuple[Proof, frozenset | None], ...]:
    """The proofs that hold here, each with the sizes of cos for which they do (None: all)."""
    plans = []
    for proof in proven:
        if proof.layout is None:
            plans.append((proof, None))
            continue
        fitting = {size for size, layout in seen if layout == proof.layout}
        fitting -= {size for size in fitting if (size, proof.layout) in seen and (size, "other") in seen}
        if fitting:
            plans.append((proof, frozenset(fitting)))
    return tuple(plans)


@functools.cache
def replacement(function, signature: Signature, plans):
    """A function with the signature of `function` that calls our kernel where a plan fits the call, else `function`."""
    table = {}
    for proof, sizes in plans:
        q_dims, cos_dims, at = proof.call
        key = (q_dims, cos_dims, at if signature.unsqueeze_dim is not None else None, proof.size)
        table[key] = (at, sizes, proof.geometry.sign, proof.geometry.arguments())
    names, turned_names, single = signature.names, signature.turned, len(signature.turned) == 1
    tensors = (*turned_names, signature.cos, signature.sin, "unsqueeze_dim")

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
            if name not in tensors and given[name] is not None:  # an argument whose meaning was not proven
                return function(*args, **kwargs)
        if signature.cos is None:
            cos, sin = cos.real, sin.imag
        unsqueeze_dim = None if signature.unsqueeze_dim is None else given.get("unsqueeze_dim", signature.unsqueeze_dim)
        plan = table.get((q.ndim, cos.ndim, unsqueeze_dim, size_of(q.shape[-1], cos.shape[-1])))
        if plan is None or not _fits(plan, q, k, cos, sin):
            return function(*args, **kwargs)
        at, _, sign, arguments = plan
        q, k = rope(q, None if single else k, cos, sin if sign > 0 else -sin, unsqueeze_dim=at, **arguments)
        return q if single else (q, k)

    return apply_rotary


def _fits(plan, q, k, cos, sin) -> bool:
    """Whether this cos is one of the proof, and the kernel takes these tensors. `k` is `q` where only one is turned."""
    at, sizes, _, arguments = plan
    if sizes is not None and cos.shape[-1] not in sizes:
        return False
    return misfit(q, k, cos, sin, arguments["cos_layout"], at) is None


_forwards = {}


def forward_with(own, replaced: tuple[tuple[str, object], ...]):
    """The function `own`, its code unchanged, with globals of its own: those it names, some of them replaced.

    They are taken as they are now. A dict that looks further, into the globals of the modeling module, would follow
    later changes there, but torch.compile guards on the keys of this dict, and on that module if it has `__name__`.
    """
    scope, replacements = own.__globals__, dict(replaced)
    names = [name for name in _global_names(own.__code__) if name in scope]
    key = (own, replaced, tuple((name, id(scope[name])) for name in names))
    if key not in _forwards:
        view = {name: replacements.get(name, scope[name]) for name in names}
        view["__builtins__"] = scope["__builtins__"]
        view["__package__"] = scope.get("__package__")  # for an import inside the function
        function = types.FunctionType(own.__code__, view, own.__name__, own.__defaults__, own.__closure__)
        function.__kwdefaults__, function.__annotations__ = own.__kwdefaults__, own.__annotations__
        function.__doc__, function.__module__, function.__qualname__ = own.__doc__, own.__module__, own.__qualname__
        _forwards[key] = (probe.named(function, own.__name__), [scope[name] for name in names])  # keeps the ids taken
    return _forwards[key][0]


def _global_names(code: types.CodeType) -> list[str]:
    """Names of a function and of the functions inside it; attributes are among them, which does no harm."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for c in inner for name in _global_names(c))]))
