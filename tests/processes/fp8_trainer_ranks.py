"""One of two ranks, FSDP2 on CPUs: `fp8_trainer_ranks.py OUT_DIR` trains with `fp8`.

For each case, saves the logs, the weights after four steps, and the calls of our function. The launcher uses the
shipped config, with which only one process reads the model.
"""

import dataclasses
import os
import sys

import torch
import torch.distributed as dist
from fp8_models import multiply_exactly
from launching import shard_on_cpus
from tiny_models import collate, ragged_rows, tiny_model
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.command.run.launch import load_on_every_process
from liger_trainer.fp8 import layers as float8

OTHERS = dict.fromkeys(("rms_norm", "rope", "swiglu", "fused_linear_cross_entropy"), False)
SAVES = {"save_strategy": "steps", "save_steps": 2}
# Evaluating with the weights of the second step, at the end, gives a higher loss.
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True, "eval_steps": 2}
# Name: does torchao's code run, the dtype of the model, options. "resumed" continues from a checkpoint.
CASES = {
    "torchao": (True, torch.float32, {}),
    "ours": (False, torch.float32, SAVES),
    "resumed, full": (False, torch.float32, {"resume": "ours"}),
    "in shards": (False, torch.float32, SAVES | {"kind": "SHARDED"}),
    "best": (False, torch.float32, SAVES | BEST),
    "resumed, sharded": (False, torch.float32, {"resume": "in shards", "kind": "SHARDED"}),
    "torchao, 16 bits": (True, torch.bfloat16, {}),
    "ours, 16 bits": (False, torch.bfloat16, {}),
    "ours, checkpointed": (False, torch.float32, {"gradient_checkpointing": True}),
}


class Emulated(LigerTrainer):
    """Makes accelerate convert with emulated products, because there is no GPU."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        handler = self.accelerator.ao_recipe_handler
        assert not handler.config.enable_fsdp_float8_all_gather, "accelerate's default is otherwise"
        handler.config = dataclasses.replace(handler.config, emulate=True)


class Begins(TrainerCallback):
    """Forgets the calls that proofs made."""

    def __init__(self, calls):
        self.calls, self.begun = calls, False

    def on_epoch_begin(self, args, state, control, **kwargs):
        if not self.begun:
            self.calls.clear()
        self.begun = True


def run(out, name, torchao, dtype, options, calls):
    options = dict(options)
    resume, kind = options.pop("resume", None), options.pop("kind", "FULL")
    args = LigerTrainingArguments(
        output_dir=f"{out}/{name}",
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=2,
        fp8=True,
        gradient_accumulation_steps=2,
        report_to="none",
        logging_steps=1,
        eval_strategy="steps",
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        remove_unused_columns=False,
        disable_tqdm=True,
        adam_epsilon=1e-3,  # otherwise gradients that are only rounding make full-length steps
        liger_config=OTHERS | {"float8": not torchao},
        **({"save_strategy": "no", "eval_steps": 1} | options),
    )
    trainer = Emulated(
        model=tiny_model("llama", dtype=dtype),
        args=args,
        train_dataset=ragged_rows(32),
        eval_dataset=ragged_rows(4),
        data_collator=collate,
        callbacks=[Begins(calls)],
    )
    before = {n: p.detach().float() for n, p in trainer.model.named_parameters()}
    plugin = trainer.accelerator.state.fsdp_plugin
    plugin.state_dict_config = plugin.optim_state_dict_config = None  # left from the trainer before
    plugin.set_state_dict_type(f"{kind}_STATE_DICT")
    trainer.train(resume_from_checkpoint=None if resume is None else f"{out}/{resume}/checkpoint-2")
    logs = list(trainer.state.log_history[:-1])
    if name == "best":
        trainer.evaluate()
        logs.append(trainer.state.log_history[-1])
    for module in trainer.model_wrapped.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # weights that an evaluation has left gathered
    return {
        "logs": [log["loss" if "loss" in log else "eval_loss"] for log in logs],
        "weights": {n: p.detach().full_tensor() for n, p in trainer.model_wrapped.named_parameters()},
        "before": before,
        "saved": trainer.accelerator.get_state_dict(trainer.model_wrapped),
        "calls": len(calls),
        "of": sorted(set(calls)),
        "swapped": len(trainer.liger_report["float8"].swapped),
    }


def main(out):
    multiply_exactly()
    shard_on_cpus()
    load_on_every_process(True, None, None)
    calls, own = [], float8.float8_linear

    def counted(x, weight, *args, **options):
        calls.append(type(weight).__name__)
        return own(x, weight, *args, **options)

    float8.float8_linear = counted
    found = {name: run(out, name, *case, calls) for name, case in CASES.items()}
    if os.environ["RANK"] == "0":
        torch.save(found, f"{out}/found.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
