"""The checks of dropout and of the optimizer in the backward pass: clean code passes, and seeded bugs fail."""

from unittest import mock

import pytest
import torch
from transformers import Trainer
from verify_setups import lora, setup_of

from liger_trainer import LigerSFTTrainer
from liger_trainer.head import deferred
from liger_trainer.lora import layers as lora_layers
from liger_trainer.trainers import optimizer_in_backward as early
from liger_trainer.verify import options
from liger_trainer.verify.runs import Bench, quiet

WITHIN = {"options": {"optimizer_in_backward": True}}


def dropout_check(folder, *what, kind="stock", **parts):
    with quiet(), mock.patch.object(lora_layers, "LEAST_WORK", 0):
        return options.dropout_as_stock(Bench(setup_of(*what, **parts), str(folder)), kind, {})


def dropout_of_the_head(folder):
    """The check for an adapter on the head, which TRL's `SFTTrainer` refuses."""
    return dropout_check(folder, "SFT", kind="plain", peft_config=lora("q_proj", "lm_head"))


def backward_check(folder, **parts):
    with quiet():
        return options.optimizer_in_backward(Bench(setup_of("SFT", **parts), str(folder)))


@pytest.mark.slow
@pytest.mark.parametrize("what", [("SFT",), ("SFT", "gpt2"), ("",)])
def test_the_same_masks_are_drawn_as_by_the_stock_trainer(what, tmp_path):
    assert dropout_check(tmp_path, *what).verdict == "ok"


@pytest.mark.slow
def test_adapters_drop_out_as_in_the_stock_trainer(tmp_path):
    assert dropout_check(tmp_path, "SFT", peft_config=lora()).verdict == "ok"


@pytest.mark.slow
@pytest.mark.parametrize(
    "faulty",
    [
        pytest.param(lambda stock, x, part: (x, [part]), id="nothing is dropped"),
        pytest.param(lambda stock, x, part: (stock(x, part)[0], [part]), id="what is kept is not scaled"),
    ],
)
def test_wrong_dropout_of_an_adapter_is_found(faulty, tmp_path, monkeypatch):
    stock, train = lora_layers.apply_dropout_mask, Trainer.train

    def with_the_bug(self, *args, **kwargs):  # not earlier: the proof of a layer would refuse it
        with mock.patch.object(lora_layers, "apply_dropout_mask", lambda x, part: faulty(stock, x, part)):
            return train(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "train", with_the_bug)
    assert dropout_check(tmp_path, "SFT", peft_config=lora()).verdict == "FAILED"


def test_an_adapter_on_the_head_drops_out_as_with_full_logits(tmp_path):
    found = dropout_of_the_head(tmp_path)
    assert (found.verdict, found.tolerance) == ("ok", 1e-4)
    assert "each micro-batch has its own seed" in found.detail


SMOOTHED = {"options": {"label_smoothing_factor": 0.1}}


@pytest.mark.parametrize("parts", [pytest.param({}, id="model"), pytest.param({"peft_config": lora()}, id="LoRA")])
def test_smoothed_labels_have_the_masks_of_the_stock_loss(parts, tmp_path):
    """TRL calls the model a second time for metrics, so only its later micro-batches draw other masks."""
    found = dropout_check(tmp_path, "SFT", **SMOOTHED, **parts)
    assert (found.verdict, found.tolerance) == ("ok", 1e-4)
    assert "a second forward pass" in found.detail


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({}, id="no smoothing"),
        pytest.param({"options": {"label_smoothing_factor": 0.1, "loss_type": "dft"}}, id="loss_type ignores it"),
    ],
)
def test_micro_batches_are_seeded_only_where_the_stock_trainer_draws_more(parts, tmp_path):
    found = dropout_check(tmp_path, "SFT", **parts)
    assert found.verdict == "ok"
    assert "seed" not in found.detail


def test_a_second_pass_of_ours_is_found_with_smoothed_labels_too(tmp_path, monkeypatch):
    """In a micro-batch the loss has to come from the first pass, as the stock trainer's."""
    stock = LigerSFTTrainer.compute_loss

    def twice(self, *args, **kwargs):
        stock(self, *args, **kwargs)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(LigerSFTTrainer, "compute_loss", twice)
    assert dropout_check(tmp_path, "SFT", **SMOOTHED).verdict == "FAILED"


def nothing_is_dropped(parameters, hidden, kept):
    parameters["lora_input"] = None


def what_is_kept_is_not_scaled(parameters, hidden, kept):
    parameters["lora_input"] = parameters["lora_input"] * 0.8


def a_mask_is_used_twice(parameters, hidden, kept):  # only the second micro-batch shows it
    mask = kept.setdefault("mask", (parameters["lora_input"] != 0).detach())
    width = min(mask.shape[1], hidden.shape[1])
    masked = hidden[:, :width] * mask[:, :width] / 0.8
    parameters["lora_input"] = torch.cat([masked, parameters["lora_input"][:, width:]], dim=1)


@pytest.mark.parametrize("faulty", [nothing_is_dropped, what_is_kept_is_not_scaled, a_mask_is_used_twice])
def test_wrong_dropout_of_an_adapter_on_the_head_is_found(faulty, tmp_path, monkeypatch):
    stock, kept = deferred.head_parameters, {}

    def with_the_bug(head, hidden, vocab_size):
        parameters = stock(head, hidden, vocab_size)
        faulty(parameters, hidden, kept)
        return parameters

    monkeypatch.setattr(deferred, "head_parameters", with_the_bug)
    assert dropout_of_the_head(tmp_path).verdict == "FAILED"


def test_dropout_is_compared_only_where_both_draw_alike(tmp_path):
    assert dropout_check(tmp_path, "DPO").verdict == "-"


def test_steps_in_the_backward_pass_equal_steps_after_it(tmp_path):
    assert backward_check(tmp_path, **WITHIN).verdict == "ok"
    assert backward_check(tmp_path).verdict == "-"


def test_a_second_step_with_the_same_gradient_is_found(tmp_path, monkeypatch):
    stock = early.step_alone

    def gradient_kept(optimizer, group, weight, place=0):
        gradient = weight.grad
        stock(optimizer, group, weight, place)
        weight.grad = gradient

    monkeypatch.setattr(early, "step_alone", gradient_kept)
    assert backward_check(tmp_path, **WITHIN).verdict == "FAILED"
