"""Keeps the experts of gpt-oss in the 4-bit MXFP4 of their checkpoint while adapters are trained around them.

transformers trains such a checkpoint only after dequantizing it. With our `Mxfp4Config` it loads the stored blocks and
scales. Each use of a layer dequantizes them to 16-bit, bit for bit as transformers would have done once.
"""

from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationMethod

from liger_trainer.patching.core.contracts import PackedExperts
from liger_triton import MXFP4Weight

_METHOD = "liger_mxfp4"


class Mxfp4Config(transformers.Mxfp4Config):
    """The `quantization_config` that keeps the experts of an MXFP4 checkpoint 4-bit and frozen in training.

    It has the name of transformers' own class: transformers accepts no other name for such a checkpoint.

        AutoModelForCausalLM.from_pretrained("openai/gpt-oss-20b", quantization_config=Mxfp4Config())
    """

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = _METHOD  # type: ignore[assignment]  # transformers finds the quantizer by this name

    def get_loading_attributes(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method, "dequantize": False}


class PackedGptOssExperts(PackedExperts, GptOssExperts):
    """Experts that store MXFP4 blocks and scales, and dequantize a weight each time transformers' code reads it.

    `gate_up_proj_blocks` is (E, 2 I, H / 32, 16) and `gate_up_proj_scales` (E, 2 I, H / 32), both uint8. `down_proj` is
    stored in the same way.
    """

    unpacked_class = GptOssExperts

    def packed(self, name: str) -> MXFP4Weight:
        """Return `gate_up_proj` (E, 2 I, H) or `down_proj` (E, H, I)."""
        blocks, scales, bias = (self._parameters[f"{name}_{part}"] for part in ("blocks", "scales", "bias"))
        return MXFP4Weight(blocks.flatten(-2), scales, bias.dtype)  # type: ignore[union-attr]  # none is None

    @property
    def gate_up_proj(self) -> torch.Tensor:
        return self.packed("gate_up_proj").unpack().mT

    @property
    def down_proj(self) -> torch.Tensor:
        return self.packed("down_proj").unpack().mT


def pack_experts(model: nn.Module, not_converted: list[str] | None = None) -> int:
    """Give the experts of a `meta` model the parameters of an MXFP4 checkpoint. Return how many modules changed.

    Modules that `not_converted` names stay as they are; it has the form of `modules_to_not_convert`.
    """
    modules = [
        module
        for name, module in model.named_modules()
        if type(module) is GptOssExperts and should_convert_module(name, not_converted)
    ]
    for module in modules:
        for name in ("gate_up_proj", "down_proj"):
            experts, inputs, outputs = module._parameters.pop(name).shape  # type: ignore[union-attr]
            for part, size in (("blocks", (inputs // 32, 16)), ("scales", (inputs // 32,))):
                tensor = torch.empty(experts, outputs, *size, dtype=torch.uint8, device="meta")
                module.register_parameter(f"{name}_{part}", nn.Parameter(tensor, requires_grad=False))
        module.__class__ = PackedGptOssExperts
    return len(modules)


@register_quantizer(_METHOD)
class _Quantizer(HfQuantizer):
    """Loads blocks and scales under the names in the checkpoint."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            raise ValueError(
                "quantization_config is liger_trainer's Mxfp4Config, but the checkpoint is not in MXFP4. Load it "
                "without quantization_config."
            )

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if not pack_experts(model, self.quantization_config.modules_to_not_convert):
            raise ValueError(
                f"quantization_config is liger_trainer's Mxfp4Config, for the experts of gpt-oss, but "
                f"{type(model).__name__} has none in MXFP4. Load it with transformers.Mxfp4Config(dequantize=True)."
            )

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.quantization_config.quant_method = QuantizationMethod.MXFP4  # the saved model names transformers' method
        model.quantization_method = QuantizationMethod.MXFP4
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True
