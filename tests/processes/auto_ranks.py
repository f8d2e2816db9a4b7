"""One of the two ranks of `test_auto_ranks.py`, gloo on CPU: `auto_ranks.py MODE OUT_DIR`.

Saves losses and weights of three trainings: without checkpointing, with all of it, and with `auto`. Per micro-batch it
saves what this rank wanted and what the ranks agreed on. All rows count as long, so the results of attention are kept
too. The ranks differ in their row lengths and in their memory: rank 1 has half way between what it needs without
checkpointing and with all of it. If MODE ends with "-host", activations also go to the host, and rank 0 has less room.
"""

import os
import sys

import torch
import torch.distributed as dist
from launching import shard_on_cpus
from memory_runs import LAYERS, At, Carries, CountedMemory, build, train
from tiny_models import tiny_model

from liger_trainer.memory import selective
from liger_trainer.memory.device_memory import RESERVE
from liger_trainer.memory.ranks import Ranks


def whole(weights):
    return {n: w.full_tensor() if hasattr(w, "full_tensor") else w for n, w in weights.items()}


def noting(agreed):
    least = Ranks.least

    def noted(self, *numbers):
        agreed.append((numbers, least(self, *numbers)))
        return agreed[-1][1]

    Ranks.least = noted


def run(mode, out):
    saved = {}
    agreed = []
    highest = {}
    noting(agreed)
    rank = int(os.environ["RANK"])
    selective.LONG = 2
    for checkpointing in (False, True, "auto"):
        memory = CountedMemory()
        callbacks = []
        if checkpointing == "auto":
            between = highest[True] + 0.5 * (highest[False] - highest[True])
            memory.claims = (1 << 40, int(between / (1 - RESERVE)))[rank]
            if mode.endswith("-host"):
                memory.claims = int((highest[True] + 0.2 * (highest[False] - highest[True])) / (1 - RESERVE))
                memory.carries = Carries((1 << 18, 1 << 24)[rank])
            if mode == "oom" and rank == 1:
                callbacks = [At(4, lambda memory=memory: setattr(memory, "size", 400_000))]
        model = tiny_model("llama", num_hidden_layers=LAYERS)
        model.set_attn_implementation("sdpa")
        trainer = build(f"{out}/{checkpointing}", checkpointing, memory, callbacks, model=model, max_steps=8)
        losses, weights = train(trainer)
        saved[checkpointing] = (losses, whole(weights))
        highest[checkpointing] = memory.highest
    return {"runs": saved, "agreed": agreed, "chosen": trainer.checkpointing.to_dict(), "highest": highest}


if __name__ == "__main__":
    mode, out = sys.argv[1:]
    if mode == "fsdp2":
        shard_on_cpus()
    torch.save(run(mode, out), f"{out}/{os.environ['RANK']}.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort the interpreter on exit, after everything is done
