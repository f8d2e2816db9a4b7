"""A policy that moves between the micro-batches of a step, or draws numbers unseen, gets its pass as in TRL."""

import engine_stand_in
import pytest
import torch
from tiny_models import tiny_model, words
from trainer_parity import assert_same_training, build, letters
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from liger_trainer import LigerGRPOConfig, LigerGRPOTrainer, LigerRLOOConfig, LigerRLOOTrainer

CLASSES = {
    "grpo": (LigerGRPOTrainer, LigerGRPOConfig, GRPOTrainer, GRPOConfig),
    "rloo": (LigerRLOOTrainer, LigerRLOOConfig, RLOOTrainer, RLOOConfig),
}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    engine_stand_in.install(monkeypatch)


def trainer_of(trainer_class, args_class, folder, callbacks=(), **options):
    generator = torch.Generator().manual_seed(4)
    rows = [{"prompt": words(generator, 2, 6)} for _ in range(16)]
    fixed = {"num_generations": 2, "beta": 0.0, "use_vllm": True, "split": (2, 2)}
    given = {"reward_funcs": letters, "callbacks": list(callbacks)}
    options = fixed | {"max_completion_length": 6} | options
    return build(trainer_class, args_class, tiny_model("llama"), folder, rows, trainer_options=given, **options)


class MovesWithin(TrainerCallback):
    """Changes weights after a micro-batch that ends no step."""

    def on_substep_end(self, args, state, control, model, **kwargs):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_callback_may_move_the_policy_within_a_step(kind, tmp_path):
    classes = CLASSES[kind]
    ours, stock = (trainer_of(*pair, tmp_path, [MovesWithin()]) for pair in (classes[:2], classes[2:]))
    assert_same_training(ours, stock, loss_size=1.0)
    assert ours.old_policy.run == {"on_substep_end of MovesWithin may move the policy within a step": 1}


@pytest.mark.parametrize("kind", CLASSES)
def test_an_optimizer_within_the_backward_pass_moves_the_policy(kind, tmp_path):
    """Each weight is stepped as soon as its gradient is there, after every micro-batch."""

    def step_now(weight):
        with torch.no_grad():
            weight.sub_(weight.grad)

    classes = CLASSES[kind]
    trainers = [trainer_of(*pair, tmp_path) for pair in (classes[:2], classes[2:])]
    for trainer in trainers:
        for weight in trainer.model.parameters():
            weight.register_post_accumulate_grad_hook(step_now)
    assert_same_training(*trainers, loss_size=1.0)
    (reason,) = trainers[0].old_policy.run
    assert "step_now) on a gradient may move the policy within a step" in reason


def test_ratios_of_sequences_of_one_token(tmp_path):
    """TRL's mean counts each row, also one that is masked."""
    options = {
        "max_completion_length": 1,
        "mask_truncated_completions": True,
        "vllm_importance_sampling_mode": "sequence_truncate",
        "split": (8, 1),
    }
    ours, stock = (trainer_of(*pair, tmp_path, **options) for pair in (CLASSES["grpo"][:2], CLASSES["grpo"][2:]))
    assert_same_training(ours, stock, ("sampling/importance_sampling_ratio/mean",), loss_size=1.0)


def test_lomo_steps_in_each_backward_pass(tmp_path):
    trainer = trainer_of(*CLASSES["rloo"][:2], tmp_path)
    assert trainer._why_it_runs() is None
    trainer.args.optim = "lomo"
    assert trainer._why_it_runs() == "optim lomo steps in each backward pass"
    trainer.args.gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    assert trainer._why_it_runs() is None
