"""Finds the layers of a decoder that keep a state between tokens, and builds the code that passes them their rows.

These layers are candidates. The proof in `backbone.py` decides whether several rows compute the same together as alone.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from liger_trainer.patching.core.binding import own_class
from liger_trainer.patching.core.guards import Guards, NotProven, code_guards_of, global_lookups
from liger_trainer.patching.core.own_globals import decorated_like, forward_with_globals
from liger_trainer.patching.core.pattern import slot_of
from liger_trainer.varlen import state_layers
from liger_trainer.varlen.proof import convolutions, rules

_CONVOLUTIONS = "causal_conv1d"  # in the names of functions of transformers that a forward calls
_RULES = ("chunk_", "torch_chunk", "mamba", "selective_scan")  # prefixes of the names of rules and scans
_CLASSES = ("LightningAttention",)  # classes with the rule in their own forward


class StateLayers(NamedTuple):
    """The layers of a decoder that keep a state, and the code that passes them the rows of the call.

    Attributes:
        layers (`list`): (name in the decoder, layer, binding) of each.
        forward (`Callable`): The decoder's forward, which passes the rows of the call to these layers as their mask.
        guards (`Guards`): The globals that this forward reads.
    """

    layers: list[tuple[str, nn.Module, state_layers.StateBinding]]
    forward: Callable
    guards: Guards


def find_state_layers(backbone: nn.Module) -> tuple[StateLayers | None, str | None]:
    """Return (`StateLayers`, None), (None, None) without such layers, or (None, why they cannot be passed rows)."""
    layers: list[tuple[str, nn.Module, state_layers.StateBinding]] = []
    for name, module in backbone.named_modules():
        if not is_state_layer(module):
            continue
        slot, reason = slot_of(module)
        if reason is not None:
            return None, f"{name} keeps a state, and {reason}"
        layers.append((name, module, _binding_for(module, slot)))
    if not layers:
        return None, None
    decorated = own_class(backbone).forward
    own = inspect.unwrap(decorated)
    try:
        read = global_lookups(own)
    except NotProven as error:
        return None, str(error)
    if state_layers.MASK_OF_STATES not in [name for _, name, _ in read]:
        return None, "its decoder makes no mask for its layers that keep a state"
    guards = Guards(own_class(backbone), [*code_guards_of(own_class(backbone)).lookups, *read])
    replaced = ((state_layers.MASK_OF_STATES, state_layers.mask_or_rows(own.__globals__[state_layers.MASK_OF_STATES])),)
    return StateLayers(layers, decorated_like(decorated, forward_with_globals(own, replaced)), guards), None


def _binding_for(layer: nn.Module, slot: str) -> state_layers.StateBinding:
    """Return the binding that lets a layer take rows. It uses our convolution if proven, and rules that take rows."""
    cls: Any = own_class(layer)  # Any, because mypy does not consider a class hashable
    forward = state_layers.forward_of(cls)
    decorated = cls.forward
    own = inspect.unwrap(decorated)
    convolution = convolutions.replacement(own.__globals__) if convolutions.NAME in own.__code__.co_names else ()
    rule = rules.replacements(own)
    replaced = convolution + rule
    if not replaced:
        return state_layers.StateBinding(forward, slot)
    try:
        read = global_lookups(own)
    except NotProven:
        return state_layers.StateBinding(forward, slot)
    with_ours = decorated_like(decorated, forward_with_globals(own, replaced))
    guards = Guards(cls, [*code_guards_of(cls).lookups, *read])
    binding = state_layers.StateBinding(forward, slot, with_ours, guards)
    binding.no_capture_reason = rules.why_not_captured(own)
    # A package's rule copies tensors that are not contiguous. Three contiguous parts save it these copies.
    if convolution and rule and convolutions.cuts_result(own):
        in_parts = convolutions.replacement(own.__globals__, in_parts=True)
        binding.in_parts = decorated_like(decorated, forward_with_globals(own, in_parts + rule))
    return binding


def may_go_by_rows(layer: nn.Module, binding: state_layers.StateBinding) -> bool:
    """Return whether a proof on a CPU, with concatenated rows, also holds for `layer` on a GPU."""
    return binding.own is not None and not rules.asks_for_device(inspect.unwrap(own_class(layer).forward))


def is_state_layer(module: nn.Module) -> bool:
    """Return whether `module` takes a mask and has a convolution, a rule or a scan, like a layer that keeps a state."""
    own = inspect.unwrap(own_class(module).forward)
    code = getattr(own, "__code__", None)
    if code is None or not any("mask" in name for name in inspect.signature(own).parameters):
        return False
    if any(_is_depthwise(child) for child in module.children()) or type(module).__name__.endswith(_CLASSES):
        return True
    return calls_rule(own) or any(_CONVOLUTIONS in name for name in _called(own))


def calls_rule(forward: Any) -> bool:
    """Return whether a forward calls a rule or a scan, in addition to a convolution."""
    return any(name.startswith(_RULES) for name in _called(forward))


def _called(forward: Any) -> list[str]:
    """Return the names of the global functions that a forward may call."""
    return [name for name in forward.__code__.co_names if callable(forward.__globals__.get(name))]


def _is_depthwise(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d) and module.groups == module.in_channels > 1
