"""Models with recurrent states in preference and online trainers, which pad rows on both sides."""

import pytest
import torch
from tiny_models import words
from trainer_parity import assert_same_training, build, build_pairs, letters
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from varlen_batches import drawn_model

from liger_trainer import LigerDPOConfig, LigerDPOTrainer, LigerGRPOConfig, LigerGRPOTrainer
from liger_trainer.varlen import unpad_plan

TYPES = ("qwen3_5_text", "lfm2")


@pytest.fixture
def planned(monkeypatch):
    """Collect the plans that backbones ran with, except during proofs."""
    found, own = [], unpad_plan.UnpadPlan.repad
    monkeypatch.setattr(unpad_plan.UnpadPlan, "repad", lambda self, *given: found.append(self) or own(self, *given))
    return found


def model_with_reference(name, folder):
    """A model in a folder. TRL's trainers load its reference from the same folder."""
    model = drawn_model(name)
    model.save_pretrained(folder / "reference")
    model.config._name_or_path = str(folder / "reference")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.05)
    return model


@pytest.mark.parametrize("name", TYPES)
def test_dpo(name, tmp_path, planned):
    model = model_with_reference(name, tmp_path)
    ours, stock = (
        build_pairs(trainer, args, model, tmp_path, max_steps=1, optim="sgd", max_grad_norm=0.0)
        for trainer, args in ((LigerDPOTrainer, LigerDPOConfig), (DPOTrainer, DPOConfig))
    )
    planned.clear()
    assert_same_training(ours, stock, loss_size=10.0)
    assert any(plan.leaves_out for plan in planned)


@pytest.mark.parametrize("name", TYPES)
def test_grpo(name, tmp_path, planned):
    generator = torch.Generator().manual_seed(4)
    model = model_with_reference(name, tmp_path)
    rows = [{"prompt": words(generator, 2, 6)} for _ in range(8)]
    ours, stock = (
        build(
            trainer,
            args,
            model,
            tmp_path,
            rows,
            trainer_options={"reward_funcs": letters},
            num_generations=2,
            max_completion_length=6,
            beta=0.1,
        )
        for trainer, args in ((LigerGRPOTrainer, LigerGRPOConfig), (GRPOTrainer, GRPOConfig))
    )
    planned.clear()
    assert_same_training(ours, stock)
    assert any(plan.leaves_out for plan in planned)
