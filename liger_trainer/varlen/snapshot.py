"""What the replay of a captured backbone relies on, compared before each replay with what it was at the capture.

A replay runs no Python. A hook that was added, an adapter that was switched off, a weight that was moved or a flag of
the process that was set would change nothing in it. So all of that is compared first, and any difference sends the call
through the model's own Python code.

The comparison is a few sweeps over lists that were made once, each a loop inside the interpreter: an 8B model with
adapters has 2,665 modules, and one line of Python for each of them would cost more than all sweeps together.

It cannot see numbers inside closures, objects of the user's that are changed in place, and functions whose code object
was replaced.
"""

from collections.abc import Iterable, Iterator
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from liger_trainer.instance.binding import Binding
from liger_trainer.instance.guards import Guards, Lookup
from liger_trainer.instance.kept import hooks_in_force
from liger_trainer.memory.switches import are_alike

_HOOK_DICTS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_GLOBAL_HOOKS = [getattr(nn.modules.module, f"_global{name}") for name in _HOOK_DICTS]
# The forward of these reads no attribute but its weights and children, which are compared for every module.
# Of them it is enough that no attribute was added or removed, such as a `forward` of the instance.
_WITHOUT_NUMBERS = (nn.Linear, nn.Identity, nn.ModuleList, nn.ModuleDict)
# What no forward and no backward reads: hooks of `state_dict`, and what is known about hooks that are there.
_UNREAD_CONTAINERS = {
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_non_persistent_buffers_set",
    "_require_grads_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
}
# What transformers makes anew though nothing has changed. When checkpointing is switched off and on again, as TRL does
# around each call of a reference: notes about hooks, and a partial with the same function and the same arguments. In
# each call of a model of images: what its next token in a generation needs.
_NOTES = ("_require_grads_hooks", "_require_grads_hook", "rope_deltas")
_CHECKPOINT = "_gradient_checkpointing_func"
_MISSING = object()


class Snapshot:
    """The state of a model's modules and of the process, as far as a replay relies on it.

    Args:
        modules (`list[nn.Module]`): All modules that run, or hold modules that run, within the capture, and those
            around it whose hooks or forwards decide whether it may be replayed.
        embedding (`nn.Module`, *optional*): The input embedding, which runs before each replay. Its hooks may be made
            anew from the same code, like the one by which transformers has embeddings require a gradient.

    Attributes:
        trained (`list[nn.Parameter]`): The parameters that require a gradient, each once.
    """

    def __init__(self, modules: list[nn.Module], embedding: nn.Module | None = None):
        self._with_numbers = [module for module in modules if type(module) not in _WITHOUT_NUMBERS]
        self._attributes = [dict(vars(module)) for module in self._with_numbers]
        self._without_numbers = [module for module in modules if type(module) in _WITHOUT_NUMBERS]
        self._attribute_counts = [len(vars(module)) for module in self._without_numbers]

        self._hooks_before = {} if embedding is None else embedding._forward_hooks
        self._codes_before = _codes_of(self._hooks_before)
        containers = [container for module in modules for container in _containers_of(vars(module))]
        containers = [container for container in containers if container is not self._hooks_before]
        self._empty = [container for container in containers if not container]
        self._filled = [container for container in containers if container]
        self._contents = [container.copy() for container in self._filled]

        tensors = [tensor for module in modules for tensor in _tensors_of(module)]
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        scales = [x for state in _states_of(self._tensors) for x in state.values() if isinstance(x, torch.Tensor)]
        self._tensors = list({id(tensor): tensor for tensor in (*self._tensors, *scales)}.values())
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._require_grad = [tensor.requires_grad for tensor in self._tensors]
        self.trained = [x for x in self._tensors if x.requires_grad and isinstance(x, nn.Parameter)]

        # Attributes of tensors and of objects: quantised weights hold their scales there, bindings whether they run.
        held = list(_states_of(self._tensors))
        self._bindings = [x for m in modules for x in vars(m).values() if isinstance(x, Binding)]
        held += [vars(binding) for binding in self._bindings]
        configs = {id(config): config for m in modules if (config := vars(m).get("config")) is not None}
        held += [vars(config) for config in configs.values() if hasattr(config, "__dict__")]
        self._held = held
        self._held_contents = [dict(state) for state in held]

        classes = {type(module): None for module in modules}
        self._lookups = _deduplicated([*((cls, "forward", cls.forward) for cls in classes), *self._guarded()])
        self._process = process_state()

    def _guarded(self) -> Iterator[Lookup]:
        """Yield what the guards of all bindings look up in classes and Python modules."""
        for binding in self._bindings:
            if isinstance(binding.guards, Guards):
                yield from _lookups_in(binding.guards)
            for _, _, guards in getattr(binding, "parts", ()):  # of what makes the angles of a rotary function
                yield from _lookups_in(guards)

    def difference(self) -> str | None:
        """Name what has changed since the snapshot, or return None.

        A tensor in place of another one is compared by `==`, which may raise: then it has changed too.
        """
        if self._holds() or (self._adopt_equals() and self._holds()):
            return None
        return self._name_difference()

    def _holds(self) -> bool:
        try:
            return self._is_unchanged()
        except RuntimeError:  # the truth of a comparison of tensors
            return False

    def _is_unchanged(self) -> bool:
        return (
            self._process == process_state()
            and list(map(len, map(_dict_of, self._without_numbers))) == self._attribute_counts
            and list(map(_dict_of, self._with_numbers)) == self._attributes
            and not any(self._empty)
            and _codes_of(self._hooks_before) == self._codes_before
            and self._filled == self._contents
            and self._held == self._held_contents
            and [tensor.data_ptr() for tensor in self._tensors] == self._addresses
            and [tensor.requires_grad for tensor in self._tensors] == self._require_grad
            and not any([x._backward_hooks or x._post_accumulate_grad_hooks for x in self.trained])
            and all([getattr(owner, name, _MISSING) is value for owner, name, value in self._lookups])
        )

    def _adopt_equals(self) -> bool:
        """Take what transformers has made anew for what was there before. Return whether that was all that changed."""
        for module, before in zip(self._with_numbers, self._attributes, strict=True):
            now = vars(module)
            if _are_equal(now, before):
                continue
            for name in _NOTES:
                before.pop(name, None)
                if name in now:
                    before[name] = now[name]
            checkpoint = before.get(_CHECKPOINT)
            if checkpoint is not None and are_alike(checkpoint, now.get(_CHECKPOINT)):
                setattr(module, _CHECKPOINT, checkpoint)
            if not _are_equal(now, before):
                return False
        return True

    def _name_difference(self) -> str:
        """Say what has changed, for a log. It is looked for one by one, since it is asked for once."""
        if self._process != process_state():
            return "a flag of the process, such as autocast, a mode of PyTorch or a global hook, has changed"
        for module, count in zip(self._without_numbers, self._attribute_counts, strict=True):
            if len(vars(module)) != count:
                return f"an attribute of a {type(module).__name__} was added or removed"
        for module, before in zip(self._with_numbers, self._attributes, strict=True):
            if vars(module).keys() != before.keys():
                return f"an attribute of a {type(module).__name__} was added or removed"
            for name, value in vars(module).items():
                if not _are_equal([value], [before.get(name, _MISSING)]):  # as lists, where the same NaN is equal
                    return f"{name} of a {type(module).__name__} has changed"
        if _codes_of(self._hooks_before) != self._codes_before:
            return "a hook of the input embedding has changed"
        if any(self._empty):
            return "a hook, a parameter or an adapter was added to a module"
        for tensor, address, required in zip(self._tensors, self._addresses, self._require_grad, strict=True):
            if tensor.data_ptr() != address:
                return f"a weight {tuple(tensor.shape)} was moved to other memory"
            if tensor.requires_grad != required:
                return f"requires_grad of a weight {tuple(tensor.shape)} has changed"
        if any([x._backward_hooks or x._post_accumulate_grad_hooks for x in self.trained]):
            return "a weight has a hook on its gradient"
        for owner, name, value in self._lookups:
            if getattr(owner, name, _MISSING) is not value:
                return f"{name} of {getattr(owner, '__qualname__', getattr(owner, '__name__', owner))} has changed"
        return "a weight, a child, an adapter or a setting of a module has changed"


_dict_of = attrgetter("__dict__")


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two containers are equal. With different tensors in the same place they are not."""
    try:
        return one == other
    except RuntimeError:
        return False


def _codes_of(hooks: dict[int, Any]) -> list[Any]:
    """Return the code of each hook that is a function without variables of its own, and other hooks as they are.

    Each is returned once: transformers adds the same hook again when checkpointing is switched on again.
    """
    codes: list[Any] = []
    for hook in hooks.values():
        is_plain = isinstance(hook, FunctionType) and not (hook.__closure__ or hook.__defaults__ or hook.__kwdefaults__)
        code = hook.__code__ if is_plain else hook
        if code not in codes:
            codes.append(code)
    return codes


def _containers_of(state: dict[str, Any]) -> Iterator[Any]:
    """Yield the dicts, lists and sets among the attributes of a module. Their contents may change in place."""
    for name, value in state.items():
        if isinstance(value, dict | list | set) and name not in _UNREAD_CONTAINERS:
            yield value


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor
    for value in vars(module).values():
        if isinstance(value, torch.Tensor):
            yield value


def _states_of(tensors: Iterable[torch.Tensor]) -> Iterator[dict[str, Any]]:
    """Yield the attributes of tensors, and those of the objects among them: scales of a 4-bit weight, and theirs."""
    for tensor in tensors:
        waiting = [tensor]
        for _ in range(3):
            states = [vars(value) for value in waiting if getattr(value, "__dict__", None)]
            yield from states
            waiting = [x for state in states for x in state.values() if _is_plain_object(x)]


def _is_plain_object(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type | torch.Tensor) and not callable(value)


def _lookups_in(guards: Guards) -> Iterator[Lookup]:
    for lookup in guards.lookups:
        if lookup[0] is not None:  # those of the instance are among its attributes
            yield lookup
    for _, of_child in guards.children:
        yield from _lookups_in(of_child)


def _deduplicated(lookups: Iterable[Lookup]) -> list[Lookup]:
    """Keep one lookup for each name, with what is found there now: a guard that broke has stepped aside already."""
    found = {(id(owner), name): (owner, name) for owner, name, _ in lookups}
    return [(owner, name, getattr(owner, name, _MISSING)) for owner, name in found.values()]


def process_state() -> tuple:
    """Return what decides, outside of the model, which kernels its forward and backward pass launch."""
    cuda = torch.backends.cuda
    return (
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch._C._len_torch_function_stack(),
        _len_torch_dispatch_stack(),
        hooks_in_force() is None,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        sum(map(len, _GLOBAL_HOOKS)),
        nn.Module.__call__,
        nn.Module._call_impl,
        F.linear,
        F.scaled_dot_product_attention,
        ALL_ATTENTION_FUNCTIONS.get("sdpa"),
        ALL_MASK_ATTENTION_FUNCTIONS.get("sdpa"),
        ALL_MASK_ATTENTION_FUNCTIONS.get("eager"),
    )


def dropout_is_active(modules: Iterable[nn.Module]) -> bool:
    """Return whether a module would draw random numbers now."""
    for module in modules:
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            return True
        rate = vars(module).get("attention_dropout", 0.0)
        if module.training and isinstance(rate, float) and rate > 0:
            return True
    return False
