"""LoRA on a real model and real rows, by TRL with PEFT's layers and by ours: how far their losses are apart.

    python benchmarks/lora_parity.py --data alpaca_en_demo.json [--steps 200] [--json FILE]

Both train the same adapters from the same seed on the same rows in the same order. With `--repeat-stock`, TRL trains a
second time with the attention of `eager` in place of `sdpa`: what rounding in another order alone does to the losses.
`--data` holds rows with `instruction`, `input` and `output`.
"""

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path

import torch
from _measure import DEVICE, Record, table
from medusa_real import load

from liger_trainer import LigerSFTConfig, LigerSFTTrainer
from liger_trainer.lora import layers as lora
from liger_trainer.templates import alpaca_row


def train(arm, options):
    """{"losses", "seconds"} of one run. `arm` is "TRL", "TRL, eager attention" or "ours"."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    lora.LEAST_WORK = 0  # a small model has too little to do for our layers, which are what is compared here
    trainer_class, config_class = (LigerSFTTrainer, LigerSFTConfig) if arm == "ours" else (SFTTrainer, SFTConfig)
    model, tokenizer = load(options.model)
    model = model.to(getattr(torch, options.dtype))
    model.set_attn_implementation("eager" if arm.endswith("eager attention") else "sdpa")
    rows = [alpaca_row(row, k) for k, row in enumerate(json.load(open(options.data)))]
    args = config_class(
        output_dir=tempfile.mkdtemp(), max_steps=options.steps, per_device_train_batch_size=options.batch,
        max_length=options.length, learning_rate=options.learning_rate, lr_scheduler_type="cosine", warmup_steps=10,
        gradient_checkpointing=options.checkpointing, bf16=options.bf16, seed=options.seed, logging_steps=1,
        report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=DEVICE == "cpu",
    )  # fmt: skip
    peft_config = LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, lora_dropout=options.dropout, target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    trainer = trainer_class(
        model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, peft_config=peft_config
    )
    if arm == "ours":
        report = trainer.liger_report["lora"]
        print(f"{len(report.swapped)} LoRA layers are swapped, {len(report.skipped)} are not", flush=True)
    start = time.perf_counter()
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return {"arm": arm, "losses": losses, "seconds": time.perf_counter() - start}


def compared(run, stock):
    """The largest and the mean distance of the losses of two runs, and their first and last."""
    apart = [abs(a - b) for a, b in zip(run["losses"], stock["losses"], strict=True)]
    return {
        "arm": run["arm"], "largest": max(apart), "mean": sum(apart) / len(apart), "first": run["losses"][0],
        "last": run["losses"][-1], "seconds": run["seconds"],
    }  # fmt: skip


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", required=True, help=".json of rows")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row at most")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the frozen weights")
    parser.add_argument("--bf16", action="store_true", help="autocast")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--repeat-stock", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file of the record; without it a run on a GPU names one in benchmarks/results")
    options = parser.parse_args(argv)

    record = Record("lora_parity", Path(options.model).name, options.json, argv=argv)
    runs, rows = [], []
    for arm in ("TRL", "ours", *(["TRL, eager attention"] if options.repeat_stock else [])):
        runs.append(train(arm, options))
        rows.append(compared(runs[-1], runs[0]))
        gc.collect()
        record.write(
            {"options": vars(options), "compared": rows, "losses": {run["arm"]: run["losses"] for run in runs}}
        )
        print(json.dumps(rows[-1]), flush=True)
    table(rows, {
        "arm": ("", ""), "first": ("first loss", ".4f"), "last": ("last loss", ".4f"), "largest": ("largest", ".2e"),
        "mean": ("mean", ".2e"), "seconds": ("seconds", ".0f"),
    })  # fmt: skip
    record.say_where()


if __name__ == "__main__":
    main()
