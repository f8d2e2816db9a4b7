"""Batches in which no position has a label, compared with stock."""

import copy
import math

import pytest
import torch
from datasets import Dataset
from tiny_models import tiny_model, tiny_tokenizer
from trl import SFTConfig, SFTTrainer

from liger_trainer import LigerSFTConfig, LigerSFTTrainer, apply_liger

IDS = torch.arange(3, 27).reshape(2, 12)
NONE = torch.full_like(IDS, -100)
CALLS = {
    "mean": {"labels": NONE},
    "shift_labels": {"labels": NONE, "shift_labels": NONE},
    "count of zero": {"labels": NONE, "num_items_in_batch": torch.tensor(0)},
    "count of five": {"labels": NONE, "num_items_in_batch": 5},
    "another ignore_index": {"labels": torch.zeros_like(IDS), "ignore_index": 0},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_loss_and_the_gradients_equal_stock(call):
    losses, gradients = [], []
    stock = tiny_model("llama").train()
    for patched in (False, True):
        model = copy.deepcopy(stock)
        if patched:
            apply_liger(model)
        loss = model(input_ids=IDS, **call).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*losses, rtol=0, atol=0, equal_nan=True)
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sft_gives_what_trl_gives(smoothing, tmp_path):
    """TRL divides by at least 1, except in a smoothed loss."""
    rows = Dataset.from_list([{"input_ids": IDS[0].tolist(), "labels": NONE[0].tolist()}] * 2)
    losses = []
    for trainer_class, config in ((SFTTrainer, SFTConfig), (LigerSFTTrainer, LigerSFTConfig)):
        args = config(
            str(tmp_path),
            max_steps=1,
            use_cpu=True,
            report_to="none",
            bf16=False,
            logging_steps=1,
            label_smoothing_factor=smoothing,
            logging_nan_inf_filter=False,
            save_strategy="no",
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        trainer = trainer_class(tiny_model("llama"), args, train_dataset=rows, processing_class=tiny_tokenizer())
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == losses[1] or (math.isnan(losses[0]) and math.isnan(losses[1]))
