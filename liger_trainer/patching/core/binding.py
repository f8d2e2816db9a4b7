"""Binding our methods to single instances of modules, and taking them away again.

A `Binding` stands in the `__dict__` of one instance in the place of a method of its class. It refers to the instance
weakly, so that a patched model is freed when its last reference goes, as a stock one is. `deepcopy` takes it to the
copy, where it runs with the copy's own weights. In a pickle it is the class's own method: a model that has been
unpickled is unpatched, needs nothing of this package, and `Binding.of` returns None for its modules.
"""

import copy
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from liger_trainer._logging import logger
from liger_trainer.patching.core.report import ReportEntry


class SupportsGuardCheck(Protocol):
    """The guards of a proof, on which a method rests."""

    def broken(self, module: nn.Module) -> str | None:
        """Tell why it does not hold for `module` now, or return None."""


class WeakModuleRef:
    """A reference to a module that does not keep it alive. In a deep copy it leads to the copy, in a pickle nowhere."""

    def __init__(self, module: nn.Module | None = None):
        self.to: Callable[[], nn.Module | None] = (lambda: None) if module is None else weakref.ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeakModuleRef":
        return WeakModuleRef(memo.get(id(self.to())))

    def __reduce__(self) -> tuple[type["WeakModuleRef"], tuple[()]]:
        return WeakModuleRef, ()


_threads_of_own_code: set[int] = set()


class own_code:
    """Context manager: in this thread and without gradients, every module runs its own code, or ours if `on` is False.

    The two may differ in the last digit. So it is for calls that no backward pass repeats. A whole model that is called
    inside, by a hook, decides for itself again.
    """

    def __init__(self, on: bool = True):
        self.on = on

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        self.was_on = self.thread in _threads_of_own_code
        self._switch(self.on)

    def __exit__(self, *_: Any) -> None:
        self._switch(self.was_on)

    def _switch(self, on: bool) -> None:
        if on:
            _threads_of_own_code.add(self.thread)
        else:
            _threads_of_own_code.discard(self.thread)


def _is_within_own_code() -> bool:
    """Return whether `own_code` is on here. Traced code cannot ask for the thread, and keeps our methods."""
    # It takes half the time of `is_compiling`, and each module of each token asks.
    return not torch.compiler.is_dynamo_compiling() and threading.get_ident() in _threads_of_own_code


class Binding:
    """A method of ours that is bound to one instance.

    A subclass remembers more, and has a `key` of its own.

    Args:
        function: Our method, unbound. `function.__name__` must be the name of the class's method that it replaces.
        slot (`str`): The attribute of the instance that holds the method.
        report_entry (`ReportEntry`, *optional*): The module's entry in a report, updated when the method falls back.
        guards (`SupportsGuardCheck`, *optional*): What the method relies on. If it no longer holds, the method falls
            back to the module's own code.
        key (`str`, *optional*): The key under which the `__dict__` of the instance has the binding a second time, where
            it stays if the method is wrapped. It begins with `_liger_`. Unset: the key of the class.

    Attributes:
        is_of_model (`bool`): Whether the method belongs to a whole model, which decides what runs in it (`own_code`).
        previous: What the slot held before, or None where the class's own method was in effect.
        fallback_active (`bool`): Whether calls go to the class's own method from now on: a proof no longer holds, or
            ours was removed while a wrapper still calls it. A checkpoint that recomputes a call must take the same path
            again.
    """

    key = "_liger_patch"
    is_of_model = False

    def __init__(
        self,
        function: Callable,
        slot: str = "forward",
        report_entry: ReportEntry | None = None,
        guards: SupportsGuardCheck | None = None,
        key: str | None = None,
    ):
        self.function = function
        self.slot = slot
        self.report_entry = report_entry
        self.guards = guards
        self.key = key or type(self).key
        self.previous: Callable | None = None
        self.fallback_active = False
        self.module = WeakModuleRef()

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """Return the binding of `module`; None where it has none, or has been pickled since."""
        found = module.__dict__.get(cls.key)
        return found if isinstance(found, cls) else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module.to()
        # A strong reference would make a cycle of model and binding, and memory would wait for the garbage collector.
        if module is None:
            raise ReferenceError("The module of this forward has been freed. Keep the model, not its forward alone.")
        runs_own = self.fallback_active
        if _threads_of_own_code and not runs_own and _is_within_own_code():
            if self.is_of_model:
                with own_code(False):
                    return self.function(module, *args, **kwargs)
            runs_own = not torch.is_grad_enabled()
        if not runs_own and self.guards is not None:
            reason = self.guards.broken(module)
            if reason is not None:
                self.fall_back(reason)
                runs_own = True
        if runs_own:
            own = self.previous
            if own is None:
                return getattr(type(module), self.function.__name__)(module, *args, **kwargs)
            return own(*args, **kwargs)
        return self.function(module, *args, **kwargs)

    def call_previous(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the forward that the module would have without ours."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        module = self.module.to()
        return type(module).forward(module, *args, **kwargs)  # type: ignore[union-attr]

    def fall_back(self, reason: str) -> None:
        """Leave all calls to the module's own code from now on, and say so in the log and in the report."""
        if not torch.compiler.is_compiling():
            self.fallback_active = True
            self.report_fallback(reason, "runs its own code instead of a fused kernel")

    def report_fallback(self, reason: str, what: str) -> None:
        """Say in the report and, once, in the log what the module does without what is bound, and why."""
        if self.report_entry is not None:
            self.report_entry.mark_skipped(reason)
        logger.warning_once(f"{type(self.module.to()).__name__} {what}: {reason}.")

    @property
    def name(self) -> str:
        """Return the name of the class's method."""
        return self.function.__name__

    @property
    def __self__(self) -> nn.Module | None:
        return self.module.to()

    @property
    def __func__(self) -> Callable:
        return self.function

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(self.function, self))

    def __reduce__(self) -> tuple[Callable, tuple[nn.Module | None, str]]:
        return getattr, (self.module.to(), self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


BindingT = TypeVar("BindingT", bound=Binding)


def bind(module: nn.Module, binding: BindingT) -> BindingT:
    """Put `binding` on this one instance."""
    slot = binding.slot
    previous = module.__dict__.get(slot)
    if getattr(previous, "__func__", None) is getattr(type(module), slot.removeprefix("_old_"), None):
        previous = None  # unpickling leaves the class's own method in the instance
    binding.previous, binding.module = previous, WeakModuleRef(module)
    module.__dict__[slot] = module.__dict__[binding.key] = binding
    return binding


def in_place_of(own: Callable, name: str = "forward") -> Callable[[Callable], Callable]:
    """Decorate a method that is to be bound in the place of `own`: it gets the name `name` and the signature of `own`.

    `Trainer` and `generate` read it. accelerate takes a method with a `__wrapped__` for its own wrapper and removes it.
    """

    def decorated(method: Any) -> Callable:
        functools.update_wrapper(method, own)
        method.__name__, method.__module__ = name, method.__globals__["__name__"]
        method.__signature__ = inspect.signature(own)
        del method.__wrapped__
        return method

    return decorated


def is_bound(module: nn.Module, binding: Binding) -> bool:
    """Return whether a call reaches the method of `binding` first, as it does until the method is wrapped."""
    return getattr(module.__dict__.get(binding.slot), "__func__", None) is binding.function


def unbind_all(model: nn.Module) -> None:
    """Undo every `bind` in `model`, the last one first: the `__dict__` of each module is as before.

    Where our method has been wrapped since, the wrapper stays, and so does the method inside it, which falls back.
    """
    for module in model.modules():
        _unbind(module)


def _unbind(module: nn.Module) -> None:
    state = module.__dict__
    # The last one first, because each remembers what was there before it.
    for key in reversed([key for key in state if key.startswith("_liger_")]):
        binding = state.pop(key)
        if not isinstance(binding, Binding):  # it has been pickled since
            continue
        binding.fallback_active = True
        if not is_bound(module, binding):
            state[key] = binding
        elif binding.previous is None and binding.slot != "_old_forward":
            del state[binding.slot]
        else:  # accelerate's hook calls `_old_forward`, which must stay there
            state[binding.slot] = binding.previous or types.MethodType(type(module).forward, module)


def call_previous(module: nn.Module, binding_class: type[Binding], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call the forward that `module` would have without ours."""
    binding = binding_class.of(module)
    if binding is None:
        return type(module).forward(module, *args, **kwargs)
    return binding.call_previous(args, kwargs)


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that `module` had before FSDP2 gave it a class of another name that derives from it."""
    cls: Any = type(module)
    return _without_fsdp(cls)


@functools.cache
def _without_fsdp(cls: type) -> type:
    return next(c for c in cls.__mro__ if not issubclass(c, FSDPModule))
