"""Sends merged weights to an inference engine without changing the base weights.

TRL merges the adapter into the whole model, sends the weights, and subtracts the adapter again. In 16 bits this does
not restore the base: it drifts with each sync, and a saved adapter no longer fits the base that it was trained on. Here
one layer at a time is merged and read, and gets its own weights back, bit for bit and in the same memory. The engine
gets the weights of TRL's first sync.
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


def keep_base_weights(trainer: object) -> None:
    """Make `trainer` send merged weights to its engine, if it has one, without changing the base.

    TRL's own sync stays for sharded models (FSDP, ZeRO-3), for layers that share weights and for nested adapters.
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
    """Yield the names and weights that TRL's method `stock` would yield."""
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
        # TRL's names in TRL's order: it has announced both to a server.
        shown = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if model.prefix in shown or "original_module" in shown:
            continue
        shown = generation._fix_param_name_to_vllm(shown, extra_prefixes=["modules_to_save.default."])
        if place in layers:
            if place != merged_at:
                merged = _merged(layers[place])
                merged_at = place
            yield shown, merged[own_name]
        else:
            yield shown, parameter.data


def _layers_by_base(model: nn.Module) -> dict[str, Any] | None:
    """Return the adapted layers by the names of their base layers, or None if they cannot be merged one by one."""
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
    """Return copies of one layer's merged weights, and restore its own weights."""
    base = layer.base_layer
    parameters = dict(base._parameters)
    own = {name: x.data for name, x in parameters.items() if x is not None}
    copies = {name: x.clone() for name, x in own.items()}
    already = list(layer.merged_adapters)
    caches = dict(getattr(layer, "_caches", {}))
    try:
        with onload_layer(layer):
            layer.merge()
        return {name: x.data.clone() for name, x in base._parameters.items() if x is not None}
    finally:
        # Merging gives a 4-bit layer a new parameter, and a DoRA layer a new tensor.
        base._parameters.update(parameters)
        for name, x in own.items():
            parameters[name].data = x.copy_(copies[name])
        layer.merged_adapters = already
        if hasattr(layer, "_caches"):
            layer._caches = caches
