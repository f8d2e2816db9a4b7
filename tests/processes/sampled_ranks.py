"""One of two ranks of `test_samples.py`: `sampled_ranks.py FOLDER` trains with prompts and without, on CPUs by DDP."""

import sys
from pathlib import Path

import torch
from tiny_models import tiny_model
from trainer_parity import run

from liger_trainer import LigerSFTTrainer

PROMPTS = {"sample_prompts": ["w3 w4"], "sample_steps": 1, "sample_max_new_tokens": 3}


def main(folder):
    weights = {}
    for name, options in (("without", {}), ("with", PROMPTS)):
        torch.manual_seed(5)
        model = tiny_model("llama", attention_dropout=0.2)
        _, trainer = run(LigerSFTTrainer, model, folder / name, split=(4, 1), **options)
        weights[name] = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    different = [key for key, value in weights["with"].items() if not torch.equal(value, weights["without"][key])]
    assert not different, different


if __name__ == "__main__":
    main(Path(sys.argv[1]))
