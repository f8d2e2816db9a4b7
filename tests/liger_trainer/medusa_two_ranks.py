"""One rank of `test_medusa_distributed.py`: `torchrun --nproc_per_node 2 medusa_two_ranks.py OUT_DIR`, gloo on CPU.

All cases in one launch, which costs more than their steps. Saves gradients and logs by case.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from medusa_brute_force import medusa_trainer, model_with_heads
from tiny_models import collate, ragged_rows, tiny_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import TrainerCallback

from liger_trainer import apply_liger

DDP = {
    "stage1-tied-hard": {},
    "stage1-untied-hard": {"medusa_tied": False},
    "stage1-tied-soft": {"medusa_targets": "soft"},
    "stage2-untied-hard": {"medusa_stage": 2, "medusa_tied": False},
}
FSDP2 = DDP | {"stage2-tied-hard": {"medusa_stage": 2}}
COUNT = 40.0  # labels in the batch, as the trainer would say


class SaveGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.grads = {
            n.removeprefix("module."): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }


def ddp(options, out):
    """One optimizer step over 16 rows, however many processes there are, in two micro-batches; the heads are saved."""
    world, save = int(os.environ.get("WORLD_SIZE", 1)), SaveGradients()
    trainer = medusa_trainer(
        model_with_heads(tied=options.get("medusa_tied", True)), Path(out), ragged_rows(16), {"callbacks": [save]},
        max_steps=1, per_device_train_batch_size=8 // world, gradient_accumulation_steps=2, **options,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(out)
    logs = {k: v for k, v in trainer.state.log_history[0].items() if k not in ("epoch", "step", "learning_rate")}
    return {"grads": save.grads, "logs": logs}


def shard(model):
    """The units that accelerate makes: layers, heads, embedding, the final norm together with the LM head, the rest."""
    for unit in (*model.model.layers, *getattr(model, "medusa_head", ()), model.model.embed_tokens):
        fully_shard(unit)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
    fully_shard(model)
    return model


def full_gradients(model):
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


def fsdp2(options, out):
    """An evaluation and two steps on this rank's half of the rows, then what accelerate would hand to `_save`."""
    model = model_with_heads(tied=options.get("medusa_tied", True))
    trainer = medusa_trainer(model, Path(out), **options)
    shard(model)
    rows = collate(ragged_rows(16)[dist.get_rank() :: 2])
    with torch.no_grad():
        trainer.compute_loss(model.eval(), dict(rows))
    model.train()
    for _ in range(2):
        model.zero_grad()
        loss = trainer.compute_loss(model, dict(rows), num_items_in_batch=torch.tensor(COUNT))
        (loss / dist.get_world_size()).backward()  # the trainer multiplies by the ranks, over which FSDP averages
    trainer._save(out, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))
    dist.barrier()
    heads = {name: p.full_tensor() + 1.0 for name, p in model.medusa_head.named_parameters()}
    with torch.no_grad():
        for p in model.medusa_head.parameters():
            p.zero_()
    trainer._load_heads(out)
    same = all(torch.equal(p.full_tensor() + 1.0, heads[name]) for name, p in model.medusa_head.named_parameters())
    return {"grads": full_gradients(model), "loaded": same}


def fsdp2_without_heads():
    """The plain fused head in the same units."""
    model = tiny_model("llama")
    apply_liger(model)
    shard(model).train()
    rows = collate(ragged_rows(16)[dist.get_rank() :: 2])
    for _ in range(2):
        model.zero_grad()
        outputs = model(**rows, num_items_in_batch=torch.tensor(COUNT))
        outputs.loss.backward()
    return {"grads": full_gradients(model), "fused": outputs.logits is None}


if __name__ == "__main__":
    torch.set_num_threads(1)
    out = sys.argv[1]
    results = {f"ddp-{name}": ddp(options, f"{out}/ddp-{name}") for name, options in DDP.items()}
    results |= {f"fsdp2-{name}": fsdp2(options, f"{out}/fsdp2-{name}") for name, options in FSDP2.items()}
    results["fsdp2-plain"] = fsdp2_without_heads()
    torch.save(results, f"{out}/{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort the interpreter on its way out, when all is done
