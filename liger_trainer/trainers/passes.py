"""Resumes at the right row of a data set without a length, if the run passes through the data more than once.

`Trainer` treats a run of `max_steps` over such data as one pass. If the data ends earlier, it starts over, and a run
resumed in its second pass would skip the whole first pass and restart the second. The checkpoint has the right
position: the whole part of its `epoch` is the number of finished passes, and its fraction, times the batches of the
run, is the number of batches in the current pass.
"""

import math
import os
from typing import TYPE_CHECKING, Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import has_length

if TYPE_CHECKING:  # the mixin always goes before a trainer of transformers or TRL
    from transformers import Trainer as StockTrainer
else:
    StockTrainer = object


class ResumesInPass(StockTrainer):
    """Mixin: resumes a pass through an iterable data set at the batch where the earlier run stopped."""

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, resume_from_checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """Return the number of finished passes, and of batches to skip in the next one."""
        stock = super()._init_training_state(max_steps, steps_per_epoch, epochs, resume_from_checkpoint, trial)
        is_known = has_length(self.train_dataset) or not getattr(self.args, "use_liger", True)
        path = os.path.join(resume_from_checkpoint or "", TRAINER_STATE_NAME)
        if resume_from_checkpoint is None or is_known or not os.path.isfile(path):
            return stock
        saved = TrainerState.load_from_json(path)  # `self.state` already has the number of steps of this run
        passes = math.floor(saved.epoch or 0)
        share = (saved.epoch or 0) - passes
        batches = round(share * saved.max_steps * self.args.gradient_accumulation_steps)
        return passes, 0 if self.args.ignore_data_skip else batches
