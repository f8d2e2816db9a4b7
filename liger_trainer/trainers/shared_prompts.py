"""Implements the option `share_prompts`: rows with the same prompt compute it once."""

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
    """The config field `share_prompts`, for trainers with several rows per prompt in a batch."""

    share_prompts: bool = field(
        default=True,
        metadata={
            "help": "Compute a prompt once for all rows of a batch that begin with it, if that saves enough tokens. "
            "Losses, gradients and metrics stay the same up to rounding. The report of the training says how many "
            "tokens were shared, or why none were. False: each row computes its own prompt."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.share_prompts, bool):
            raise ValueError(f"share_prompts is {self.share_prompts!r}; expected true or false.")


def sharing_rule(args: Any) -> groups.SharingRule | None:
    """Return the rule for sharing prompts in `args` (ours or stock ones), or None if they are never shared."""
    return groups.PAYS if getattr(args, "share_prompts", True) else None


def shared_prompts_of(model: Any) -> SharedPrompts | None:
    """Return what rows have shared in `model`, which may be wrapped; None if no rows of a call began alike."""
    bound = bound_backbone(base_model_of(model))
    return None if bound is None or bound.sharing.is_empty else bound.sharing
