"""Binding our methods to single instances of modules, and taking them away again.

A method is bound to one instance with `types.MethodType`, so that `deepcopy` takes it to the copy, where it runs with
the copy's own weights. What the method needs to know is kept beside it in the instance's `__dict__`, as a `Binding`.
Pickle stores a bound method by its name, which leads back to the class's own method, and it stores nothing of a
`Binding`: a model that has been unpickled is unpatched, and `Binding.of` returns None for its modules.
"""

import copy
import types
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

from liger_trainer.instance.report import Place


class Binding:
    """What we remember about a method of ours that is bound to one instance.

    A subclass remembers more. Where it has a `key` of its own, its methods are bound and unbound apart from the others.

    Args:
        function: Our method, unbound. `function.__name__` must be the name of the class's method that it replaces,
            since pickle stores no more than that.
        slot (`str`): The attribute of the instance that holds the method.
        place (`Place`, *optional*): The module's place in a report, which is told when the method steps aside.

    Attributes:
        key (`str`): The key of the binding in the `__dict__` of the instance.
        previous: What the attribute held before, or None where the class's own method was in effect.
        aside (`bool`): Whether our method hands its calls to the class's own one, because a hook would be missed
            otherwise, or because it was removed while somebody else's wrapper still calls it. It stays aside for good,
            since a checkpoint that recomputes a call must take the same path again.
    """

    key: ClassVar[str] = "_liger_patch"

    def __init__(self, function: Callable, slot: str = "forward", place: Place | None = None):
        self.function, self.slot, self.place = function, slot, place
        self.previous: Callable | None = None
        self.aside = False

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """What is bound to `module`; None where nothing is, or where the module has been pickled since."""
        return module.__dict__.get(cls.key)

    def __reduce__(self) -> tuple[Callable, tuple[()]]:
        return _forgotten, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return twin


BindingT = TypeVar("BindingT", bound=Binding)


def _forgotten() -> None:
    """What a `Binding` becomes in a pickle."""


def bind(module: nn.Module, binding: BindingT) -> BindingT:
    """Put the method of `binding` on this one instance, and remember `binding` with it."""
    slot = binding.slot
    previous = module.__dict__.get(slot)
    if getattr(previous, "__func__", None) is getattr(type(module), slot.removeprefix("_old_"), None):
        previous = None  # unpickling leaves the class's own method in the instance
    binding.previous = previous
    module.__dict__[slot] = types.MethodType(binding.function, module)
    module.__dict__[binding.key] = binding
    return binding


def is_bound(module: nn.Module, binding: Binding) -> bool:
    """Whether a call reaches the method of `binding` first. It does not where somebody has wrapped the method since."""
    return getattr(module.__dict__.get(binding.slot), "__func__", None) is binding.function


def is_aside(module: nn.Module) -> bool:
    """Whether a method that `apply_liger` has swapped in must hand its call on `module` to the class's own method.

    A proof calls our methods on modules to which nothing is bound. There they need not.
    """
    binding = module.__dict__.get(Binding.key)
    return binding is not None and binding.aside


def unbind(module: nn.Module, kind: type[Binding]) -> None:
    """Undo `bind`: the `__dict__` of the instance is as before.

    Where somebody has wrapped our method since, the wrapper stays, and so does the method inside it, which steps aside.
    """
    binding = module.__dict__.pop(kind.key, None)
    if binding is None:
        return
    if not is_bound(module, binding):
        binding.aside = True
        module.__dict__[kind.key] = binding
        return
    if binding.previous is None and binding.slot != "_old_forward":
        del module.__dict__[binding.slot]
    else:  # accelerate's hook calls `_old_forward`, which must stay there
        module.__dict__[binding.slot] = binding.previous or types.MethodType(type(module).forward, module)


def call_previous(module: nn.Module, kind: type[Binding], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call the forward that `module` would have without ours."""
    binding = kind.of(module)
    previous = None if binding is None else binding.previous
    return type(module).forward(module, *args, **kwargs) if previous is None else previous(*args, **kwargs)


def own_class(module: nn.Module) -> type:
    """The class that `module` had before FSDP2 gave it a class of another name that derives from it."""
    return next(c for c in type(module).__mro__ if not issubclass(c, FSDPModule))
