"""Weights for an engine that generates, with an adapter merged in and the base left as it is.

TRL merges the adapter into the whole model before it sends the weights, and subtracts it afterwards. In 16 bits what
is left is not what was there: the base moves a little with each sync, and a saved adapter belongs to another base than
the one that it was trained on. Here each layer is merged by itself, read, and given its own weights back, bit by bit
and in the same memory. The engine gets what TRL's first sync would have sent.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, onload_layer
from torch import nn

from liger_trainer.patching.core.hooks import comes_from


def keep_base_weights(trainer: Any) -> None:
    """Have the engine of `trainer`, if it has one, get merged weights while the base keeps its own.

    Sharded models (FSDP, ZeRO-3) keep TRL's way, and so do layers that share weights, or adapters on adapters.
    """
    generation: Any = getattr(trainer, "vllm_generation", None)
    stock = getattr(generation, "_iter_named_params", None)
    if stock is None or not comes_from(stock, "trl."):
        return
    sharded = generation._dist.is_fsdp or generation._dist.is_zero3
    model = generation.model
    has_layers = isinstance(model, PeftModel) and isinstance(model.base_model, BaseTuner)
    if has_layers and not sharded:
        generation._iter_named_params = functools.partial(_named_weights, generation, stock)


def _named_weights(generation: Any, stock: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights that `stock`, TRL's method, would yield, under the same names."""
    model = generation.model
    layers = _layers_by_base(model)
    if layers is None:
        yield from stock()
        return
    model.base_model._check_merge_allowed()
    merged: dict[str, torch.Tensor] = {}
    merged_at = ""
    for name, parameter in model.named_parameters():
        place, _, own_name = name.rpartition(".")
        # The names that TRL gives, in the order in which it sends them: it has announced them to a server.
        shown = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if model.prefix in shown or "original_module" in shown:
            continue
        shown = generation._fix_param_name_to_vllm(shown, extra_prefixes=["modules_to_save.default."])
        if place in layers:
            if place != merged_at:
                merged, merged_at = _merged(layers[place]), place
            yield shown, merged[own_name]
        else:
            yield shown, parameter.data


def _layers_by_base(model: nn.Module) -> dict[str, Any] | None:
    """Return the adapters' layers by the names of their base layers; None if these cannot be merged one by one."""
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    found = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        base = getattr(layer, "base_layer", None)
        if not isinstance(base, nn.Module) or isinstance(base, BaseTunerLayer) or any(base.children()):
            return None
        if any(owners[id(parameter)] > 1 for parameter in base.parameters()):
            return None
        found[f"{name}.base_layer"] = layer
    return found


def _merged(layer: Any) -> dict[str, torch.Tensor]:
    """Return copies of the merged weights of one layer, which has its own again."""
    base = layer.base_layer
    parameters = dict(base._parameters)
    own = {name: x.data for name, x in parameters.items() if x is not None}
    copies = {name: x.clone() for name, x in own.items()}
    already, caches = list(layer.merged_adapters), dict(getattr(layer, "_caches", {}))
    try:
        with onload_layer(layer):
            layer.merge()
        return {name: x.data.clone() for name, x in base._parameters.items() if x is not None}
    finally:
        # A layer of four bits gets a new parameter when it is merged, and DoRA's a new tensor.
        base._parameters.update(parameters)
        for name, x in own.items():
            parameters[name].data = x.copy_(copies[name])
        layer.merged_adapters = already
        if hasattr(layer, "_caches"):
            layer._caches = caches
