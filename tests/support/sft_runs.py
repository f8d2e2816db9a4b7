"""Two steps of TRL's `SFTTrainer`, stock or ours, from one seed, and the numbers they log."""

import copy

import torch
from datasets import Dataset
from tiny_models import ragged_rows, tiny_tokenizer
from trl import SFTConfig

from liger_trainer import LigerSFTConfig, LigerSFTTrainer

METRICS = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")


def run(trainer_class, model, tmp_path, split=(8, 1), rows=None, train=True, trainer_options=None, **options):
    """Train two steps of 8 rows; return the metrics of every step, and the trainer."""
    args_class = LigerSFTConfig if issubclass(trainer_class, LigerSFTTrainer) else SFTConfig
    defaults = {
        "gradient_checkpointing": False,
        "max_length": 64,
        "learning_rate": 1e-2,
        "bf16": False,
        "save_strategy": "no",
    }
    args = args_class(
        output_dir=str(tmp_path / trainer_class.__name__),
        per_device_train_batch_size=split[0],
        gradient_accumulation_steps=split[1],
        num_train_epochs=1,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **(defaults | options),
    )
    rows = Dataset.from_list(rows or ragged_rows())
    trainer = trainer_class(
        model=copy.deepcopy(model),
        args=args,
        train_dataset=rows,
        processing_class=tiny_tokenizer(),
        eval_dataset=None if args.eval_strategy == "no" else rows,
        **(trainer_options or {}),
    )
    if trainer.eval_dataset is None:  # TRL would prepare the same rows a second time, which takes as long as a step
        trainer.eval_dataset = trainer.train_dataset
    if not train:
        return None, trainer
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return torch.tensor([[log[name] for name in METRICS] for log in logs], dtype=torch.float64), trainer
