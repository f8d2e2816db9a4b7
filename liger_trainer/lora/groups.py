"""Computes LoRA layers with one input, q, k and v of an attention, at once: their adapters and the input's gradient.

Their bases are quantised. With 16 bits, this would gain less than 2 % of a step.

The model's own code still calls each layer and gets its output. The first layer that is called computes the r-wide
products of all. The next one takes its own if everything that they depend on is unchanged (`_state`), and otherwise
computes for itself. So nothing depends on whether the layers really share their input.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from liger_trainer.instance.hooks import has_hooks
from liger_trainer.lora.parts import Tensors
from liger_triton.lora_linear import Float8Weight, LoRAGroup

_PARAMETERS = (nn.Parameter, FakeTensor)  # a parameter without values has the second type


class _Begun:
    """What has been computed for layers that are not called yet.

    Attributes:
        outputs (`tuple` or `None`): What computes them, and the tensors whose ids are in the states. None once they are
            used up or stale.
        waiting (`dict`): The layers to come: module -> (its number in `outputs`, the state that it must have).
    """

    def __init__(self, x: torch.Tensor, members: dict[nn.Module, Tensors]):
        self.outputs: tuple | None = (LoRAGroup(x, list(members.values())), x, members)
        self.waiting = {layer: (k, _state(x, tensors)) for k, (layer, tensors) in enumerate(members.items())}

    def take(self, layer: nn.Module, state: tuple) -> torch.Tensor | None:
        """Return the output of `layer`, or None if something has changed since the first layer was called."""
        outputs, self.outputs = self.outputs, None
        k, expected = self.waiting.pop(layer, (0, None))
        if outputs is None or state != expected or outputs[0].is_spent():
            return None
        y = outputs[0].output(k)
        if self.waiting and y.grad_fn is not None:  # else the next layer begins anew
            self.outputs = outputs
            y.grad_fn.metadata[_Begun] = self  # which lives as long as the graph, and not after an exception
        return y


class InputGroup:
    """Layers of one parent that nearly always get the same input. `tensors_now` returns what one of them multiplies."""

    def __init__(self, layers: list[nn.Module], tensors_now: Callable[[nn.Module, torch.Tensor], Tensors | None]):
        self.layers, self.tensors_now = layers, tensors_now
        self.begun: weakref.ref[_Begun] | None = None

    def output(self, layer: nn.Module, x: torch.Tensor, tensors: Tensors) -> torch.Tensor | None:
        """Return y of one of the layers, or None if it has to compute for itself."""
        if not torch.is_grad_enabled() or any(map(has_hooks, self.layers)):  # a hook may change x behind its version
            return None
        if isinstance(tensors[0], torch.Tensor) or any(t.is_inference() for t in _tensors_of(x, tensors)):
            return None  # another base since; or no version
        state = _state(x, tensors)
        begun = None if self.begun is None else self.begun()
        y = None if begun is None else begun.take(layer, state)
        if y is None and (begun := self._begin(layer, x, tensors)) is not None:
            self.begun = weakref.ref(begun)
            y = begun.take(layer, state)
        return y

    def _begin(self, layer: nn.Module, x: torch.Tensor, tensors: Tensors) -> _Begun | None:
        """Compute the adapters of `layer` and of the layers after it; None if there are none to share with."""
        members = {}
        for other in self.layers[self.layers.index(layer) :]:
            of_other = tensors if other is layer else self.tensors_now(other, x)
            weight, _, adapter = of_other or (None, None, None)
            if of_other and not isinstance(weight, torch.Tensor) and adapter and type(adapter[0]) in _PARAMETERS:
                members[other] = of_other
        return _Begun(x, members) if layer in members and len(members) > 1 else None


def _stored(tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """Return what a weight is made from, some of it as a new view in each call."""
    weight = tensors[0]
    assert not isinstance(weight, torch.Tensor), "no other is a member"
    return tuple(weight) if isinstance(weight, Float8Weight) else weight.stored


def _tensors_of(x: torch.Tensor, tensors: Tensors) -> list[torch.Tensor]:
    _, bias, adapter = tensors
    assert adapter is not None, "no other is a member"
    return [t for t in (*_stored(tensors), x, bias, *adapter[:2]) if t is not None]


def _state(x: torch.Tensor, tensors: Tensors) -> tuple[Any, ...]:
    """Return what the output of a layer depends on: which tensors, in which versions, and in which mode."""
    adapter, device, views = tensors[2], x.device.type, len(_stored(tensors))
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    found: list[Any] = [threading.get_ident(), autocast, adapter and adapter[2]]
    for k, t in enumerate(_tensors_of(x, tensors)):
        found += (k < views or id(t), t.data_ptr(), t._version, t.requires_grad)
    return tuple(found)
