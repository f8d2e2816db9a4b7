"""LoRA layers that get the same input one after the other, q, k and v of an attention: their adapters are computed at
once, and so is the gradient of the input.

Each layer is still called by the model's own code, when it likes, and returns its own output. The first of them that
is called with some tensor computes the r-wide products of all. A later one takes its own if it gets this very tensor,
unchanged, and has the adapter that was computed. In any other case it computes for itself, so that nothing depends on
whether the layers really share their input: that they have the names of q, k and v only makes it worth while.
"""

import copy
import threading
from typing import Any, Self

import torch
from torch import nn
from torch._subclasses import FakeTensor

from liger_trainer.instance.binding import Binding
from liger_trainer.instance.hooks import has_hooks
from liger_trainer.patching.lora import LoRABinding, tensors_now
from liger_trainer.patching.lora_parts import Tensors
from liger_triton.lora_linear import Float8Weight, LoRAGroup

NAMES = ("q_proj", "k_proj", "v_proj")
_PARAMETERS = (nn.Parameter, FakeTensor)  # a parameter without values has the second type


def form_groups(model: nn.Module) -> None:
    """Tell the swapped LoRA layers of each attention of each other."""
    for module in model.modules():
        layers = [module._modules[name] for name in NAMES if module._modules.get(name) is not None]
        bindings = [binding for layer in layers if isinstance(binding := Binding.of(layer), LoRABinding)]
        if len(bindings) > 1:
            group = InputGroup(layers)
            for binding in bindings:
                binding.group = group


class _Begun:
    """What has been computed for the layers that are not called yet.

    Attributes:
        x, version: The input, and its version when the first layer got it.
        waiting (`dict`): The layers to come: module -> (its number in `outputs`, its tensors, the state of its A).
    """

    def __init__(self, x: torch.Tensor, members: list[tuple[nn.Module, Tensors]]):
        self.x, self.version, self.mode = x, x._version, _mode(x)
        self.outputs = LoRAGroup(x, [tensors for _, tensors in members])
        self.waiting = {module: (k, tensors, _state_of_a(tensors)) for k, (module, tensors) in enumerate(members)}

    def take(self, layer: nn.Module, x: torch.Tensor, tensors: Tensors) -> torch.Tensor | None:
        """The output of `layer`; None where something is not as it was when the first layer was called."""
        found = self.waiting.pop(layer, None)
        if found is None or x is not self.x or x._version != self.version or self.mode != _mode(x):
            return None
        k, expected, state = found
        if self.outputs.is_spent():
            return None
        same = all([a is b for a, b in zip(_flat(tensors), _flat(expected), strict=True)])
        return self.outputs.output(k) if same and state == _state_of_a(tensors) else None


class InputGroup:
    """Layers of one parent that nearly always get the same input.

    What the first of them has computed is kept here until the last has been called, or until one is called with
    another input. So at most one input of each attention is kept longer than by the model's own code, and only if some
    of its layers are never called.
    """

    def __init__(self, layers: list[nn.Module]):
        self.layers = layers
        self.begun: dict[int, _Begun] = {}  # by thread

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.layers, twin.begun = copy.deepcopy(self.layers, memo), {}
        return twin

    def output(self, layer: nn.Module, x: torch.Tensor, tensors: Tensors) -> torch.Tensor | None:
        """y of one of the layers; None where it has to compute for itself."""
        if not torch.is_grad_enabled() or x.is_inference():  # which has no version
            return None
        if any(map(has_hooks, self.layers)):  # a hook may change x behind its version
            return None
        thread = threading.get_ident()
        begun = self.begun.pop(thread, None)
        y = None if begun is None else begun.take(layer, x, tensors)
        if y is None:
            begun = self._begin(layer, x, tensors)
            y = None if begun is None else begun.take(layer, x, tensors)
        if begun is not None and y is not None and begun.waiting:
            self.begun[thread] = begun
        return y

    def _begin(self, layer: nn.Module, x: torch.Tensor, tensors: Tensors) -> _Begun | None:
        """Compute the adapters of `layer` and of those that follow it; None where it has none to share with."""
        weight = tensors[0]
        if type(weight.scale if isinstance(weight, Float8Weight) else weight) not in _PARAMETERS:
            return None
        members = [(layer, tensors)]
        for other in self.layers[self.layers.index(layer) + 1 :]:
            of_other = tensors_now(other, x)
            if of_other is not None and of_other[2] is not None and type(of_other[2][0]) in _PARAMETERS:
                members.append((other, of_other))
        return _Begun(x, members) if len(members) > 1 else None


def _mode(x: torch.Tensor) -> tuple[bool, torch.dtype | None]:
    """What decides in which dtype a product is computed, beside its factors."""
    device = x.device.type
    on = torch.is_autocast_enabled(device)
    return on, torch.get_autocast_dtype(device) if on else None


def _flat(tensors: Tensors) -> tuple[Any, ...]:
    weight, bias, adapter = tensors
    if isinstance(weight, Float8Weight):  # it is made for each call, of parameters that stay
        weight = weight.scale
    return (weight, bias, *(adapter or ()))


def _state_of_a(tensors: Tensors) -> tuple[int, int]:
    """What changes if the values of A do, in place or by other memory."""
    assert tensors[2] is not None, "only layers with an adapter are members"
    a = tensors[2][0]
    return a._version, a.data_ptr()
