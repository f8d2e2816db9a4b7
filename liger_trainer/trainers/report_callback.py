"""The callback by which every Liger trainer writes its report next to its checkpoints."""

import os
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from liger_trainer.trainers.base import LigerTrainerMixin


class ReportCallback(TrainerCallback):
    """Writes `liger_report.json` into `output_dir` when training starts, and when it ends what was chosen meanwhile."""

    def __init__(self, trainer: "LigerTrainerMixin") -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer._swap_converted()
        self._write(args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.trainer.checkpointing is not None:
            self._write(args, state)

    def _write(self, args: TrainingArguments, state: TrainerState) -> None:
        report, chosen = self.trainer.liger_report, self.trainer.checkpointing
        if state.is_world_process_zero and args.output_dir is not None and report is not None:
            report.checkpointing = None if chosen is None else chosen.to_dict()
            os.makedirs(args.output_dir, exist_ok=True)
            report.to_json(os.path.join(args.output_dir, "liger_report.json"))
