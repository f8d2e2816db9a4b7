"""`liger-trainer` as one process of torchrun that kills a rank or sends it SIGTERM: `preempted_cli.py train ...`.

HIT names the rank, the step after which it is hit, and the signal, in the first attempt (`1:5:9`). HIT_SAVE does so
for the moment before that rank saves its random state; the signal 0 stands for a disk error.
"""

import os
import sys

from torch.serialization import register_package
from transformers import TrainerCallback, trainer


class Hit(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        rank, step, number = map(int, os.environ["HIT"].split(":"))
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if first and args.process_index == rank and state.global_step == step:
            os.kill(os.getpid(), number)


def save(self, output_dir):
    rank, step, number = map(int, os.environ["HIT_SAVE"].split(":"))
    if self.args.process_index == rank and self.state.global_step == step:
        if not number:
            raise OSError(28, "No space left on device")
        os.kill(os.getpid(), number)
    plain(self, output_dir)


if __name__ == "__main__":
    from liger_trainer.command.main import main

    # With two processes on CPUs, transformers 5.17 has torch restore the optimizer to cpu:0, which torch does not know.
    register_package(0, lambda storage: None, lambda storage, location: storage if location == "cpu:0" else None)
    if "HIT" in os.environ:
        trainer.DEFAULT_CALLBACKS.append(Hit)
    if "HIT_SAVE" in os.environ:
        plain, trainer.Trainer._save_rng_state = trainer.Trainer._save_rng_state, save
    sys.exit(main())
