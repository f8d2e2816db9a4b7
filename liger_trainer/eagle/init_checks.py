"""Rejects launches and rows that `LigerEagleTrainer` could not train with."""

from typing import Any

from accelerate import Accelerator
from datasets import Dataset
from torch import nn

from liger_trainer.head.sharding import sharding_reason


def check_setup(accelerator: Accelerator, model: nn.Module, train_dataset: Any) -> None:
    """ValueError if the drafter could not be trained with this launch, model or rows."""
    split = sharding_reason(accelerator, model)
    if split is not None:
        raise ValueError(f"A drafter is trained, but {split} To save memory, set fp8: it halves the frozen target.")
    if train_dataset is not None and not isinstance(train_dataset, Dataset):
        raise ValueError(
            f"train_dataset is a {type(train_dataset).__name__}; expected a Dataset, because its labels are counted "
            "for the draft vocabulary. Set streaming to false."
        )
