"""Axolotl: `plugins: [liger_trainer.integrations.axolotl.LigerTrainerPlugin]` in its config."""

import logging
from typing import Any

try:
    from axolotl.integrations.base import BasePlugin  # type: ignore[import-not-found]
    from pydantic import BaseModel, ConfigDict, field_validator, model_validator
except ImportError as error:
    raise ImportError(
        f"liger_trainer.integrations.axolotl is a plugin of Axolotl, but Axolotl cannot be imported ({error}). Run: "
        "pip install axolotl"
    ) from error

from liger_trainer.patching import apply_liger, check_config

logger = logging.getLogger("axolotl.liger_trainer")  # Axolotl shows only warnings of loggers outside "axolotl"

# Axolotl switches these on for adapters, unless the config has one of them.
_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
# Options of Axolotl and its plugins that replace the same modules, or the loss.
_SWAPS = (
    "liger_rope",
    "liger_rms_norm",
    "liger_rms_norm_gated",
    "liger_layer_norm",
    "liger_glu_activation",
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
    "cut_cross_entropy",
    "chunked_cross_entropy",
    *_LORA_KERNELS,
    "use_kernels",
)


class LigerTrainerArgs(BaseModel):
    """Keys that the plugin adds to Axolotl's config.

    Attributes:
        use_liger (`bool`): Patch the model with fused kernels and compute the loss without logits.
        liger_config (`dict`): Switches single operations off, for example `{rope: false}`.
    """

    model_config = ConfigDict(extra="allow")  # Axolotl's own keys

    use_liger: bool = True
    liger_config: dict[str, bool | float] | None = None

    @field_validator("liger_config")
    @classmethod
    def _known_operations(cls, value: dict | None) -> dict | None:
        check_config(value)
        return value

    @model_validator(mode="before")
    @classmethod
    def _one_patch(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        conflicts = [name for name in _SWAPS if data.get(name)]
        if conflicts and data.get("use_liger", True) is not False:
            raise ValueError(
                f"{', '.join(conflicts)} of the config swap the modules that LigerTrainerPlugin swaps. Remove them, or "
                "set use_liger: false."
            )
        return data


class LigerTrainerPlugin(BasePlugin):
    """Patches the loaded model and its adapters. The trainer stays Axolotl's."""

    def register(self, cfg: Any) -> None:
        """Switch Axolotl's LoRA kernels off, unless the config names one of them."""
        if cfg.get("use_liger") is not False and all(cfg.get(name) is None for name in _LORA_KERNELS):
            cfg.update(dict.fromkeys(_LORA_KERNELS, False))

    def get_input_args(self) -> str:
        return f"{__name__}.{LigerTrainerArgs.__name__}"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        if cfg.use_liger is False:  # a missing key is None, and means true
            return
        liger_config = None if cfg.liger_config is None else dict(cfg.liger_config)
        report = apply_liger(model, liger_config)
        logger.info(report.one_line())
