"""The place in a model where each call of a layer is decided: whether its activations are kept.

A model of transformers calls each checkpointed layer through a function, `_gradient_checkpointing_func`. While a
trainer trains, a `Switch` takes its place and asks the trainer for each call. No hook is added, so everything inside
the layers stays as it is.
"""

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from liger_trainer.memory.plan import Size
from liger_trainer.patching.core.contracts import LimitsAttention
from liger_trainer.patching.core.modules import modules_of

_ATTRIBUTE = "_gradient_checkpointing_func"
_SETTER = "_set_gradient_checkpointing"
Decide = Callable[["Switch", Callable[..., Any], tuple[Any, ...]], Any]


class Switch:
    """Stands for the function that checkpoints the layer `module`.

    A copy or a pickle of the model has the plain function of torch instead.
    """

    def __init__(self, decide: Decide, module: nn.Module, checkpointed: Callable[..., Any]):
        self.decide, self.module = decide, weakref.ref(module)
        self.checkpointed = checkpointed  # the function that was there before
        self.layer = id(module)  # also the same in the next switch of this layer
        weights = _weights_of(module)
        sizes = tuple(getattr(p, "ds_shape", p.shape) for p in weights)
        learns = any(p.requires_grad for p in weights)  # a frozen layer holds less
        self.casts = sum(p.numel() * 2 for p in weights if p.dtype == torch.float32)  # bytes that autocast makes
        self.group = (type(module).__qualname__, sizes, learns)  # equal for layers that are built alike

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.decide(self, function, args)

    def __eq__(self, other: object) -> bool:
        """Return whether `other` decides alike about the same layer: checkpointing was switched off and on again."""
        if not isinstance(other, Switch):
            return NotImplemented
        same_layer = self.layer == other.layer and self.decide == other.decide
        return same_layer and are_alike(self.checkpointed, other.checkpointed)

    def __hash__(self) -> int:
        return hash(self.layer)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _plain_checkpoint, ()


def _plain_checkpoint() -> Callable[..., Any]:
    """Return PyTorch's non-reentrant checkpointing, for the copy of a switch."""
    return functools.partial(checkpoint, use_reentrant=False)


def are_alike(one: Any, other: Any) -> bool:
    """Return whether two functions are the same, or two partials with the same function and the same arguments."""
    if one is other:
        return True
    if not (type(one) is type(other) is functools.partial):
        return False
    return (one.func, one.args, one.keywords) == (other.func, other.args, other.keywords)


def options_of(checkpointed: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the options of PyTorch's non-reentrant `checkpoint`, or None if `checkpointed` is anything else."""
    if not isinstance(checkpointed, functools.partial) or checkpointed.func is not checkpoint or checkpointed.args:
        return None
    return checkpointed.keywords if checkpointed.keywords.get("use_reentrant") is False else None


def install(model: nn.Module, decide: Decide) -> None:
    """Put switches into `model`. They come back when checkpointing is turned off and on again."""
    remove(model)
    for module in model.modules():
        method = getattr(module, _SETTER, None)
        if getattr(method, "__self__", None) is module:  # a wrapper shows the methods of the model that it wraps
            module.__dict__[_SETTER] = _Setter(module, decide)
    _put(model, decide)


def switches_of(model: nn.Module) -> list[Switch]:
    """Return all switches in `model`, in the order of its modules."""
    found = (vars(module).get(_ATTRIBUTE) for module in model.modules())
    return [switch for switch in found if isinstance(switch, Switch)]


def remove(model: nn.Module) -> None:
    """Undo `install`."""
    for module in model.modules():
        if isinstance(vars(module).get(_SETTER), _Setter):
            del module.__dict__[_SETTER]
        switch = vars(module).get(_ATTRIBUTE)
        if isinstance(switch, Switch):
            setattr(module, _ATTRIBUTE, switch.checkpointed)


def _weights_of(layer: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of `layer`, each once, in the order of `nn.Module.parameters`."""
    found: dict[nn.Parameter, None] = {}
    for module in modules_of(layer):
        weights = module.__dict__["_parameters"].values()
        found.update(dict.fromkeys(weights))
    found.pop(None, None)  # type: ignore[call-overload]  # a bias that is left out
    return list(found)


def _put(model: nn.Module, decide: Decide) -> None:
    """Put a switch in each place that has none.

    TRL turns checkpointing off and on around each pass of a reference, so this is done twice in a step.
    """
    for module in modules_of(model):
        function = vars(module).get(_ATTRIBUTE)
        if function is not None and not isinstance(function, Switch):
            setattr(module, _ATTRIBUTE, Switch(decide, module, function))


class _Setter:
    """Stands for the method of `model` that turns checkpointing on and off, and puts the switches in again."""

    def __init__(self, model: nn.Module, decide: Decide):
        self.model, self.decide = model, decide
        self.__signature__ = inspect.signature(_setter_of(model))  # transformers looks for a parameter of an older form

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        _setter_of(self.model)(*args, **kwargs)
        _put(self.model, self.decide)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _setter_of, (self.model,)


def _setter_of(model: nn.Module) -> types.MethodType:
    """Return the method that the class of `model` has for turning checkpointing on and off."""
    return types.MethodType(getattr(type(model), _SETTER), model)


def inputs_of(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return all inputs of a layer, also those that are bound to `function` by name."""
    return (*args, *getattr(function, "keywords", {}).values())


def hidden_of(function: Callable[..., Any], args: tuple[Any, ...]) -> torch.Tensor | None:
    """Return the hidden states (rows, length, ...) among the inputs of a layer, or None."""
    return next((x for x in inputs_of(function, args) if getattr(x, "ndim", 0) >= 2 and x.is_floating_point()), None)


def size_of(hidden: torch.Tensor) -> Size:
    """Return the size of hidden states: (rows, length, ...), or (tokens, width) of rows packed into one."""
    return Size(1, hidden.shape[0]) if hidden.ndim == 2 else Size(hidden.shape[0], hidden.shape[1])


def longest_of(function: Callable[..., Any], args: tuple[Any, ...], hidden: torch.Tensor) -> int:
    """Return how many tokens a token of the layer attends to at most.

    For rows packed into one, the layer gets a mask that knows them. With other masks attention computes all pairs of
    tokens.
    """
    for x in inputs_of(function, args):
        if isinstance(x, LimitsAttention):
            return x.most_seen()
    return size_of(hidden).length


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors in nested containers that PyTorch knows."""
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
