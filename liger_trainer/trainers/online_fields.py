"""The options of trainers that generate their rows."""

from dataclasses import dataclass, field

from liger_trainer.trainers.shared_prompts import SharedPromptFields


@dataclass
class OnlineFields(SharedPromptFields):
    """The fields of GRPO and RLOO."""

    reuse_log_probs: bool = field(
        default=True,
        metadata={
            "help": "Leave out the pass that computes log-probabilities under the policy that wrote the completions, "
            "where the policy has not moved since: the training pass computes the same numbers. Losses, gradients and "
            "metrics stay the same up to rounding. The report of the training says how many passes were left out, or "
            "why they ran. False: TRL's own way."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.reuse_log_probs, bool):
            raise ValueError(f"reuse_log_probs is {self.reuse_log_probs!r}; expected true or false.")
