"""Two steps of `Trainer`, stock or ours, from one seed, and the numbers they log; an adapter and a custom loss."""

import copy
import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import collate, ragged_rows
from transformers import TrainingArguments

from liger_trainer import LigerTrainer, LigerTrainingArguments

SPLITS = [(8, 1), (4, 2), (1, 8)]
MODELS = ["llama", "qwen3", "gemma2", "granite"]
LLAMA_AND_SLOWLY_QWEN3 = ["llama", pytest.param("qwen3", marks=pytest.mark.slow)]
OFTEN = [("llama", "full", "plain"), ("llama", "lora", "checkpointing"), ("gemma2", "full", "plain")]
CELLS = [  # marked slow: rarely used combinations
    pytest.param(*cell, marks=() if cell in OFTEN else pytest.mark.slow)
    for cell in itertools.product(MODELS, ("full", "lora"), ("plain", "checkpointing"))
]


def run(trainer_class, model, tmp_path, split=(8, 1), rows=None, eval_rows=None, **options):
    """Train two steps of 8 rows; return the loss and gradient norm of every step, and the trainer."""
    args_class = LigerTrainingArguments if issubclass(trainer_class, LigerTrainer) else TrainingArguments
    args = args_class(
        output_dir=str(tmp_path / trainer_class.__name__),
        per_device_train_batch_size=split[0],
        gradient_accumulation_steps=split[1],
        num_train_epochs=1,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        **options,
    )
    trainer = trainer_class(
        model=copy.deepcopy(model),
        args=args,
        train_dataset=rows or ragged_rows(),
        data_collator=collate,
        eval_dataset=eval_rows,
    )
    trainer.train()
    steps = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
    return torch.tensor(steps, dtype=torch.float64), trainer


def assert_same(got, want, rtol=1e-5):
    torch.testing.assert_close(got, want, rtol=rtol, atol=0)


def lora(model, targets):
    """`model` with a LoRA on `targets`; no part of the LoRA is zero."""
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # B starts at zero, which would hide a missing gradient of A
            torch.nn.init.normal_(parameter, std=0.1)
    return model


class Plain:
    """The stock loss, written as a user's own. It must get whatever the stock trainer adds to its loss."""

    def token_loss(self, outputs, inputs):
        return -outputs.log_probs
