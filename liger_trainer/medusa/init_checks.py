"""Rejects options that `LigerMedusaTrainer` would silently ignore or train wrongly with."""

from typing import Any

from torch import nn

from liger_trainer.fp8 import feature as fp8_fields
from liger_trainer.medusa.config import LigerMedusaConfig
from liger_trainer.medusa.heads import HEADS_NAME


def check_args(args: LigerMedusaConfig, kwargs: dict[str, Any]) -> None:
    """ValueError for options that would be silently ignored. Called before anything is loaded."""
    if not isinstance(args, LigerMedusaConfig):
        raise ValueError(f"args is a {type(args).__name__}; expected a LigerMedusaConfig.")
    config: Any = args.liger_config or {}
    if not args.use_liger or not config.get("fused_linear_cross_entropy", True):
        name = "liger_config has fused_linear_cross_entropy: false" if args.use_liger else "use_liger is false"
        raise ValueError(f"{name}, but the fused LM head computes the Medusa loss. Remove that option.")
    ignored = {
        "label_smoothing_factor": args.label_smoothing_factor or None,
        "loss_type": None if args.loss_type == "nll" else args.loss_type,
        "compute_loss_func": kwargs.get("compute_loss_func"),
        "train_mtp": args.train_mtp or None,
    }
    for name, value in ignored.items():
        if value is not None:
            raise ValueError(f"{name} is {value!r}, but the Medusa loss has no such option. Remove {name}.")
    if args.medusa_stage == 1 and args.neftune_noise_alpha is not None:
        raise ValueError(
            f"neftune_noise_alpha is {args.neftune_noise_alpha}, but with medusa_stage 1 the model is frozen and runs "
            "as it is served, without noise. Remove neftune_noise_alpha, or set medusa_stage to 2."
        )
    if (kwargs.get("optimizers") or (None,))[0] is not None:
        raise ValueError(
            "optimizers has an optimizer that was made before the heads, so it would not train them. Set args.optim, "
            "or pass optimizer_cls_and_kwargs."
        )


def check_setup(model: nn.Module, args: LigerMedusaConfig, accelerator: Any) -> None:
    """ValueError if the heads could not be trained or saved with this model, adapter or launch."""
    adapters = getattr(model, "peft_config", {})
    if args.medusa_stage == 1 and adapters:
        raise ValueError(
            "medusa_stage is 1, which freezes the model, but the model has an adapter. Set medusa_stage: 2 to train "
            "the adapter too, or merge it into the model first."
        )
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
