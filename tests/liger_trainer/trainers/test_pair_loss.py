"""A loss of pairs by overriding `pair_loss`: the margin DPO of the docs on real logits, and TRL's loss as one's own."""

import re

import pytest
import torch
import torch.nn.functional as F
from checkout import ROOT
from datasets import Dataset
from dpo_runs import LORA, assert_same_run, build, first_batch, logps_of_logits, pairs, train
from tiny_models import tiny_model
from trainer_runs import lora
from trl import DPOTrainer

from liger_trainer import LigerDPOTrainer

DOCS = ROOT / "docs" / "trainers.md"


def margin_dpo():
    """`MarginDPOTrainer` as the docs have it."""
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S) if "class MarginDPOTrainer" in c]
    assert len(code.splitlines()) < 20
    names = {}
    exec(code, names)
    return names["MarginDPOTrainer"]


class Sigmoid(LigerDPOTrainer):
    """TRL's default loss, written as a user's own."""

    def pair_loss(self, chosen_logratios, rejected_logratios, inputs):
        assert inputs["completion_mask"].shape[0] == 2 * len(inputs["ref_chosen_logps"]) == 2 * len(chosen_logratios)
        return -F.logsigmoid(self.beta * (chosen_logratios - rejected_logratios))


def rated_pairs(n=8):
    return [{**pair, "margin": 0.1 * i} for i, pair in enumerate(pairs(n))]


@pytest.mark.parametrize(
    "model_type, options",
    [
        ("llama", {}),
        ("llama", {"precompute_ref_log_probs": True}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.1}),
        ("lora", {"gradient_checkpointing": True}),
    ],
    ids=str,
)
def test_the_default_loss_as_an_own_one(model_type, options, tmp_path):
    """Loss, gradients and every metric are those of TRL's loss_type sigmoid, the auxiliary loss of experts included."""
    model = lora(tiny_model("llama"), LORA) if model_type == "lora" else tiny_model(model_type)
    want = train(build(DPOTrainer, model, tmp_path, (2, 2), **options))
    assert_same_run(train(build(Sigmoid, model, tmp_path, (2, 2), **options)), want)


def test_margin_dpo_of_the_docs(tmp_path):
    """Loss and gradients on real logits; the metrics are TRL's; it evaluates too."""
    trainer = build(margin_dpo(), tiny_model("llama"), tmp_path, rows=rated_pairs())
    batch = first_batch(trainer)
    assert batch["margin"].shape == (4,) and batch["margin"].unique().numel() == 4
    model = trainer.model.train()
    chosen, rejected = logps_of_logits(model, batch)
    with torch.no_grad():
        ref_chosen, ref_rejected = logps_of_logits(trainer.ref_model, batch)
    ratio = (chosen - ref_chosen) - (rejected - ref_rejected)
    want = -F.logsigmoid(0.1 * ratio - batch["margin"]).mean()
    parameters = list(model.parameters())
    want_grads = torch.autograd.grad(want, parameters)
    got = trainer.compute_loss(model, batch)
    assert got.item() == pytest.approx(want.item(), rel=1e-5)
    for ours, real in zip(torch.autograd.grad(got, parameters), want_grads, strict=True):
        assert (ours - real).norm() <= 1e-5 * real.norm()
    metrics = trainer._metrics["train"]
    assert metrics["rewards/margins"][-1] == pytest.approx(0.1 * ratio.mean().item(), rel=1e-4)
    assert trainer.evaluate(Dataset.from_list(rated_pairs(4)))["eval_rewards/accuracies"] >= 0


@pytest.mark.parametrize(
    "options, name",
    [
        ({"loss_type": "ipo"}, "loss_type"),
        ({"label_smoothing": 0.1}, "label_smoothing"),
        ({"ld_alpha": 0.5}, "ld_alpha"),
        ({"f_divergence_type": "js_divergence"}, "f_divergence_type"),
        ({"use_weighting": True}, "use_weighting"),
        ({"loss_weights": [2.0]}, "loss_weights"),
    ],
    ids=str,
)
def test_a_second_loss_beside_an_own_one_is_refused(options, name, tmp_path):
    with pytest.raises(ValueError, match=f"overrides pair_loss, and {name} is .*only one can be the loss"):
        build(Sigmoid, tiny_model("llama"), tmp_path, **options)


def test_what_would_train_wrongly_is_refused(tmp_path):
    class Reduced(LigerDPOTrainer):
        def pair_loss(self, chosen_logratios, rejected_logratios, inputs):
            return -F.logsigmoid(chosen_logratios - rejected_logratios).mean()

    class Columns(LigerDPOTrainer):
        pair_columns = ("margin",)

    model = tiny_model("llama")
    trainer = build(Reduced, model, tmp_path)
    with pytest.raises(ValueError, match=r"pair_loss returned shape \(\); expected one loss per pair, \(4,\)"):
        trainer.compute_loss(trainer.model, first_batch(trainer))
    with pytest.raises(ValueError, match="pair_columns is \\('margin',\\), but no pair_loss reads them"):
        build(Columns, model, tmp_path, rows=rated_pairs())
    with pytest.raises(ValueError, match="the first row's 'margin' is None; expected a number"):
        build(margin_dpo(), model, tmp_path)
    with pytest.raises(ValueError, match="overrides pair_loss, which needs use_liger=True"):
        build(Sigmoid, model, tmp_path, use_liger=False)
