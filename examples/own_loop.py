"""Patch a model and train it with a loop of your own, without a trainer.

    python examples/own_loop.py
    python examples/own_loop.py --model Qwen/Qwen3-0.6B --rows my_rows.jsonl

A row has `instruction` and `output`.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from liger_trainer import apply_liger

ROWS = Path(__file__).parents[1] / "recipes/data/alpaca_quickstart.jsonl"
BATCH = 4


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M")
    parser.add_argument("--rows", default=str(ROWS))
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device)
    print(apply_liger(model))  # in place; `remove_liger(model)` undoes it

    rows = [json.loads(line) for line in Path(options.rows).read_text().splitlines()]
    texts = [f"Question: {row['instruction']}\nAnswer: {row['output']}{tokenizer.eos_token}" for row in rows]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for start in range(0, len(texts), BATCH):
        batch = tokenizer(texts[start : start + BATCH], padding=True, return_tensors="pt").to(device)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            output = model(**batch, labels=labels)  # the loss, without logits and without computing padding
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rows {start + 1} to {start + len(labels)}: loss {output.loss.item():.4f}")

    model.save_pretrained("outputs/own_loop")
    tokenizer.save_pretrained("outputs/own_loop")


if __name__ == "__main__":
    main()
