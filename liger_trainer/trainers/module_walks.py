"""Runs `train()`, `zero_grad()` and `parameters()` of a model in a few sweeps over its modules.

A trainer calls each of them in every step. An 8B model with adapters has 2,665 modules, and PyTorch's generators take
some microseconds for each. Nothing is cached between calls: each call walks over the current modules. If a class or a
module overrides one of these methods, PyTorch's own code runs.

Where a loop would run Python for each module, `map` runs C code instead. The comment above each such line has the loop.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter
from types import MethodType
from typing import Any, Protocol

from accelerate import DistributedType
from torch import nn
from transformers import PreTrainedModel

from liger_trainer.feature import Feature, FeatureTrainer
from liger_trainer.patching.core.modules import modules_of

# The methods that PyTorch's `train` and `parameters` call on each module or on the model, and the implementations that
# count as stock. transformers' `train` does more only when the mode changes.
_TRAIN_CALLS = {
    "train": (nn.Module.train, PreTrainedModel.train),
    "children": (nn.Module.children,),
    "named_children": (nn.Module.named_children,),
    "__setattr__": (nn.Module.__setattr__,),  # it gets `training`
}
_PARAMETERS_CALLS = {"named_modules": (nn.Module.named_modules,)}
_PARAMETERS_CALLS_OF_MODEL = {
    "parameters": (nn.Module.parameters,),
    "named_parameters": (nn.Module.named_parameters,),
    "_named_members": (nn.Module._named_members,),
}
_ZERO_GRAD = nn.Module.zero_grad


def _states_if_stock(model: nn.Module, methods: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]] | None:
    """Return the `__dict__` of each module of `model`, or None if a module overrides one of `methods`.

    Methods bound to `model` itself are not checked: they are ours, or they wrap ours.
    """
    modules = modules_of(model)
    for cls in set(map(type, modules)):
        for name, known in methods.items():
            if getattr(cls, name) not in known:
                return None
    states = [module.__dict__ for module in modules]
    for name in methods:
        # any(name in state for state in states[1:])
        if any(map(contains, states[1:], repeat(name))):
            return None
    return states


def is_training(model: nn.Module) -> bool:
    """Return True if every module is in training mode, so `model.train()` changes nothing. False if unsure."""
    states = _states_if_stock(model, _TRAIN_CALLS)
    if states is None:
        return False
    # all(state.get("training") is True for state in states)
    modes = map(dict.get, states, repeat("training"))
    return all(map(is_, modes, repeat(True)))


def parameters_of(model: nn.Module) -> list[nn.Parameter] | None:
    """Return what `model.parameters()` would yield, in the same order, or None if a module overrides a method."""
    for name, known in _PARAMETERS_CALLS_OF_MODEL.items():
        if name in model.__dict__ or getattr(type(model), name) not in known:
            return None
    states = _states_if_stock(model, _PARAMETERS_CALLS)
    if states is None or "named_modules" in states[0]:
        return None
    # (parameter for state in states for parameter in state["_parameters"].values())
    parameters = chain.from_iterable(map(dict.values, map(itemgetter("_parameters"), states)))
    distinct = dict.fromkeys(parameters)  # in order; modules may share a parameter
    distinct.pop(None, None)  # such as a missing bias
    return list(distinct)


def train(model: nn.Module, mode: bool = True) -> nn.Module:
    """Like `nn.Module.train`, but return at once if every module is already in training mode."""
    if mode is True and is_training(model):
        return model
    return type(model).train(model, mode)


def zero_grad(model: nn.Module, set_to_none: bool = True) -> None:
    """Like `nn.Module.zero_grad`, but look at each parameter only once."""
    is_stock = type(model).zero_grad is _ZERO_GRAD
    parameters = parameters_of(model) if is_stock and set_to_none is True else None
    if parameters is None:
        type(model).zero_grad(model, set_to_none)
        return
    for parameter, gradient in zip(parameters, map(attrgetter("grad"), parameters), strict=True):
        if gradient is not None:
            parameter.grad = None


class WithParameters:
    """Stands in for a model in `Trainer._clip_grad_norm`, which only calls `parameters`."""

    def __init__(self, model: nn.Module):
        self._model = model

    def parameters(self) -> Iterator[nn.Parameter]:
        cached = parameters_of(self._model)
        return self._model.parameters() if cached is None else iter(cached)


class WalkedArguments(Protocol):
    """The trainer argument that the walks read."""

    n_gpu: int


class WalkedTrainer(FeatureTrainer, Protocol):
    """The trainer attributes that the walks read. They only write to its model."""

    args: WalkedArguments
    model: nn.Module | None
    model_init: Callable[..., Any] | None


class ModuleWalks(Feature[WalkedArguments, WalkedTrainer]):
    """Binds `train` and `zero_grad` to the model while it is trained, unless several processes share it."""

    @contextmanager
    def around_training(self, trainer: WalkedTrainer) -> Iterator[None]:
        alone = trainer.accelerator.distributed_type == DistributedType.NO and trainer.args.n_gpu <= 1
        # With `model_init`, the current model is replaced when training begins.
        model_stays = isinstance(trainer.model, nn.Module) and trainer.model_init is None
        if not (trainer.uses_liger and alone and model_stays):
            yield
            return
        model = trainer.model
        state = model.__dict__
        bound = {method.__name__: MethodType(method, model) for method in (train, zero_grad)}
        bound = {name: method for name, method in bound.items() if name not in state}
        state.update(bound)  # a deep copy binds them to itself, and an unpickled model has its class's methods
        try:
            yield
        finally:
            for name, method in bound.items():
                if state.get(name) is method:  # else other code has wrapped or removed it
                    del state[name]
