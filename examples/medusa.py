"""Train Medusa heads on the answers of a model, which stays frozen. They guess the next tokens but one, two and three.

    python examples/medusa.py
    python examples/medusa.py --model Qwen/Qwen3-0.6B --rows my_answers.jsonl

A row has `prompt` and `completion`, texts or lists of messages. The completion is the model's own answer: the rows that
ship with this repository are the answers of SmolLM2-135M-Instruct.
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset

from liger_trainer import LigerMedusaConfig, LigerMedusaTrainer

ROWS = Path(__file__).parents[1] / "recipes/data/smollm2_answers.jsonl"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--rows", default=str(ROWS))
    options = parser.parse_args()

    rows = load_dataset("json", data_files=options.rows, split="train").train_test_split(0.1, seed=0)
    args = LigerMedusaConfig(
        output_dir="outputs/medusa",
        medusa_num_heads=3,
        medusa_stage=1,  # the heads alone
        max_length=256,
        learning_rate=3e-3,
        bf16=torch.cuda.is_available(),
        logging_steps=5,
        report_to="none",
    )
    trainer = LigerMedusaTrainer(options.model, args, train_dataset=rows["train"], eval_dataset=rows["test"])
    trainer.train()
    print(trainer.evaluate())  # how often each head is right, on rows that were held out
    trainer.save_model()  # `liger-trainer export` writes the heads for a server


if __name__ == "__main__":
    main()
