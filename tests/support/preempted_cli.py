"""`liger-trainer` as one process of torchrun, in which a rank is killed or gets SIGTERM: `preempted_cli.py train ...`.

HIT says which rank, after which step and by which signal in the first attempt (`1:5:9`).
"""

import os
import sys

from transformers import TrainerCallback, trainer


class Hit(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        rank, step, number = map(int, os.environ["HIT"].split(":"))
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if first and args.process_index == rank and state.global_step == step:
            os.kill(os.getpid(), number)


if __name__ == "__main__":
    from liger_trainer.command.main import main

    if "HIT" in os.environ:
        trainer.DEFAULT_CALLBACKS.append(Hit)
    sys.exit(main())
