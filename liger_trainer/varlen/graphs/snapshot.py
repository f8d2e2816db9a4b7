"""Compare the state that a captured backbone relies on with its state at the capture, before each replay.

A replay runs no Python. A hook that was added, an adapter that was switched off, a weight that was moved or a flag of
the process that was set would change nothing in it. So all of that is compared first, and any difference sends the call
through the model's own Python code.

The comparison compares a few lists, made once for the snapshot, with `==` or a comprehension. The loop over a list then
runs inside the interpreter. An 8B model with adapters has 2,665 modules, and one line of Python for each of them would
take longer than all comparisons together.

It cannot see numbers inside closures, changes deep inside an object, a replaced code object of a function, and hooks on
the nodes of autograd that add to gradients (`p.expand_as(p).grad_fn...`).
"""

import itertools
from collections.abc import Iterable, Iterator
from operator import attrgetter, itemgetter
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from liger_trainer.memory.switches import are_alike
from liger_trainer.patching.core.binding import Binding
from liger_trainer.patching.core.guards import Guards, Lookup, code_lookups_of
from liger_trainer.patching.core.hooks import HOOK_DICTS
from liger_trainer.patching.core.saved_tensors import active_saved_tensor_hooks

_GLOBAL_HOOKS = [getattr(nn.modules.module, f"_global{name}") for name in HOOK_DICTS]
# These have no forward: only what they hold matters.
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_what_is_held = itemgetter("_modules", "_parameters")
# No forward and no backward reads these: hooks of `state_dict`, and notes about hooks that are there.
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
# Attributes that transformers replaces without a change that a replay could see. TRL switches checkpointing off and on
# around each call of a reference model. That replaces the notes about hooks, and `_CHECKPOINT`, a partial, by one with
# the same function and arguments. A model of images sets `rope_deltas` in each call, which generation reads.
_ROPE_DELTAS = "rope_deltas"
_NOTES = ("_require_grads_hooks", "_require_grads_hook", _ROPE_DELTAS)
_CHECKPOINT = "_gradient_checkpointing_func"
_INCOMPARABLE = (RuntimeError, TypeError, ValueError)  # raised by `==` of containers with different tensors or arrays
_MISSING = object()


class Snapshot:
    """The state of a model's modules and of the process, as far as a replay relies on it.

    Args:
        modules (`list[nn.Module]`): All modules that run, or hold modules that run, within the capture. Also the
            modules around it, because their hooks and forwards decide whether it may be replayed.
        embedding (`nn.Module`, *optional*): The input embedding, which runs before each replay. Its hooks may be
            replaced by others with the same code, like transformers' hook that makes embeddings require a gradient.

    Attributes:
        modules (`list[nn.Module]`): The modules, each once.
        tensors (`list[torch.Tensor]`): Their parameters, buffers and scales, each once.
        trained (`list[nn.Parameter]`): The parameters that require a gradient, each once.
    """

    def __init__(self, modules: list[nn.Module], embedding: nn.Module | None = None):
        self.modules = list({id(module): module for module in modules}.values())
        self._types = list(map(type, self.modules))
        self._running = [module for module in self.modules if type(module) not in _HOLDERS]
        self._attributes = [dict(vars(module)) for module in self._running]
        self._with_rope_deltas = []
        for module, before in zip(self._running, self._attributes, strict=True):
            if _ROPE_DELTAS in before:
                self._with_rope_deltas.append((vars(module), before))
        self._holder_states = [vars(module) for module in self.modules if type(module) in _HOLDERS]
        self._in_holders = list(map(_what_is_held, self._holder_states))

        # Attributes of tensors and of objects. Quantised weights hold their scales there, and bindings whether they
        # have fallen back.
        self.tensors = _distinct(itertools.chain(*map(_tensors_of, self.modules)))
        scales = [x for x in _values_in(_states_of(self.tensors)) if isinstance(x, torch.Tensor)]
        self.tensors = _distinct([*self.tensors, *scales])
        attributes = list(_values_in(map(vars, self.modules)))
        self._bindings = [x for x in attributes if isinstance(x, Binding)]
        # Configs, and the states of quantised layers.
        objects = _distinct(filter(_is_plain_object, attributes))
        held = [*_states_of(self.tensors), *map(vars, self._bindings), *map(vars, objects)]
        self._held = held
        self._held_contents = [dict(state) for state in held]

        states: list[dict[str, Any]] = [x.__dict__ for x in (*self.modules, *objects)]
        containers = _distinct(itertools.chain(*map(_containers_of, states)))
        self._hooks_before = {} if embedding is None else embedding._forward_hooks
        self._codes_before = _codes_of(self._hooks_before)
        containers = [container for container in containers if container is not self._hooks_before]
        self._empty = [container for container in containers if not container]
        self._filled = [container for container in containers if container]
        self._contents = [container.copy() for container in self._filled]

        parameters = [tensor for tensor in self.tensors if isinstance(tensor, nn.Parameter)]
        self._versioned = [p for p in parameters if not p.is_inference()]
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]
        self._strides = [tensor.stride() for tensor in self.tensors]
        self._sizes = [tensor.numel() for tensor in self.tensors]
        self._require_grad = [tensor.requires_grad for tensor in self.tensors]
        self.trained = [x for x in self.tensors if x.requires_grad and isinstance(x, nn.Parameter)]
        holders: list[Any] = [*states, *held, *(container for container in self._filled if isinstance(container, dict))]
        self._scalars = list(_scalars_in(holders))

        classes = dict.fromkeys(self._types)
        self._lookups = _deduplicated([*code_lookups_of(classes), *self._guarded()])
        self._process = process_state()

    def _guarded(self) -> Iterator[Lookup]:
        """Yield what the guards of all bindings look up in classes and Python modules."""
        for binding in self._bindings:
            if not isinstance(binding.guards, Guards):
                continue
            for lookup in binding.guards.all_lookups():
                if lookup[0] is not None:  # lookups on the instance are among its attributes
                    yield lookup

    def versions(self) -> list[int]:
        """Return how often each parameter has been written to. An optimizer's step, or a loading, raises it."""
        return [tensor._version for tensor in self._versioned]

    def is_as_in_forward(self, versions: list[int]) -> bool:
        """Return whether a backward finds the tensors as its forward left them.

        That is: at the same addresses, with the same `requires_grad`, and with parameters not written to since
        `versions`.
        """
        return (
            self.versions() == versions
            and [tensor.data_ptr() for tensor in self.tensors] == self._addresses
            and [tensor.requires_grad for tensor in self.tensors] == self._require_grad
        )

    def holds(self) -> bool:
        """Return whether nothing has changed since the snapshot."""
        return self._is_equal() or (self._adopt_equals() and self._is_equal())

    def _is_equal(self) -> bool:
        # `==` of two containers raises if they have different tensors or arrays in one place: something has changed.
        try:
            return self._is_unchanged()
        except _INCOMPARABLE:
            return False

    def _is_unchanged(self) -> bool:
        for now, before in self._with_rope_deltas:  # `==` of two tensors of one element waits for the GPU
            before[_ROPE_DELTAS] = now.get(_ROPE_DELTAS)
        # `all` and `any` get lists on purpose: a generator would be resumed for each element.
        return (
            self._process == process_state()
            and list(map(type, self.modules)) == self._types
            and list(map(_dict_of, self._running)) == self._attributes
            and list(map(_what_is_held, self._holder_states)) == self._in_holders
            and not any(self._empty)
            and _codes_of(self._hooks_before) == self._codes_before
            and self._filled == self._contents
            and self._held == self._held_contents
            and [tensor.data_ptr() for tensor in self.tensors] == self._addresses
            and [tensor.stride() for tensor in self.tensors] == self._strides
            and [tensor.numel() for tensor in self.tensors] == self._sizes
            and [tensor.requires_grad for tensor in self.tensors] == self._require_grad
            and all([holder.get(name) is tensor for holder, name, tensor in self._scalars])
            and not any([x._backward_hooks or x._post_accumulate_grad_hooks for x in self.trained])
            and all([getattr(owner, name, _MISSING) is value for owner, name, value in self._lookups])
        )

    def _adopt_equals(self) -> bool:
        """Accept attributes that transformers has replaced by equal ones (`_NOTES`, `_CHECKPOINT`).

        Return whether nothing else has changed in the attributes of modules.
        """
        for module, before in zip(self._running, self._attributes, strict=True):
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

    def difference(self) -> str:
        """Say what has changed, if the snapshot does not hold, for the report. It takes some milliseconds."""
        if self._process != process_state():
            return "a flag of the process, such as autocast, a mode of PyTorch or a global hook, has changed"
        for module, cls in zip(self.modules, self._types, strict=True):
            if type(module) is not cls:
                return f"a {cls.__name__} is a {type(module).__name__} now"
        for module, before in zip(self._running, self._attributes, strict=True):
            if vars(module).keys() != before.keys():
                return f"an attribute of a {type(module).__name__} was added or removed"
            for name, value in vars(module).items():
                if not _are_equal([value], [before.get(name, _MISSING)]):  # as lists, where the same NaN is equal
                    return f"{name} of a {type(module).__name__} has changed"
        if _codes_of(self._hooks_before) != self._codes_before:
            return "a hook of the input embedding has changed"
        if any(self._empty):
            return "a hook, a parameter or an adapter was added to a module"
        layouts = zip(self._addresses, self._strides, self._sizes, strict=True)
        for tensor, layout, required in zip(self.tensors, layouts, self._require_grad, strict=True):
            if (tensor.data_ptr(), tensor.stride(), tensor.numel()) != layout:
                return f"a weight {tuple(tensor.shape)} was moved to other memory, or has another shape"
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
    except _INCOMPARABLE:
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


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Keep each object once, by identity."""
    return list({id(value): value for value in values}.values())


def _containers_of(state: dict[str, Any]) -> Iterator[Any]:
    """Yield the dicts, lists and sets among the attributes of an object, and those inside dicts, such as the rotary
    parameters of each kind of layer. Their contents may change in place."""
    for name, value in state.items():
        if name in _UNREAD_CONTAINERS:
            continue
        if isinstance(value, dict | list | set):
            yield value
        if isinstance(value, dict):
            yield from (inner for inner in value.values() if isinstance(inner, dict | list | set))


def _scalars_in(holders: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yield the tensors of one element, each with its holder and its name there.

    They are compared by identity. `==` of two such tensors compares their values, so a replaced tensor would go unseen
    until its value changes.
    """
    for holder in holders:
        for name, value in holder.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1 and name not in _NOTES:
                yield holder, name, value


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor
    for value in vars(module).values():
        if isinstance(value, torch.Tensor):
            yield value


def _states_of(tensors: Iterable[torch.Tensor]) -> Iterator[dict[str, Any]]:
    """Yield the attributes of tensors, such as the scales of a 4-bit weight, and the attributes of these."""
    for tensor in tensors:
        waiting: list[Any] = [tensor]
        for _ in range(3):  # bitsandbytes: a weight, its state, and with double quantization the state of that state
            states = [vars(value) for value in waiting if getattr(value, "__dict__", None)]
            yield from states
            waiting = list(filter(_is_plain_object, _values_in(states)))


def _values_in(states: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """Yield the values of all these dicts."""
    for state in states:
        yield from state.values()


def _is_plain_object(value: Any) -> bool:
    """Return whether a value is an object with attributes, such as a config or the state of a quantised weight."""
    known = isinstance(value, type | torch.Tensor | dict | list | set)
    return hasattr(value, "__dict__") and not known and not callable(value)


def _deduplicated(lookups: Iterable[Lookup]) -> list[Lookup]:
    """Keep one lookup for each name, with its present value.

    The values in `lookups` are not needed: a binding whose guard is broken has fallen back already.
    """
    names = {(id(owner), name): (owner, name) for owner, name, _ in lookups}
    return [(owner, name, getattr(owner, name, _MISSING)) for owner, name in names.values()]


def process_state() -> tuple:
    """Return the settings of the process that decide which kernels a forward and its backward launch."""
    cuda = torch.backends.cuda
    return (
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cuda.matmul.fp32_precision,  # `torch.get_float32_matmul_precision` raises after `torch.backends.fp32_precision`
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch._C._len_torch_function_stack(),
        _len_torch_dispatch_stack(),
        active_saved_tensor_hooks() is None,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_accumulation,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        sum(map(len, _GLOBAL_HOOKS)),
        nn.Module.__call__,
        nn.Module._call_impl,
        F.linear,
        F.scaled_dot_product_attention,
        *ALL_ATTENTION_FUNCTIONS.values(),
        *ALL_MASK_ATTENTION_FUNCTIONS.values(),
        *ALL_EXPERTS_FUNCTIONS.values(),
    )
