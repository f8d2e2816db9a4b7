"""One of two ranks on CPUs: `frozen_sharded.py MODE OUT_DIR` trains adapters, or Medusa heads, on an FP8 base.

MODE is fsdp2 or ddp; ddp with one rank is an ordinary process. OUT_DIR contains a folder `model`. Saves the losses, the
gradients of the first step, the adapter, and the part of the base that the first rank holds.
"""

import os
import sys

import torch
import torch.distributed as dist
from datasets import Dataset
from frozen_bases import adapted, fresh_state
from launching import shard_on_cpus
from tiny_models import ragged_rows, tiny_model, tiny_tokenizer
from trainer_parity import logged_values
from transformers import AutoModelForCausalLM

from liger_trainer import LigerMedusaConfig, LigerMedusaTrainer, LigerSFTConfig, LigerSFTTrainer
from liger_trainer.fp8 import feature as fp8_fields
from liger_trainer.fp8.frozen_layer import FrozenFP8Module
from liger_trainer.verify.observed import KeepGradients

# Name: the dtype in which the base is loaded, options. "resumed" continues from a checkpoint of the second step.
CASES = {
    "fp32": (torch.float32, {"bf16": False, "save_strategy": "steps", "save_steps": 2}),
    "resumed": (torch.float32, {"bf16": False, "resume": "fp32"}),
    "from a file": (torch.float32, {"bf16": False}),  # under FSDP2, only the first process reads it
    "checkpointed": (torch.float32, {"bf16": False, "gradient_checkpointing": True}),
    "bf16": (torch.bfloat16, {}),
    "experts": (torch.float32, {"bf16": False}),
    "medusa": (torch.float32, {"bf16": False, "save_strategy": "steps", "save_steps": 2}),
    "medusa, resumed": (torch.float32, {"bf16": False, "resume": "medusa"}),
}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def policy_of(trainer):
    return getattr(getattr(trainer.accelerator.state, "fsdp_plugin", None), "mixed_precision_policy", None)


def train(out, name, world):
    """Four steps of 8 rows, on any number of processes."""
    dtype, options = CASES[name]
    options = dict(options)
    resume = options.pop("resume", None)
    heads = name.startswith("medusa")
    args = (LigerMedusaConfig if heads else LigerSFTConfig)(
        output_dir=f"{out}/{name}",
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=8 // world,
        fp8=True,
        report_to="none",
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        disable_tqdm=True,
        adam_epsilon=1e-3,  # otherwise gradients that are only rounding make full-length steps
        max_length=64,
        **({"save_strategy": "no", "gradient_checkpointing": False} | options),
    )
    save = KeepGradients()
    if name == "from a file":
        model = AutoModelForCausalLM.from_pretrained(f"{out}/model", dtype=dtype, attn_implementation="eager")
    elif name == "experts":
        model = tiny_model("qwen3_moe", dtype=dtype, moe_intermediate_size=32)
    else:
        model = tiny_model("llama", dtype=dtype)
    targets = ["q_proj", "v_proj"] if name == "experts" else "all-linear"
    trainer = (LigerMedusaTrainer if heads else LigerSFTTrainer)(
        model if heads else adapted(model=model, target_modules=targets),
        args,
        processing_class=tiny_tokenizer(),
        train_dataset=Dataset.from_list(ragged_rows(32)),
        callbacks=[save],
    )
    trainer.train(resume_from_checkpoint=None if resume is None else f"{out}/{resume}/checkpoint-2")
    trainer.save_model(f"{out}/{name}/saved")
    layers = [module for module in trainer.model.modules() if isinstance(module, FrozenFP8Module)]
    base = [layer.get_parameter(name) for layer in layers for names in layer.weights.values() for name in names]
    held = [getattr(p, "_local_tensor", p) for p in base]
    return {
        "losses": logged_values(trainer, "loss"),
        "grads": {name: whole(grad) for name, grad in save.steps[0].items()},
        "base": [whole(p).contiguous().view(torch.uint8) for p in base],
        "held": sum(tensor.nbytes for tensor in held),
        "gathered": str(getattr(policy_of(trainer), "param_dtype", None)),
        "swapped": len(trainer.liger_report["frozen_float8" if heads else "lora"].swapped),
        "blocks": len(trainer.liger_report["experts"].swapped),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, out = sys.argv[1:]
    if mode == "fsdp2":
        shard_on_cpus()
    fp8_fields.fault_of_device = lambda device: None
    found = {}
    for name, (_, options) in CASES.items():
        if "resume" in options and mode == "ddp":  # transformers 5.17 cannot do this on CPUs
            continue
        found[name] = train(out, name, int(os.environ["WORLD_SIZE"]))
        fresh_state()
    if os.environ["RANK"] == "0":
        torch.save(found, f"{out}/found.pt")
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)
