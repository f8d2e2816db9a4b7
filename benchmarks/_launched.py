"""Time `liger-trainer` as one process of a launcher: `_launched.py train RECIPE ...`. For `launchers.py`."""

import json
import os
import signal
import sys
import time

import torch
from transformers import TrainerCallback, trainer

SETTINGS = "LAUNCHERS_SETTINGS"  # an environment variable with the settings of `launchers.py`, as JSON


class Clock(TrainerCallback):
    """Records when steps end and what is logged. The main process writes the file."""

    def __init__(self):
        self.settings = json.loads(os.environ[SETTINGS])
        self.ends = {}
        self.tokens = {}
        self.resumed = 0
        self.row = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.resumed = state.global_step

    def on_step_begin(self, args, state, control, **kwargs):
        rank, step = self.settings.get("kill", (None, None))
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first and args.process_index == rank and state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends[state.global_step] = time.time()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "num_tokens" in logs:  # of all processes since the run began
            self.tokens[state.global_step] = logs["num_tokens"]

    def on_train_end(self, args, state, control, **kwargs):
        first, last = self.resumed + self.settings["skip"], state.global_step
        if last <= first:  # after a restart few steps are left
            first = self.resumed + 1
        if state.is_world_process_zero:
            seconds = self.ends[last] - self.ends[first]
            tokens = self.tokens[last] - self.tokens[first]
            self.row = {
                "tokens_of_all_per_s": tokens / seconds,
                "step_ms": seconds / (last - first) * 1e3,
                "gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
                "first_step_s": self.ends[self.resumed + 1] - self.settings["began"],
                "losses": [log["loss"] for log in state.log_history if "loss" in log],
                "resumed": self.resumed or None,
            }
            self.write()
        if not self.settings["save"]:
            if args.world_size > 1:
                torch.distributed.barrier()
            os._exit(0)  # the model of 8B parameters would take longer to save than to train for these steps

    def write(self):
        with open(self.settings["file"], "w") as file:
            json.dump(self.row, file)


def main():
    from liger_trainer.command.main import main as entry

    clock = Clock()
    trainer.DEFAULT_CALLBACKS.append(clock)
    code = entry()
    if clock.row is not None:  # the entry has saved the model
        clock.row["save_s"] = time.time() - clock.ends[max(clock.ends)]
        clock.write()
    sys.exit(code)


if __name__ == "__main__":
    main()
