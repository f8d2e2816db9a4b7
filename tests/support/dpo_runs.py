"""`DPOTrainer` and ours on the same pairs: what they log, the gradients of the first step, and the real logits."""

import copy

import pytest
import torch
from datasets import Dataset
from parity import KeepGradients
from tiny_models import ragged_rows, tiny_model, tiny_tokenizer
from trl import DPOConfig

from liger_trainer import LigerDPOConfig, LigerDPOTrainer

TIMES = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos"}
LORA = ["q_proj", "v_proj", "gate_proj", "down_proj"]


def words(ids):
    return " ".join(f"w{i}" for i in ids)


def pairs(n=8):
    """Prompts, chosen and rejected of unequal lengths, as text for `tiny_tokenizer`."""
    ids = [row["input_ids"] for row in ragged_rows(2 * n, seed=5)]
    return [
        {"prompt": words(a[:3]), "chosen": " " + words(a[3:]), "rejected": " " + words(b)}
        for a, b in zip(ids[:n], ids[n:], strict=True)
    ]


def build(trainer_class, model, tmp_path, split=(4, 1), rows=None, trainer_options=None, **options):
    """A trainer of `pairs()`, with another model as its reference unless an adapter is its own."""
    args_class = LigerDPOConfig if issubclass(trainer_class, LigerDPOTrainer) else DPOConfig
    # SGD, as the first steps of Adam take the sign of a gradient, also of one that is nothing but rounding.
    defaults = {
        "gradient_checkpointing": False,
        "max_length": 64,
        "learning_rate": 0.1,
        "bf16": False,
        "optim": "sgd",
        "per_device_eval_batch_size": 4,
    }
    args = args_class(
        output_dir=str(tmp_path / trainer_class.__name__),
        per_device_train_batch_size=split[0],
        gradient_accumulation_steps=split[1],
        num_train_epochs=1,
        logging_steps=1,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **(defaults | options),
    )
    given = {"processing_class": tiny_tokenizer()} | (trainer_options or {})
    if not hasattr(model, "peft_config") and "peft_config" not in given:
        given.setdefault("ref_model", tiny_model(model.config.model_type, seed=7))
    rows = Dataset.from_list(rows or pairs())
    return trainer_class(model=copy.deepcopy(model), args=args, train_dataset=rows, **given)


def train(trainer):
    """The log of every step, and the gradients of the first."""
    save = KeepGradients()
    trainer.add_callback(save)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return [{name: value for name, value in log.items() if name not in TIMES} for log in logs], save.grads


def assert_same_run(got, want):
    (got_logs, got_grads), (want_logs, want_grads) = got, want
    assert len(got_logs) == len(want_logs) > 0
    for ours, stock in zip(got_logs, want_logs, strict=True):
        assert ours.keys() == stock.keys()
        for name in stock:
            # Differences of sums of log-probabilities near -80, and means of logits that cancel: right to 1e-7 of them.
            atol = 2e-6 if name.startswith(("rewards/", "logits/")) else 0
            assert ours[name] == pytest.approx(stock[name], rel=1e-5, abs=atol), name
    assert got_grads.keys() == want_grads.keys()
    for name, grad in want_grads.items():
        assert (got_grads[name] - grad).norm() <= 1e-5 * grad.norm(), name


def logps_of_logits(model, batch):
    """Sum of the log-probabilities of each completion, from real logits."""
    log_p = torch.log_softmax(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits, -1)
    per_token = log_p[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return (per_token * batch["completion_mask"][:, 1:]).sum(1).chunk(2)


def first_batch(trainer):
    return next(iter(trainer.get_train_dataloader()))
