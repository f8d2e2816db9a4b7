"""Losses for a training loop of your own: functions of log-probabilities, without logits, transformers or TRL.

TRL has these formulas only inside its trainers. The trainers of this package run them there, and
`tests/liger_trainer/losses/test_losses.py` holds the two equal.
"""

from liger_trainer.losses.linear import linear_loss
from liger_trainer.losses.preference import (
    cpo_loss,
    dpo_loss,
    kto_loss,
    orpo_loss,
    sequence_logprobs,
    simpo_loss,
)

__all__ = ["cpo_loss", "dpo_loss", "kto_loss", "linear_loss", "orpo_loss", "sequence_logprobs", "simpo_loss"]
