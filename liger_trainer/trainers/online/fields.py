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
            "why they ran. Code of yours that changes weights while rewards are computed needs False, which is TRL's "
            "own way."
        },
    )
    sort_by_prompt: bool = field(
        default=False,
        metadata={
            "help": "Put rows of one prompt together within the micro-batches of a step, which TRL shuffles, so that "
            "more of them compute their prompt once. The gradient of a step stays the same up to rounding. Metrics "
            "that are means of micro-batches move. Needs a loss that is a sum over rows. The report of the training "
            "says what it saves, or would save."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("reuse_log_probs", "sort_by_prompt"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; expected true or false.")
