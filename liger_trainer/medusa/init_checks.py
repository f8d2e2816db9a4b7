"""Rejects options that `LigerMedusaTrainer` would silently ignore or train wrongly with."""

from accelerate import Accelerator
from torch import nn

from liger_trainer.fp8 import feature as fp8_fields
from liger_trainer.head.sharding import spread_reason
from liger_trainer.medusa.config import LigerMedusaConfig
from liger_trainer.medusa.heads import HEADS_NAME


def check_setup(model: nn.Module, args: LigerMedusaConfig, accelerator: Accelerator) -> None:
    """ValueError if the heads could not be trained or saved with this model, adapter or launch."""
    adapters = getattr(model, "peft_config", {})
    for name, config in adapters.items():
        if config.is_prompt_learning:
            raise ValueError(
                f"The adapter {name!r} is {config.peft_type.value}, which puts tokens without labels before the text. "
                "Use LoRA, or train the whole model."
            )
    base_trains = (p.requires_grad for n, p in model.named_parameters() if f"{HEADS_NAME}." not in n)
    if args.medusa_stage == 2 and not any(base_trains):
        raise ValueError("medusa_stage is 2, but all parameters of the model are frozen. Set medusa_stage: 1.")
    if fp8_fields.handler_of(accelerator) is not None:
        raise ValueError(
            "fp8 is asked for and the model is trained without adapters, but the Medusa loss needs the weights of all "
            "heads in 16-bit. Remove fp8, set medusa_stage to 1, or train adapters."
        )
    spread = spread_reason(model)
    if spread is not None:
        raise ValueError(f"Medusa heads are trained, but {spread}")
    parallel = getattr(accelerator, "parallelism_config", None)
    if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
        raise ValueError(
            "parallelism_config splits sequences over ranks (cp_size or sp_size above 1), but the targets of the heads "
            "lie on both sides of a split. Set both to 1."
        )
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is not None and "optimizer" in plugin.deepspeed_config and args.medusa_lr_multiplier != 1:
        raise ValueError(
            f"medusa_lr_multiplier is {args.medusa_lr_multiplier}, but the DeepSpeed config has an `optimizer`, "
            "which has one learning rate for all. Remove it from there, or set medusa_lr_multiplier to 1."
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and "FULL_STATE_DICT" not in str(plugin.state_dict_type):
        raise ValueError(
            f"fsdp_state_dict_type is {plugin.state_dict_type}, so the heads would not be saved. Set it to "
            "FULL_STATE_DICT."
        )
