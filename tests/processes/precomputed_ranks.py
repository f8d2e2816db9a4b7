"""One of two ranks, FSDP2 on CPUs: `precomputed_ranks.py FOLDER` saves the reference log-probs of `columns_of`."""

import json
import os
import sys
from pathlib import Path

import torch
from datasets import load_dataset
from launching import shard_on_cpus
from peft import LoraConfig
from tiny_models import pair_rows, tiny_model, tiny_tokenizer

import liger_trainer

KINDS = ("DPO", "KTO")


def write_rows(folder):
    pairs = pair_rows(12)
    answers = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": i % 2 == 0} for i, row in enumerate(pairs)
    ]
    for kind, rows in zip(KINDS, (pairs, answers), strict=True):
        Path(folder, f"{kind}.json").write_text(json.dumps(rows))


def columns_of(kind, folder, unread=False):
    """The columns that an adapter's trainer has precomputed. `unread`: the weights of the model are zeros."""
    model = tiny_model("llama")
    if unread:
        for parameter in model.parameters():
            parameter.data.zero_()
    args = getattr(liger_trainer, f"Liger{kind}Config")(
        output_dir=f"{folder}/out",
        precompute_ref_log_probs=True,
        per_device_train_batch_size=2,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    )
    rows = load_dataset("json", data_files=f"{folder}/{kind}.json", split="train", cache_dir=f"{folder}/cache")
    adapter = LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    trainer = getattr(liger_trainer, f"Liger{kind}Trainer")(
        model, args=args, train_dataset=rows, processing_class=tiny_tokenizer(), peft_config=adapter
    )
    trainer.train()
    (loss,) = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    names = [name for name in trainer.train_dataset.column_names if name.startswith("ref_")]
    return {name: torch.tensor(trainer.train_dataset[name]) for name in names} | {"loss": torch.tensor(loss)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    shard_on_cpus()
    rank = int(os.environ["RANK"])
    # transformers 5.17 leaves zeros under fsdp_cpu_ram_efficient_loading on a rank that does not read the file
    found = {kind: columns_of(kind, sys.argv[1], unread=rank > 0) for kind in KINDS}
    torch.save(found, f"{sys.argv[1]}/{rank}.pt")
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)
