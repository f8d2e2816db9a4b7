"""Builds the model of a recipe without values: its classes, shapes, dtypes and our patches, and no memory."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from liger_trainer.fitting import attention, four_bits
from liger_trainer.fp8.frozen_layer import InEightBits
from liger_trainer.fp8.quantize_base import quantize_base
from liger_trainer.patching import apply_liger


@dataclass
class Shape:
    """Everything that decides the sizes of a model's tensors."""

    config: PretrainedConfig
    dtype: torch.dtype  # of its weights
    peft_config: Any = None  # of the adapter that is trained in its place
    fp8: bool = False  # whether the frozen layers under the adapter are in eight bits
    four_bits: Any = None  # a `BitsAndBytesConfig` that puts them into four, or a `Mxfp4Config` that keeps them there
    liger_config: dict[str, bool] | None = None  # as in `apply_liger`
    trust_remote_code: bool = False

    @property
    def has_tower(self) -> bool:
        """Return whether the model sees images."""
        return getattr(self.config, "vision_config", None) is not None


def auto_class_of(config: PretrainedConfig) -> Any:
    """The class that builds the model of `config`, which may be one of images and text."""
    name = (config.architectures or [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)])[0]
    sees = name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def on_meta(shape: Shape, adapter: bool = True) -> nn.Module:
    """Return the model as the trainer would train it, on PyTorch's meta device.

    The reference model of a preference loss is built without `adapter`.
    """
    attention.register()
    with torch.device("meta"):
        model: Any = auto_class_of(shape.config).from_config(
            copy.deepcopy(shape.config), dtype=shape.dtype, attn_implementation=attention.NAME,
            trust_remote_code=shape.trust_remote_code,
        )  # fmt: skip
        if shape.four_bits is not None:
            four_bits.quantize(model, shape.four_bits)
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
    """Return how many bytes fewer the layers and experts in eight bits take than before."""
    return sum(module.freed() for module in model.modules() if isinstance(module, InEightBits))


@dataclass(frozen=True)
class Weight:
    """A parameter without values."""

    fake: nn.Parameter  # in the last module that has it, with the dtype of the computation
    dtype: torch.dtype  # in which it is stored and trained
    first: nn.Parameter  # in the first module that has it, whose gradient arrives last

    @property
    def trained(self) -> bool:
        return self.fake.requires_grad

    def bytes(self, dtype: torch.dtype | None = None) -> int:
        return self.fake.numel() * (dtype or self.dtype).itemsize


def without_values(model: nn.Module, dtype: torch.dtype | None = None) -> list[Weight]:
    """Replace all parameters and buffers of `model`, which is on the meta device, by tensors of the `FakeTensorMode`.

    A parameter that several modules share becomes one for each of them, and the last is listed. The gradients of the
    others are dropped at once, as if they were added to the gradient of the last: autograd does not add tensors without
    values in place, as it does all others. `dtype` is the dtype of the computation, if it is not their own.
    """
    found: dict[int, Weight] = {}
    originals = list(model.parameters())  # alive, so that each has an id of its own
    assert all(original.is_meta for original in originals)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            to = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
            fake = nn.Parameter(torch.empty(parameter.shape, dtype=to), parameter.requires_grad)
            module._parameters[name] = fake
            scales = [nn.Parameter(t, False) for t in (four_bits.add_state(module, fake) if name == "weight" else ())]
            found |= {id(scale): Weight(scale, scale.dtype, scale) for scale in scales}
            before = found.pop(id(parameter), None)
            if before is not None and before.trained:
                before.fake.register_post_accumulate_grad_hook(_forget)
            found[id(parameter)] = Weight(fake, parameter.dtype, fake if before is None else before.first)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return list(found.values())


def _forget(parameter: torch.Tensor) -> None:
    parameter.grad = None
