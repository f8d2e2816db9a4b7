"""Implements the option `share_prompts`: a prompt is computed once for all rows that start with it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from liger_trainer.head.module import base_model_of
from liger_trainer.varlen import groups
from liger_trainer.varlen.decide import bound_backbone
from liger_trainer.varlen.shared_prompts import SharedPrompts

if TYPE_CHECKING:  # always combined with one of TRL's argument classes
    from transformers import TrainingArguments as StockArguments
else:
    StockArguments = object


@dataclass
class SharedPromptFields(StockArguments):
    """The config field `share_prompts`, for trainers with several rows per prompt in a batch."""

    share_prompts: bool = field(
        default=True,
        metadata={
            "help": "Compute a prompt once for all rows of a batch that start with it, if that saves enough tokens. "
            "Losses, gradients and metrics stay the same up to rounding. The training report says how many tokens were "
            "shared, or why none were. False: each row computes its own prompt."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.share_prompts, bool):
            raise ValueError(f"share_prompts is {self.share_prompts!r}; expected true or false.")


def sharing_rule(args: Any) -> groups.SharingRule | None:
    """Return the rule for sharing prompts with `args` (ours or TRL's), or None if prompts are never shared."""
    return groups.PAYS if getattr(args, "share_prompts", True) else None


def shared_prompts_of(model: nn.Module) -> SharedPrompts | None:
    """Return what rows have shared in `model`, which may be wrapped, or None if no rows of a call started alike."""
    bound = bound_backbone(base_model_of(model))
    return None if bound is None or bound.sharing.is_empty else bound.sharing
