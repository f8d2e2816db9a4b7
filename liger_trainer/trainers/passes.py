"""Resumes in the right row of a data set without a length, where a run passes through it more than once.

`Trainer` counts a run of `max_steps` as one pass then. If the data set ends earlier, it begins again, and a run that is
resumed in its second pass would skip the first one and begin the second anew. A checkpoint has what is needed: its
`epoch` is the number of whole passes and, as a share of all batches of the run, the batches of the pass after them.
"""

import math
import os
from typing import TYPE_CHECKING, Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import has_length

if TYPE_CHECKING:  # a mixin, which always goes before a trainer of transformers or TRL
    from transformers import Trainer as StockTrainer
else:
    StockTrainer = object


class ResumesInPass(StockTrainer):
    """Resumes a pass through an iterable data set where the run before has left it."""

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, resume_from_checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """Return the passes that are behind, and the batches of the next one that are skipped."""
        stock = super()._init_training_state(max_steps, steps_per_epoch, epochs, resume_from_checkpoint, trial)
        is_known = has_length(self.train_dataset) or not getattr(self.args, "use_liger", True)
        path = os.path.join(resume_from_checkpoint or "", TRAINER_STATE_NAME)
        if resume_from_checkpoint is None or is_known or not os.path.isfile(path):
            return stock
        saved = TrainerState.load_from_json(path)  # by now the trainer's has the steps of this run
        passes = math.floor(saved.epoch or 0)
        share = (saved.epoch or 0) - passes
        batches = round(share * saved.max_steps * self.args.gradient_accumulation_steps)
        return passes, 0 if self.args.ignore_data_skip else batches
