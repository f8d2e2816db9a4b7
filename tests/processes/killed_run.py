"""A training with dropout. As a script, one that is killed after its fifth step: `killed_run.py OUT_DIR`."""

import os
import signal
import sys

from tiny_models import collate, ragged_rows, tiny_model
from transformers import TrainerCallback

from liger_trainer import LigerTrainer, LigerTrainingArguments


def train_with_dropout(out, callbacks=(), **resume):
    """Eight steps with attention dropout and a checkpoint every three steps."""
    args = LigerTrainingArguments(
        output_dir=str(out),
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=3,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=11,
    )
    trainer = LigerTrainer(
        model=tiny_model("llama", attention_dropout=0.1),
        args=args,
        train_dataset=ragged_rows(16),
        data_collator=collate,
        callbacks=list(callbacks),
    )
    trainer.train(**resume)
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], trainer.model


class KillAfter(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    train_with_dropout(sys.argv[1], [KillAfter()])
