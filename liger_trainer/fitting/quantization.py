"""Builds a 4-bit base without values: bitsandbytes layers, or MXFP4 experts, with packed weights of the true sizes."""

import copy
from typing import Any

import torch
from torch import nn

_NESTED_BLOCK = 256  # bitsandbytes quantizes scales in blocks of this size


def quantize(model: Any, config: Any) -> None:
    """Quantize the linear layers of a `meta` model to 4-bit, or pack its MXFP4 experts, as `from_pretrained` does."""
    from liger_trainer.base_weights.mxfp4 import Mxfp4Config, pack_experts

    if isinstance(config, Mxfp4Config):
        pack_experts(model)
        return
    from bitsandbytes.nn import Linear4bit  # type: ignore[import-not-found]
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer: Any = AutoHfQuantizer.from_config(config, pre_quantized=False)
    with torch.device("meta"):
        quantizer.preprocess_model(model, device_map={"": "cpu"})
        for layer in model.modules():
            if isinstance(layer, Linear4bit):
                layer.weight = _packed(layer, model.dtype)
    model.is_loaded_in_4bit = True


def _packed(layer: Any, dtype: torch.dtype) -> nn.Parameter:
    """Return the packed weight as a plain parameter. bitsandbytes' own class cannot be copied on the meta device."""
    from bitsandbytes.functional import QuantState  # type: ignore[import-not-found]

    weight = layer.weight
    offset = None
    nested = None
    absmax = torch.empty(-(-weight.numel() // weight.blocksize))
    code = torch.empty(16)
    if weight.compress_statistics:
        offset = torch.empty(())
        scales = torch.empty(-(-absmax.numel() // _NESTED_BLOCK))
        nested = QuantState(scales, code=torch.empty(256), blocksize=_NESTED_BLOCK, dtype=torch.float32)
        absmax = absmax.to(torch.uint8)
    layer.quant_state = QuantState(
        absmax, weight.shape, code, weight.blocksize, weight.quant_type, dtype, offset, nested
    )
    size = weight.numel() // 2 // weight.quant_storage.itemsize
    packed: Any = nn.Parameter(torch.empty(size, 1, dtype=weight.quant_storage), False)
    packed.quant_state = layer.quant_state
    packed.quant_type = weight.quant_type
    packed.compress_statistics = weight.compress_statistics
    return packed


def add_state(layer: Any, weight: nn.Parameter) -> list[torch.Tensor]:
    """Attach scales without values to the `weight` of a 4-bit `layer`, and return them. Other layers have none."""
    state = layer.__dict__.get("quant_state")
    if state is None:
        return []
    parts = [copy.copy(part) for part in (state, state.state2) if part is not None]
    if len(parts) == 2:
        parts[0].state2 = parts[1]
    weight.quant_state = parts[0]  # type: ignore[attr-defined]
    tensors = []
    for part in parts:
        for name, tensor in list(vars(part).items()):
            if isinstance(tensor, torch.Tensor):
                tensors.append(torch.empty(tensor.shape, dtype=tensor.dtype))
                setattr(part, name, tensors[-1])
    return tensors
