"""A loss of one's own by overriding `token_loss`: the same on both trainers, split-proof, and without logits."""

import copy

import pytest
import torch
from test_fused_head import LargestTensor
from test_parity_sft import run as run_sft
from test_parity_trainer import SPLITS, assert_same
from test_parity_trainer import run as run_hf
from tiny_models import collate, ragged_rows, tiny_model

from liger_trainer import LigerSFTTrainer, LigerTrainer, LigerTrainingArguments


class Focal:
    def token_loss(self, outputs, inputs):
        return -((1 - outputs.log_probs.exp()) ** 2) * outputs.log_probs


class FocalTrainer(Focal, LigerTrainer):
    pass


class FocalSFTTrainer(Focal, LigerSFTTrainer):
    pass


class ConfidencePenalty(LigerSFTTrainer):
    """Pereyra et al. 2017, and a penalty on the hidden states so that every differentiable output is used."""

    token_outputs = ("entropy", "hidden_states")

    def token_loss(self, outputs, inputs):
        norm = outputs.hidden_states.float().square().mean(-1) * outputs.label_mask
        return -outputs.log_probs - 0.1 * outputs.entropy + 0.01 * norm


def stock_loss(term):
    """`compute_loss_func` on real logits, for the stock way to the same loss."""

    def loss(outputs, labels, num_items_in_batch):
        log_p = torch.log_softmax(outputs.logits[:, :-1].float(), -1)
        mask = labels[:, 1:] != -100
        log_probs = log_p.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        return (term(log_p, log_probs, outputs) * mask).sum() / num_items_in_batch

    return loss


def focal(log_p, log_probs, outputs):
    return -((1 - log_probs.exp()) ** 2) * log_probs


def penalty(log_p, log_probs, outputs):
    norm = outputs.hidden_states[-1][:, :-1].float().square().mean(-1)
    return -log_probs + 0.1 * (log_p.exp() * log_p).sum(-1) + 0.01 * norm


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_focal_loss_on_both_trainers(split, tmp_path):
    model = tiny_model("llama")
    options = {"trainer_options": {"compute_loss_func": stock_loss(focal)}}
    want, _ = run_sft(LigerSFTTrainer, model, tmp_path, split, **options)
    got, _ = run_sft(FocalSFTTrainer, model, tmp_path, split)
    assert_same(got, want)
    args = LigerTrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=split[0], gradient_accumulation_steps=split[1],
        num_train_epochs=1, learning_rate=1e-2, logging_steps=1, report_to="none", use_cpu=True, save_strategy="no",
    )  # fmt: skip
    trainer = FocalTrainer(model=copy.deepcopy(model), args=args, train_dataset=ragged_rows(), data_collator=collate)
    trainer.train()
    hf = torch.tensor([[log["loss"], log["grad_norm"]] for log in trainer.state.log_history if "loss" in log]).double()
    assert_same(hf, want[:, :2])
    assert trainer.evaluate(ragged_rows())["eval_loss"] > 0


def test_entropy_and_hidden_states(tmp_path):
    model = tiny_model("gemma2")
    model.config.output_hidden_states = True  # for the stock side
    stock = {"trainer_options": {"compute_loss_func": stock_loss(penalty)}}
    want, _ = run_sft(LigerSFTTrainer, model, tmp_path, **stock)
    got, _ = run_sft(ConfidencePenalty, model, tmp_path)
    assert_same(got, want)


def test_no_logits_for_an_own_loss(tmp_path):
    _, trainer = run_sft(ConfidencePenalty, tiny_model("llama", vocab_size=4096), tmp_path, train=False)
    batch = collate(ragged_rows(8))
    with LargestTensor() as largest:
        trainer.compute_loss(trainer.model.train(), dict(batch)).backward()
    assert largest.numel < batch["input_ids"].numel() * 4096


def test_a_reduced_loss_is_refused(tmp_path):
    class Reduced(LigerTrainer):
        def token_loss(self, outputs, inputs):
            return -outputs.log_probs.mean()

    with pytest.raises(ValueError, match=r"token_loss returned shape \(\); expected one loss per label"):
        run_hf(Reduced, tiny_model("llama"), tmp_path)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"use_liger": False}, "overrides token_loss, which needs use_liger=True"),
        ({"liger_config": {"fused_linear_cross_entropy": False}}, "needs the fused LM head, but liger_config has"),
    ],
)
def test_an_own_loss_that_would_be_ignored_is_refused(options, message, tmp_path):
    args = LigerTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)
    with pytest.raises(ValueError, match=message):
        FocalTrainer(model=tiny_model("llama"), args=args, train_dataset=ragged_rows(), data_collator=collate)


@pytest.mark.parametrize(
    "options, name",
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"loss_type": "dft"}, "loss_type"),
        ({"trainer_options": {"compute_loss_func": stock_loss(focal)}}, "compute_loss_func"),
    ],
)
def test_a_second_loss_beside_an_own_one_is_refused(options, name, tmp_path):
    with pytest.raises(ValueError, match=f"overrides token_loss, and {name} is .*only one can be the loss"):
        run_sft(FocalSFTTrainer, tiny_model("llama"), tmp_path, train=False, **options)
