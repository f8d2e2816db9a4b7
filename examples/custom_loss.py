"""Train with a loss of your own: override `token_loss`, and logits are still never built.

    python examples/custom_loss.py
    python examples/custom_loss.py --model Qwen/Qwen3-0.6B --rows my_rows.jsonl

A row has `instruction` and `output`.
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset

from liger_trainer import LigerSFTConfig, LigerSFTTrainer

ROWS = Path(__file__).parents[1] / "recipes/data/alpaca_quickstart.jsonl"


class FocalTrainer(LigerSFTTrainer):
    """Focal loss, Lin et al. 2017 (arXiv:1708.02002), gamma = 2, minus 0.05 times the entropy of each prediction."""

    token_outputs = ("entropy",)  # what `outputs` has besides `log_probs` and `label_mask`

    def token_loss(self, outputs, inputs):
        # One loss for each label, (B, S - 1). The trainer adds them up and divides by the number of labels.
        focal = -((1 - outputs.log_probs.exp()) ** 2) * outputs.log_probs
        return focal - 0.05 * outputs.entropy


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M")
    parser.add_argument("--rows", default=str(ROWS))
    options = parser.parse_args()

    rows = load_dataset("json", data_files=options.rows, split="train")
    rows = rows.select_columns(["instruction", "output"])
    rows = rows.rename_columns({"instruction": "prompt", "output": "completion"})
    args = LigerSFTConfig(
        output_dir="outputs/custom_loss",
        max_length=512,
        bf16=torch.cuda.is_available(),
        logging_steps=5,
        report_to="none",
    )
    trainer = FocalTrainer(options.model, args, train_dataset=rows)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
