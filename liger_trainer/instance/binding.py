"""Methods of ours on single instances: how they get there, what they remember, and how they go again.

A method is bound to one instance with `types.MethodType`, so that `deepcopy` takes it to the copy with the copy's own
weights. What it needs to know lies beside it in the instance's `__dict__`, as a `Binding`. Pickle stores a bound method
by its name, which leads back to the class's own method, and of a `Binding` it stores nothing: an unpickled model is
unpatched, and says so.
"""

import copy
import types

KEY = "_liger_patch"  # of the methods that `apply_liger` swaps in; the LM head has keys of its own


class Binding:
    """What stands behind a method of ours on one instance.

    Attributes:
        slot (`str`): The attribute of the instance that holds the method.
        function: Our method, unbound.
        previous: What the attribute held before, or None where the class's own method was in effect.
        aside (`bool`): Whether our method leaves its calls to the class's own one, for good: a hook would be missed, or
            it has been removed but somebody has wrapped it. It does not come back in the middle, since a checkpoint
            that recomputes a call must take the same path again.
    """

    def __init__(self, slot: str, function, previous, **notes):
        self.slot, self.function, self.previous, self.aside = slot, function, previous, False
        self.__dict__.update(notes)

    def __reduce__(self):
        return _forgotten, ()

    def __deepcopy__(self, memo):
        twin = object.__new__(Binding)
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return twin


def _forgotten() -> None:
    """What a `Binding` is after pickling."""


def binding_of(module, key: str = KEY) -> Binding | None:
    """What was bound to `module` under `key`; None where nothing was, or where the module has been pickled since."""
    return module.__dict__.get(key)


def bind(module, key: str, function, slot: str = "forward", **notes) -> Binding:
    """Make `function` the method `slot` of this one instance, and remember `notes` with it.

    `function.__name__` must be that of the class's method, since pickle stores no more than that.
    """
    previous = module.__dict__.get(slot)
    if getattr(previous, "__func__", None) is getattr(type(module), slot.removeprefix("_old_"), None):
        previous = None  # the class's own, as unpickling leaves it in the instance
    binding = Binding(slot, function, previous, **notes)
    module.__dict__[slot] = types.MethodType(function, module)
    module.__dict__[key] = binding
    return binding


def is_bound(module, binding: Binding) -> bool:
    """Whether the method of `binding` is what a call reaches first; somebody may have wrapped it since."""
    return getattr(module.__dict__.get(binding.slot), "__func__", None) is binding.function


def is_aside(module, key: str = KEY) -> bool:
    """Whether our method on `module` must leave a call to the class's own. Unbound, as in a proof, it need not."""
    binding = module.__dict__.get(key)
    return binding is not None and binding.aside


def unbind(module, key: str) -> None:
    """Undo `bind`: the `__dict__` of the instance is as before.

    Where somebody has wrapped our method since, the wrapper stays, and so does the method inside, which steps aside.
    """
    binding = module.__dict__.pop(key, None)
    if binding is None:
        return
    if not is_bound(module, binding):
        binding.aside = True
        module.__dict__[key] = binding
        return
    if binding.previous is None and binding.slot != "_old_forward":
        del module.__dict__[binding.slot]
    else:  # accelerate's hook calls `_old_forward`, which must stay there
        module.__dict__[binding.slot] = binding.previous or types.MethodType(type(module).forward, module)


def call_previous(module, key: str, args: tuple, kwargs: dict):
    """The forward that `module` would have without ours."""
    binding = binding_of(module, key)
    previous = None if binding is None else binding.previous
    return type(module).forward(module, *args, **kwargs) if previous is None else previous(*args, **kwargs)
