"""The option by which rows that share their prompt compute it once, and what a training has shared."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from liger_trainer.head.module import base_model_of
from liger_trainer.varlen import groups
from liger_trainer.varlen.decide import bound_backbone
from liger_trainer.varlen.shared_prompts import SharedPrompts

if TYPE_CHECKING:  # it always goes before a class of arguments of TRL
    from transformers import TrainingArguments as StockArguments
else:
    StockArguments = object


@dataclass
class SharedPromptFields(StockArguments):
    """The field of trainers of which several rows of a batch have one prompt."""

    share_prompts: bool = field(
        default=True,
        metadata={
            "help": "Compute a prompt once for all rows of a batch that begin with it. Losses, gradients and metrics "
            "stay the same up to rounding. It happens where it saves enough tokens. The report of the training says "
            "how many, or why not. False: each row computes its own."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.share_prompts, bool):
            raise ValueError(f"share_prompts is {self.share_prompts!r}; expected true or false.")


def sharing_rule(args: Any) -> groups.SharingRule | None:
    """Return when rows share by `args`, a config of ours or a stock one, or None for never."""
    return groups.PAYS if getattr(args, "share_prompts", True) else None


def shared_prompts_of(model: Any) -> SharedPrompts | None:
    """Return what rows have shared in `model`, which may be wrapped; None where no call had rows that begin alike."""
    bound = bound_backbone(base_model_of(model))
    return None if bound is None or bound.sharing.is_empty else bound.sharing
