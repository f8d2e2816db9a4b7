"""A base in four bits without values: layers of bitsandbytes, or experts, whose packed weights have the sizes of real
ones."""

import copy
from typing import Any

import torch
from torch import nn

_NESTED_BLOCK = 256  # scales with a scale of their own, as bitsandbytes quantises


def quantize(model: Any, config: Any) -> None:
    """Put the linear layers of `model`, which is on the meta device, or its experts in MXFP4 into four bits as
    `from_pretrained` does."""
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
    """Return the packed weight of `layer`, which was of `dtype`: a plain parameter, since one of bitsandbytes cannot be
    copied on the meta device."""
    from bitsandbytes.functional import QuantState  # type: ignore[import-not-found]

    weight, offset, nested = layer.weight, None, None
    absmax, code = torch.empty(-(-weight.numel() // weight.blocksize)), torch.empty(16)
    if weight.compress_statistics:
        offset, scales = torch.empty(()), torch.empty(-(-absmax.numel() // _NESTED_BLOCK))
        nested = QuantState(scales, code=torch.empty(256), blocksize=_NESTED_BLOCK, dtype=torch.float32)
        absmax = absmax.to(torch.uint8)
    layer.quant_state = QuantState(
        absmax, weight.shape, code, weight.blocksize, weight.quant_type, dtype, offset, nested
    )
    size = weight.numel() // 2 // weight.quant_storage.itemsize
    packed: Any = nn.Parameter(torch.empty(size, 1, dtype=weight.quant_storage), False)
    packed.quant_state, packed.quant_type = layer.quant_state, weight.quant_type
    packed.compress_statistics = weight.compress_statistics
    return packed


def add_state(layer: Any, weight: nn.Parameter) -> list[torch.Tensor]:
    """Give the `weight` of `layer`, which has no values, its scales without values, and return them.

    That is for a layer in four bits. No other has any.
    """
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
