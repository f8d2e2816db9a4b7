"""Guards: what a proof of a module rests on besides its weights, compared in every call with what it was.

A proof holds as long as the module's code is the same, down to the functions that it calls, and finds the same numbers
and children by their names. Then the module's own code runs.

Code of transformers, PyTorch, PEFT and torchao is known to do nothing else. Other code may count its calls, keep a term
of a loss, or read what no guard can compare, so that no proof of it holds.
"""

import dis
import functools
import itertools
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from liger_trainer.patching.core.binding import own_class
from liger_trainer.patching.core.hooks import home, hook_on

_ABSENT = ...  # stands for what is not there
KNOWN: tuple[str, ...] = ("transformers.", "torch.", "peft.", "torchao.", "kernels.", "liger_trainer.")
_COMPARABLE = (
    type(None),
    bool,
    int,
    float,
    str,
    tuple,
    torch.dtype,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.EllipsisType,
)
_WALKED_IN_TORCH = ("torch.nn.modules.", "torch.utils._contextlib")
_TORCHS_LINEAR = nn.Linear.forward, torch._C._nn.linear
# These run in a call of a module.
_CALLED_ON_MODULES = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__")
_IS_GENUINE = home(nn.Linear.forward) == "torch.nn.modules.linear"
_ZERO3S_LINEAR = ("deepspeed.runtime.zero.linear", "zero3_linear_wrap")

# Where something is looked up: a class, a Python module or, None, the module's `__dict__`; the name; what is found.
Lookup = tuple[type | types.ModuleType | None, str, Any]


class NotProven(Exception):
    """Raised when a module cannot be replaced; the message is the reason in the report."""


def linear_is_torchs() -> bool:
    """Return whether the forward of `nn.Linear` is PyTorch's, for code that multiplies in its place.

    Loading a model in parts under ZeRO-3 leaves DeepSpeed's function in `F.linear`, which computes the same.
    """
    if not (_IS_GENUINE and nn.Linear.forward is _TORCHS_LINEAR[0]):
        return False
    now = F.linear
    return now is _TORCHS_LINEAR[1] or (home(now), getattr(now, "__name__", "")) == _ZERO3S_LINEAR


class Guards:
    """Everything that the code of a module of class `cls` looks up by name.

    Attributes:
        lookups (`tuple`): Names of the instance, in its `__dict__`, of classes and of Python modules.
        missing (`tuple`): The names of its parameters and children that are None.
        children (`tuple`): (name, guards) of the children that our method does not call.
    """

    def __init__(self, cls: type, lookups: Iterable[Lookup] = ()):
        self.cls = cls
        self.lookups = tuple({(id(found[0]), found[1]): found for found in lookups}.values())
        self.missing: tuple[str, ...] = ()
        self.children: tuple[tuple[str, Guards], ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Guards":
        return self

    def all_lookups(self) -> Iterator[Lookup]:
        """Yield the lookups of this, and of the children that our method does not call."""
        yield from self.lookups
        for _, guards in self.children:
            yield from guards.all_lookups()

    def broken(self, module: nn.Module, label: str = "it") -> str | None:
        """Tell why the proof does not hold for `module` now, or return None. The reason calls the module `label`."""
        if type(module) is not self.cls and own_class(module) is not self.cls:
            return f"{label} is a {type(module).__name__} now; it was a {self.cls.__name__}"
        state = module.__dict__
        for owner, name, value in self.lookups:
            now = state.get(name, _ABSENT) if owner is None else getattr(owner, name, _ABSENT)
            if now is not value and not _is_same(now, value):
                return f"{name} of {label if owner is None else _label(owner)} has changed"
        for name in self.missing:
            if getattr(module, name, None) is not None:
                return f"{label} has a {name} now"
        for name, guards in self.children:
            child = state["_modules"].get(name)
            reason = guards.broken(child, name)
            if reason is not None:
                return reason
            attached = hook_on(child)
            if attached is not None:
                return f"{attached} on {name} would not be called"
        return None


def guards_of(module: nn.Module, method: str = "forward", called: Collection[str] = ()) -> Guards:
    """Make the guards of a proof of `method`. Its replacement calls only the children named in `called`.

    Raises:
        NotProven: The code is not known, or may depend on something that no guard can compare.
    """
    cls, state = own_class(module), module.__dict__
    classes = _classes(cls)
    functions: dict[types.FunctionType, None] = {}
    for name in (method, "__getattr__", "__getattribute__"):
        for base in classes:
            _walk(vars(base).get(name), [state, *map(vars, classes)], functions)
    names = _all_names([method], functions)
    of_class = _defined_by(classes, names)
    own = [name for name in names if name in (state.keys() | of_class) - {method, "training"}]
    lookups: list[Lookup] = [*_class_lookups(classes, of_class), *((None, n, state.get(n, _ABSENT)) for n in own)]
    guards = Guards(cls, itertools.chain(lookups, *map(_function_lookups, functions)))
    held = {**module._buffers, **module._parameters, **module._modules}
    guards.missing = tuple(name for name in names if name in held and held[name] is None)
    left_out = {name: child for name, child in module._modules.items() if child is not None and name not in called}
    guards.children = tuple((name, guards_of(child)) for name, child in left_out.items())
    _check(guards.lookups, functions)
    return guards


def code_guards_of(cls: type[nn.Module], *others: type[nn.Module]) -> Guards:
    """Guards of the forwards of `cls` and of `others`, for a method that asks in every call for all that they read."""
    found = [(*_class_lookups(_classes(one), ["forward"]), *_functional(one.forward)) for one in (cls, *others)]
    return Guards(cls, itertools.chain(*found))


def code_lookups_of(classes: Iterable[type[nn.Module]]) -> list[Lookup]:
    """List what calls of modules of these classes look up by name, in classes, in Python modules and in `torch`.

    Unlike `guards_of` it asks for no proof, and leaves out what cannot be compared by identity.
    """
    found: list[Lookup] = []
    for cls in classes:
        bases = _classes(cls)
        functions: dict[types.FunctionType, None] = {}
        for name in _CALLED_ON_MODULES:
            for base in bases:
                _walk(vars(base).get(name), [*map(vars, bases)], functions)
        of_class = _defined_by(cls.__mro__, _all_names(_CALLED_ON_MODULES, functions))
        found += _class_lookups(list(cls.__mro__[:-1]), of_class)
        for function in functions:
            if is_of_its_module(function):
                found += global_lookups(function)
            found += _functional(function)
            found += ((torch, n, vars(torch)[n]) for n in _names(function.__code__) if n in vars(torch))
    distinct = {(id(owner), name): (owner, name, value) for owner, name, value in found}
    return [(owner, name, value) for owner, name, value in distinct.values() if getattr(owner, name) is value]


def lookups_of(function: Any) -> tuple[Lookup, ...]:
    """List what a rotary function, or a module in its place, looks up. Raises `NotProven` as `guards_of` does."""
    return guards_of(function).lookups if isinstance(function, nn.Module) else _read_by(function)[1]


def key_of(function: types.FunctionType) -> tuple:
    """Return the code of `function` and of the functions that it calls, and what all of them look up.

    Raises `NotProven` as `guards_of` does, and `TypeError` where something has no hash.
    """
    functions, lookups = _read_by(function)
    codes = [(one, one.__code__, one.__defaults__, repr(one.__kwdefaults__)) for one in functions]
    key = (*codes, *((*lookup, type(lookup[2])) for lookup in lookups))
    hash(key)
    return key


def _read_by(function: Any) -> tuple[dict[types.FunctionType, None], tuple[Lookup, ...]]:
    """Find the functions that run in a call of `function`, and what they look up."""
    functions: dict[types.FunctionType, None] = {}
    _walk(function, [], functions)
    lookups = tuple(itertools.chain(*map(_function_lookups, functions)))
    _check(lookups, functions)
    return functions, lookups


def is_of_its_module(function: types.FunctionType) -> bool:
    """Return whether `function` has the globals of the Python module that it names."""
    module = sys.modules.get(home(function))
    return module is not None and vars(module) is function.__globals__


def global_lookups(function: types.FunctionType) -> list[Lookup]:
    """Return the globals that `function`, and those inside it, read."""
    scope, module = function.__globals__, sys.modules.get(home(function))
    if module is None or vars(module) is not scope:
        raise NotProven(f"{function.__qualname__} stands in no Python module")
    return [(module, name, scope[name]) for name in _globals(function.__code__) if name in scope]


def _class_lookups(classes: list[type], names: Iterable[str]) -> Iterator[Lookup]:
    """Look names up in the first of `classes`, and in the others that define them."""
    for name in names:
        for owner in dict.fromkeys((classes[0], *(base for base in classes if name in vars(base)))):
            yield owner, name, getattr(owner, name, _ABSENT)


def _function_lookups(function: types.FunctionType) -> Iterator[Lookup]:
    """Yield the globals that `function` reads, without modules and classes, and what it calls in `F`."""
    yield from (found for found in global_lookups(function) if not isinstance(found[2], types.ModuleType | type))
    yield from _functional(function)


def _functional(function: Any) -> Iterator[Lookup]:
    names = _names(function.__code__) if isinstance(function, types.FunctionType) else []
    yield from ((F, name, vars(F)[name]) for name in names if callable(vars(F).get(name)))


def _walk(value: Any, scopes: list[Mapping[str, Any]], functions: dict[types.FunctionType, None]) -> None:
    """Put the function `value` into `functions`, and those that it calls by names of `scopes` or of its module."""
    value = getattr(value, "fget", getattr(value, "func", value))  # of a property, of a partial
    if not isinstance(value, types.FunctionType) or value in functions:
        return
    if home(value).startswith("torch.") and not home(value).startswith(_WALKED_IN_TORCH):
        return
    functions[value] = None
    called = []
    for name in _names(value.__code__):
        called += [scope.get(name) for scope in scopes]
    called += [value.__globals__.get(name) for name in _globals(value.__code__)]
    called += [cell.cell_contents for cell in value.__closure__ or ()]  # of a decorator
    for other in called:
        _walk(other, scopes, functions)


def _check(lookups: Iterable[Lookup], functions: Iterable[types.FunctionType]) -> None:
    """Raise `NotProven` for code that is not known, and where something cannot be compared."""
    for function in functions:
        if not home(function).startswith(KNOWN):
            raise NotProven(f"{function.__qualname__} of {home(function)} is not code of transformers, PyTorch or PEFT")
    for owner, name, value in lookups:
        known = owner is not None and f"{_label(owner)}.".startswith(KNOWN)
        if not known and not _is_comparable(value):
            where = "" if owner is None else f" of {_label(owner)}"
            raise NotProven(f"its code reads {name}{where}, a {type(value).__name__}, which may change")


def _is_comparable(value: Any) -> bool:
    if isinstance(value, functools.partial):
        return all(map(_is_comparable, (value.func, value.args, *value.keywords.values())))
    return isinstance(value, _COMPARABLE) and (not isinstance(value, tuple) or all(map(_is_comparable, value)))


def _is_same(now: Any, value: Any) -> bool:
    if isinstance(value, functools.partial) and isinstance(now, functools.partial):  # `deepcopy` makes another one
        return (now.func, now.args, now.keywords) == (value.func, value.args, value.keywords)
    return type(now) is type(value) and isinstance(value, _COMPARABLE) and now == value


def _label(owner: Any) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__


def _classes(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base not in (nn.Module, object)]


def _all_names(methods: Iterable[str], functions: Iterable[types.FunctionType]) -> list[str]:
    """Return `methods`, and the names that the code of `functions` has, each once."""
    names = dict.fromkeys(methods)
    for function in functions:
        names |= dict.fromkeys(_names(function.__code__))
    return list(names)


def _defined_by(classes: Iterable[type], names: Iterable[str]) -> list[str]:
    """Those of `names` that one of `classes` defines."""
    defined: set[str] = set()
    for base in classes:
        defined.update(vars(base))
    return [name for name in names if name in defined]


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """List `code` and the code of the functions inside it."""
    found = [code]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += _codes(constant)
    return found


def _names(code: types.CodeType) -> list[str]:
    found: list[str] = []
    for one in _codes(code):
        found += one.co_names
    return found


@functools.cache
def _globals(code: types.CodeType) -> list[str]:
    """Return the names of globals that `code` and the functions inside it read."""
    found: dict[str, None] = {}
    for one in _codes(code):
        for step in dis.get_instructions(one):
            if step.opname == "LOAD_GLOBAL":
                found[step.argval] = None
    return list(found)
