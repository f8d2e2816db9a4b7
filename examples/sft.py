"""Fine-tune a model on instructions and answers, with a LoRA.

    python examples/sft.py
    python examples/sft.py --model Qwen/Qwen3-8B --rows my_rows.jsonl

A row has `instruction`, `output` and, if there is one, `input`.
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from peft import LoraConfig

from liger_trainer import LigerSFTConfig, LigerSFTTrainer

ROWS = Path(__file__).parents[1] / "recipes/data/alpaca_quickstart.jsonl"


def to_prompt(row):
    question = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
    return {"prompt": f"Question: {question}\nAnswer:", "completion": f" {row['output']}"}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--rows", default=str(ROWS))
    options = parser.parse_args()

    rows = load_dataset("json", data_files=options.rows, split="train")
    rows = rows.map(to_prompt, remove_columns=rows.column_names)
    args = LigerSFTConfig(
        output_dir="outputs/sft",
        max_length=1024,
        learning_rate=2e-4,
        bf16=torch.cuda.is_available(),
        activation_checkpointing="auto",  # recompute only the layers that do not fit into the GPU's memory
        logging_steps=5,
        report_to="none",
    )
    adapter = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = LigerSFTTrainer(options.model, args, train_dataset=rows, peft_config=adapter)
    trainer.train()
    trainer.save_model()
    print(trainer.liger_report)  # what was replaced, and why the rest was not


if __name__ == "__main__":
    main()
