"""One rank of `test_heads_distributed.py`: `torchrun --nproc_per_node 2 heads_two_ranks.py OUT_DIR BASE`, gloo on CPU.

Runs all cases in one launch, because a launch costs more than their steps. Saves gradients and logs by case.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from eagle_brute_force import eagle_target, eagle_trainer
from mtp_bases import mtp_trainer
from tiny_models import ragged_rows

from liger_trainer.verify.observed import KeepGradients


def ddp(case, out, base):
    """One optimizer step over 16 rows in two micro-batches, on any number of processes; saves the heads."""
    world, save = int(os.environ.get("WORLD_SIZE", 1)), KeepGradients()
    options = {
        "trainer_options": {"callbacks": [save]},
        "max_steps": 1,
        "optim": "sgd",  # AdamW's first step is the sign of a gradient, however small the gradient
        "per_device_train_batch_size": 8 // world,
        "gradient_accumulation_steps": 2,
    }
    if case.startswith("mtp"):
        alone = case == "mtp-alone"
        trainer = mtp_trainer(
            base, out, ragged_rows(16), alone=alone, mtp_targets="soft" if alone else "hard", **options
        )
    else:
        torch.manual_seed(4)
        recompute = case == "eagle-recomputed"
        trainer = eagle_trainer(eagle_target(), Path(out), ragged_rows(16), gradient_checkpointing=recompute, **options)
    trainer.train()
    trainer.save_model(out)
    logs = {k: v for k, v in trainer.state.log_history[0].items() if k not in ("epoch", "step", "learning_rate")}
    return {"grads": save.steps[0], "logs": logs}


CASES = ("eagle", "eagle-recomputed", "mtp", "mtp-alone")

if __name__ == "__main__":
    torch.set_num_threads(1)
    out, base = sys.argv[1:]
    results = {name: ddp(name, f"{out}/{name}", base) for name in CASES}
    torch.save(results, f"{out}/{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort the interpreter on exit, after everything is done
