"""One of the two ranks of `test_auto_ranks.py`, gloo on CPU: `auto_ranks.py MODE OUT_DIR`.

Saves losses and weights without checkpointing and with `auto`, and for each micro-batch what this rank wanted and what
was agreed. The ranks have rows of other lengths and memories of other sizes.
"""

import os
import sys

import torch
import torch.distributed as dist
from auto_runs import At, build, train
from counted_memory import CountedMemory
from launching import shard_on_cpus

from liger_trainer.checkpointing.agreement import Ranks


def whole(weights):
    return {n: w.full_tensor() if hasattr(w, "full_tensor") else w for n, w in weights.items()}


def noting(agreed):
    least = Ranks.least

    def noted(self, number):
        agreed.append((number, least(self, number)))
        return agreed[-1][1]

    Ranks.least = noted


def run(mode, out):
    saved, agreed = {}, []
    noting(agreed)
    for checkpointing in (False, "auto"):
        rank = int(os.environ["RANK"])
        memory = CountedMemory() if checkpointing else None
        if memory is not None:
            memory.claims = (1 << 40, 1_500_000)[rank]
        shrink = At(4, lambda memory=memory: setattr(memory, "size", 400_000))
        callbacks = [shrink] if mode == "oom" and rank == 1 and checkpointing else []
        trainer = build(f"{out}/{checkpointing}", checkpointing, memory, callbacks)
        losses, weights = train(trainer)
        saved[checkpointing] = losses, whole(weights)
    return {"runs": saved, "agreed": agreed, "chosen": trainer.checkpointing.to_dict()}


if __name__ == "__main__":
    mode, out = sys.argv[1:]
    if mode == "fsdp2":
        shard_on_cpus()
    torch.save(run(mode, out), f"{out}/{os.environ['RANK']}.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort the interpreter on its way out, when all is done
