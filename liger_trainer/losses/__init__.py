"""Losses for a training loop of your own: functions of log-probabilities, which need no logits and no trainer.

The trainers of this package do not use them, because their losses are TRL's own code.
`tests/liger_trainer/losses/test_losses.py` checks that the two agree. Importing this loads neither transformers nor
TRL.
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
