"""Builds the model of a recipe without values: its classes, shapes, dtypes and our patches, but no memory."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from liger_trainer.fitting import attention, quantization
from liger_trainer.fp8.frozen_layer import FrozenFP8Module
from liger_trainer.fp8.quantize_base import quantize_base
from liger_trainer.patching import apply_liger


@dataclass
class ModelSpec:
    """Everything that decides the sizes of a model's tensors."""

    config: PretrainedConfig
    dtype: torch.dtype  # of the weights
    peft_config: Any = None  # the adapter; None: the model itself is trained
    fp8: bool = False  # whether the frozen base under the adapter is FP8
    quantization: Any = None  # `BitsAndBytesConfig` or `Mxfp4Config` of a 4-bit base
    liger_config: dict[str, bool] | None = None  # as in `apply_liger`
    trust_remote_code: bool = False

    @property
    def has_tower(self) -> bool:
        """Return whether the model takes images."""
        return getattr(self.config, "vision_config", None) is not None


def auto_class_of(config: PretrainedConfig) -> Any:
    """Return the auto class for `config`: image-text-to-text or causal LM."""
    name = (config.architectures or [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)])[0]
    takes_images = name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM


def on_meta(shape: ModelSpec, adapter: bool = True) -> nn.Module:
    """Return the model that the trainer would train, on PyTorch's meta device.

    The reference model of a preference loss is built with `adapter=False`.
    """
    attention.register()
    with torch.device("meta"):
        model: Any = auto_class_of(shape.config).from_config(
            copy.deepcopy(shape.config),
            dtype=shape.dtype,
            attn_implementation=attention.NAME,
            trust_remote_code=shape.trust_remote_code,
        )
        if shape.quantization is not None:
            quantization.quantize(model, shape.quantization)
        if adapter and shape.peft_config is not None:
            from peft import get_peft_model

            model = get_peft_model(model, shape.peft_config)
            if shape.fp8:
                quantize_base(model)
            for parameter in model.parameters():
                if getattr(model, "is_loaded_in_4bit", False) and parameter.requires_grad:
                    parameter.data = parameter.data.to(torch.bfloat16)  # as TRL does it
    apply_liger(model, shape.liger_config)
    attention.attend_once(model)
    return model.train()


def freed_by_fp8(model: nn.Module) -> int:
    """Return how many bytes the FP8 layers and experts take less than before they were quantized."""
    return sum(module.freed() for module in model.modules() if isinstance(module, FrozenFP8Module))


@dataclass(frozen=True)
class Weight:
    """A parameter without values."""

    fake: nn.Parameter  # the copy in the last module that has it, in the compute dtype
    dtype: torch.dtype  # of the stored and trained weight
    first: nn.Parameter  # the copy in the first module that has it: its gradient arrives last

    @property
    def trained(self) -> bool:
        return self.fake.requires_grad

    def bytes(self, dtype: torch.dtype | None = None) -> int:
        return self.fake.numel() * (dtype or self.dtype).itemsize


def without_values(model: nn.Module, dtype: torch.dtype | None = None) -> list[Weight]:
    """Replace all parameters and buffers of a `meta` model by fake tensors, in the dtype of the computation.

    A shared parameter becomes one parameter per module, and the last one is listed. The gradients of the others are
    dropped at once: autograd adds real gradients in place, but not fake ones. `dtype` None: each parameter's own dtype.
    """
    weights: dict[int, Weight] = {}
    originals = list(model.parameters())  # kept alive, so that no id is used twice
    assert all(original.is_meta for original in originals)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            compute_dtype = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
            fake = nn.Parameter(torch.empty(parameter.shape, dtype=compute_dtype), parameter.requires_grad)
            module._parameters[name] = fake
            if name == "weight":
                for tensor in quantization.add_state(module, fake):
                    scale = nn.Parameter(tensor, False)
                    weights[id(scale)] = Weight(scale, scale.dtype, scale)
            before = weights.pop(id(parameter), None)
            if before is not None and before.trained:
                before.fake.register_post_accumulate_grad_hook(_forget)
            weights[id(parameter)] = Weight(fake, parameter.dtype, fake if before is None else before.first)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return list(weights.values())


def _forget(parameter: torch.Tensor) -> None:
    parameter.grad = None
