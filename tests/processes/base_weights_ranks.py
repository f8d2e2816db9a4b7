"""One of two ranks of `test_base_weights_sharded.py`: `base_weights_ranks.py MODE BASE OUT`, on FSDP2 or ZeRO-3."""

import os
import sys

import torch
import torch.distributed as dist
from launching import init_deepspeed, shard_on_cpus
from medusa_sharded import ZERO3
from transformers import AutoModelForCausalLM

from liger_trainer import LigerTrainer, LigerTrainingArguments

if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, base, out = sys.argv[1:]
    if mode == "fsdp2":
        shard_on_cpus()
        dist.init_process_group("gloo")
    else:
        init_deepspeed()
    args = LigerTrainingArguments(
        out,
        max_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        learning_rate=1e-2,
        save_steps=2,
        optim="adamw_torch",
        disable_tqdm=True,
        deepspeed=ZERO3 if mode == "zero3" else None,
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32", attn_implementation="eager")
    rows = [{"input_ids": list(range(3, 19)), "labels": list(range(3, 19))}] * 8
    trainer = LigerTrainer(model, args, train_dataset=rows)
    trainer.train()
    trainer.save_model()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
