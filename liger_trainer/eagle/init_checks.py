"""Refuses, while `LigerEagleTrainer` is built, what would train wrongly or be ignored without a sign."""

from typing import Any

from accelerate import DistributedType
from datasets import Dataset
from torch import nn

from liger_trainer.eagle.config import LigerEagleConfig

_PLAIN = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def check_args(args: LigerEagleConfig, kwargs: dict[str, Any]) -> None:
    """ValueError for what would be silently ignored, before anything is loaded."""
    if not isinstance(args, LigerEagleConfig):
        raise ValueError(f"args is a {type(args).__name__}; expected a LigerEagleConfig.")
    config: Any = args.liger_config or {}
    if not args.use_liger or not config.get("fused_linear_cross_entropy", True):
        name = "liger_config has fused_linear_cross_entropy: false" if args.use_liger else "use_liger is false"
        raise ValueError(f"{name}, but the loss of a drafter is computed by the fused LM head. Remove that option.")
    ignored = {
        "label_smoothing_factor": args.label_smoothing_factor or None,
        "loss_type": None if args.loss_type == "nll" else args.loss_type,
        "compute_loss_func": kwargs.get("compute_loss_func"),
        "train_mtp": args.train_mtp or None,
        "peft_config": kwargs.get("peft_config"),
    }
    for name, value in ignored.items():
        if value is not None:
            raise ValueError(f"{name} is {value!r}, and a drafter learns from a frozen model. Remove {name}.")
    if (kwargs.get("optimizers") or (None,))[0] is not None:
        raise ValueError(
            "optimizers has an optimizer, which was made before the drafter and would not train it. Set args.optim, or "
            "pass optimizer_cls_and_kwargs."
        )


def check_setup(model: nn.Module, accelerator: Any, train_dataset: Any) -> None:
    """ValueError for a model, rows or a launch with which the drafter would not be trained as asked."""
    if getattr(model, "peft_config", None):
        raise ValueError("The model has an adapter. Merge it (merge_and_unload, or `liger-trainer merge`) first.")
    if accelerator.distributed_type not in _PLAIN:
        raise ValueError(
            f"The launch is {accelerator.distributed_type.value}, which shards weights; a drafter is trained on one "
            "process, or on several with DDP. The target is frozen: fp8 halves it."
        )
    parallel = getattr(accelerator, "parallelism_config", None)
    if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled or parallel.tp_enabled):
        raise ValueError(
            "parallelism_config splits sequences or weights over ranks, and a drafter is unrolled along whole rows. "
            "Set cp_size, sp_size and tp_size to 1."
        )
    if train_dataset is not None and not isinstance(train_dataset, Dataset):
        raise ValueError(
            f"train_dataset is a {type(train_dataset).__name__}; expected a Dataset: its labels are counted for the "
            "draft vocabulary. Set streaming to false."
        )
