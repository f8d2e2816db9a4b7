"""Rejects options that `LigerEagleTrainer` would silently ignore or train wrongly with."""

from typing import Any

from accelerate import DistributedType
from datasets import Dataset
from torch import nn

from liger_trainer.eagle.config import LigerEagleConfig

_PLAIN = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def check_args(args: LigerEagleConfig, kwargs: dict[str, Any]) -> None:
    """ValueError for options that would be silently ignored. Called before anything is loaded."""
    if not isinstance(args, LigerEagleConfig):
        raise ValueError(f"args is a {type(args).__name__}; expected a LigerEagleConfig.")
    config: Any = args.liger_config or {}
    if not args.use_liger or not config.get("fused_linear_cross_entropy", True):
        name = "liger_config has fused_linear_cross_entropy: false" if args.use_liger else "use_liger is false"
        raise ValueError(f"{name}, but the fused LM head computes the loss of a drafter. Remove that option.")
    ignored = {
        "label_smoothing_factor": args.label_smoothing_factor or None,
        "loss_type": None if args.loss_type == "nll" else args.loss_type,
        "compute_loss_func": kwargs.get("compute_loss_func"),
        "train_mtp": args.train_mtp or None,
        "peft_config": kwargs.get("peft_config"),
        "neftune_noise_alpha": args.neftune_noise_alpha,  # the frozen model runs as it is served
    }
    for name, value in ignored.items():
        if value is not None:
            raise ValueError(f"{name} is {value!r}, but a drafter learns from a frozen model. Remove {name}.")
    if (kwargs.get("optimizers") or (None,))[0] is not None:
        raise ValueError(
            "optimizers has an optimizer that was made before the drafter, so it would not train it. Set args.optim, "
            "or pass optimizer_cls_and_kwargs."
        )


def check_setup(model: nn.Module, accelerator: Any, train_dataset: Any) -> None:
    """ValueError if the drafter could not be trained with this model, these rows or this launch."""
    if getattr(model, "peft_config", None):
        raise ValueError("The model has an adapter. Merge it (merge_and_unload, or `liger-trainer merge`) first.")
    if accelerator.distributed_type not in _PLAIN:
        raise ValueError(
            f"The launch is {accelerator.distributed_type.value}, which shards weights, but a drafter is trained in "
            "one process or with DDP. To save memory, set fp8: it halves the frozen target."
        )
    parallel = getattr(accelerator, "parallelism_config", None)
    if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled or parallel.tp_enabled):
        raise ValueError(
            "parallelism_config splits sequences or weights over ranks, but a drafter is unrolled along whole rows. "
            "Set cp_size, sp_size and tp_size to 1."
        )
    if train_dataset is not None and not isinstance(train_dataset, Dataset):
        raise ValueError(
            f"train_dataset is a {type(train_dataset).__name__}; expected a Dataset, because its labels are counted "
            "for the draft vocabulary. Set streaming to false."
        )
