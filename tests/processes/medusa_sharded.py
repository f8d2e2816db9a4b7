"""One of the two ranks of `test_medusa_distributed.py::test_sharded`: `medusa_sharded.py MODE MODEL OUT_DIR`.

MODE is zero3 or fsdp2; it runs on CPU with gloo. The test calls `train` for the same training in one process.
"""

import json
import os
import sys
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from launching import init_deepspeed, shard_on_cpus
from peft import LoraConfig
from tiny_models import ragged_rows, tiny_tokenizer
from torch.distributed.tensor import DTensor

from liger_trainer import LigerMedusaConfig, LigerMedusaTrainer

CASES = {
    "stage1-tied-hard": {},
    "stage1-untied-hard": {"medusa_tied": False},
    "stage1-tied-soft": {"medusa_targets": "soft"},
    "stage2-tied-hard": {"medusa_stage": 2},
    "stage2-untied-hard": {"medusa_stage": 2, "medusa_tied": False},
    "stage2-lora": {"medusa_stage": 2},  # and the full LM head
}
AUTO = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
BUCKETS = ("allgather_bucket_size", "reduce_bucket_size", "stage3_prefetch_bucket_size")
ZERO3 = dict.fromkeys(AUTO, "auto") | {
    "zero_allow_untested_optimizer": True,
    "zero_optimization": dict.fromkeys(BUCKETS, 1e6)
    | {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
        "overlap_comm": False,
    },
}


def train(name, model, out, mode=None, resume=None):
    """Three steps of 16 rows in two micro-batches per process. Saves the heads, the log and, in stage 2, the model."""
    world = int(os.environ.get("WORLD_SIZE", 1)) if mode else 1
    args = LigerMedusaConfig(
        output_dir=out,
        per_device_train_batch_size=8 // world,
        gradient_accumulation_steps=2,
        max_steps=3,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=0.0,
        bf16=False,
        adam_epsilon=1e-3,  # otherwise gradients that are only rounding make full-length steps
        gradient_checkpointing=False,
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        max_length=64,
        medusa_decay=0.7,
        eval_strategy="steps",
        eval_steps=2,
        deepspeed=json.loads(json.dumps(ZERO3)) if mode == "zero3" else None,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"},
        **CASES[name],
    )
    rows = Dataset.from_list(ragged_rows(48))
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]) if "lora" in name else None
    transformers.set_seed(0)  # weights of the adapter
    trainer = LigerMedusaTrainer(
        model,
        args,
        train_dataset=rows,
        eval_dataset=rows.select(range(16)),
        processing_class=tiny_tokenizer(),
        peft_config=lora,
    )
    if mode == "zero3":
        assert next(trainer.model.parameters()).numel() == 0, "the model was loaded in parts"
    trainer.train(resume_from_checkpoint=resume)
    if mode == "fsdp2":
        assert all(isinstance(p, DTensor) for p in trainer.model_wrapped.parameters()), "the model was sharded"
    trainer.save_model(out)
    if trainer.is_world_process_zero():
        numbers = [
            {k: v for k, v in log.items() if k.removeprefix("eval_").startswith(("medusa", "loss"))}
            for log in trainer.state.log_history
        ]
        Path(out, "log.json").write_text(json.dumps([log for log in numbers if log]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, model, root = sys.argv[1:]
    if mode == "zero3":
        init_deepspeed()
    else:
        shard_on_cpus()
    for name in CASES:
        out = f"{root}/{name}"
        train(name, model, out, mode)
        train(name, model, f"{root}/{name}-resumed", mode, resume=f"{out}/checkpoint-2")
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)
