"""The model of a recipe without values: its classes, shapes, dtypes and our patches, and no memory."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from liger_trainer.fitting import attention
from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear
from liger_trainer.fp8.quantize_base import quantize_base
from liger_trainer.patching import apply_liger


@dataclass
class Shape:
    """What decides the sizes of a model's tensors.

    Attributes:
        config (`PretrainedConfig`): The model's.
        dtype (`torch.dtype`): Of its weights.
        peft_config (`PeftConfig`, *optional*): The adapter that is trained in its place.
        fp8 (`bool`): Whether the frozen layers under the adapter are in eight bits.
        liger_config (`dict`, *optional*): What of the patches is switched off, as in `apply_liger`.
        trust_remote_code (`bool`): Whether its code comes with it.
    """

    config: PretrainedConfig
    dtype: torch.dtype
    peft_config: Any = None
    fp8: bool = False
    liger_config: dict[str, bool] | None = None
    trust_remote_code: bool = False


def on_meta(shape: Shape, adapter: bool = True) -> nn.Module:
    """The model as the trainer would train it, on PyTorch's meta device.

    Args:
        shape (`Shape`): What it is made of.
        adapter (`bool`): Whether it has the adapter. The reference model of a preference loss has none.
    """
    attention.register()
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            shape.config, dtype=shape.dtype, attn_implementation=attention.NAME,
            trust_remote_code=shape.trust_remote_code,
        )  # fmt: skip
        if adapter and shape.peft_config is not None:
            from peft import get_peft_model

            model = get_peft_model(model, shape.peft_config)
            if shape.fp8:
                quantize_base(model)
    apply_liger(model, shape.liger_config)
    return model.train()


def freed_by_fp8(model: nn.Module) -> int:
    """How many bytes fewer the layers in eight bits take than they took before."""
    layers = [module for module in model.modules() if type(module) is FrozenFloat8Linear]
    return sum(
        bits.numel() * layer.compute_dtype.itemsize - bits.nbytes - scale.nbytes
        for layer in layers
        for bits, scale in (layer.float8,)
    )


@dataclass(frozen=True)
class Weight:
    """A parameter without values.

    Attributes:
        hollow (`nn.Parameter`): With the dtype in which it is computed with.
        dtype (`torch.dtype`): In which it is stored and trained.
        first (`nn.Parameter`): In the first module that has it, whose gradient arrives last. `hollow` is in the last.
    """

    hollow: nn.Parameter
    dtype: torch.dtype
    first: nn.Parameter

    @property
    def trained(self) -> bool:
        return self.hollow.requires_grad

    def bytes(self, dtype: torch.dtype | None = None) -> int:
        return self.hollow.numel() * (dtype or self.dtype).itemsize


def without_values(model: nn.Module, dtype: torch.dtype | None = None) -> list[Weight]:
    """Put tensors of the active `FakeTensorMode` in the place of all parameters and buffers of `model`.

    A parameter that several modules share becomes one for each of them, and the last is listed. The gradients of the
    others are forgotten as soon as they are there, as if they were added to that of the last. (Autograd does not add
    tensors without values in place, as it does all others.)

    Args:
        model (`nn.Module`): Is on the meta device.
        dtype (`torch.dtype`, *optional*): In which parameters are computed with, if not in their own.
    """
    found: dict[int, Weight] = {}
    originals = list(model.parameters())  # alive, so that each has an id of its own
    assert all(original.is_meta for original in originals)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            to = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
            hollow = nn.Parameter(torch.empty(parameter.shape, dtype=to), parameter.requires_grad)
            module._parameters[name] = hollow
            before = found.pop(id(parameter), None)
            if before is not None and before.trained:
                before.hollow.register_post_accumulate_grad_hook(_forget)
            found[id(parameter)] = Weight(hollow, parameter.dtype, hollow if before is None else before.first)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return list(found.values())


def _forget(parameter: torch.Tensor) -> None:
    parameter.grad = None
