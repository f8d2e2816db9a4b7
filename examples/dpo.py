"""Train a model to prefer the better of two answers, with DPO.

    python examples/dpo.py
    python examples/dpo.py --model Qwen/Qwen3-8B --rows my_pairs.jsonl

A row has `prompt`, `chosen` and `rejected`: texts, or lists of messages.
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from peft import LoraConfig

from liger_trainer import LigerDPOConfig, LigerDPOTrainer

ROWS = Path(__file__).parents[1] / "recipes/data/preference_quickstart.jsonl"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--rows", default=str(ROWS))
    options = parser.parse_args()

    args = LigerDPOConfig(
        output_dir="outputs/dpo",
        beta=0.1,
        learning_rate=1e-4,
        per_device_train_batch_size=4,
        bf16=torch.cuda.is_available(),
        logging_steps=5,
        report_to="none",
    )
    trainer = LigerDPOTrainer(
        options.model,
        args=args,
        train_dataset=load_dataset("json", data_files=options.rows, split="train"),
        # With an adapter, the model without it is the reference. So there is one copy of the weights.
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model()
    print(trainer.liger_report)


if __name__ == "__main__":
    main()
