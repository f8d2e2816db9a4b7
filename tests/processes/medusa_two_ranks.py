"""One rank of `test_medusa_distributed.py`: `torchrun --nproc_per_node 2 medusa_two_ranks.py OUT_DIR`, gloo on CPU.

Runs all cases in one launch, because a launch costs more than their steps. Saves gradients and logs by case.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from medusa_brute_force import medusa_trainer, model_with_heads
from tiny_models import ragged_rows

from liger_trainer.verify.observed import KeepGradients

DDP = {
    "stage1-tied-hard": {},
    "stage1-untied-hard": {"medusa_tied": False},
    "stage1-tied-soft": {"medusa_targets": "soft"},
    "stage2-untied-hard": {"medusa_stage": 2, "medusa_tied": False},
}


def ddp(options, out):
    """One optimizer step over 16 rows in two micro-batches, on any number of processes; saves the heads."""
    world, save = int(os.environ.get("WORLD_SIZE", 1)), KeepGradients()
    trainer = medusa_trainer(
        model_with_heads(tied=options.get("medusa_tied", True)),
        Path(out),
        ragged_rows(16),
        {"callbacks": [save]},
        max_steps=1,
        per_device_train_batch_size=8 // world,
        gradient_accumulation_steps=2,
        **options,
    )
    trainer.train()
    trainer.save_model(out)
    logs = {k: v for k, v in trainer.state.log_history[0].items() if k not in ("epoch", "step", "learning_rate")}
    return {"grads": save.steps[0], "logs": logs}


if __name__ == "__main__":
    torch.set_num_threads(1)
    out = sys.argv[1]
    results = {name: ddp(options, f"{out}/{name}") for name, options in DDP.items()}
    torch.save(results, f"{out}/{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort the interpreter on exit, after everything is done
