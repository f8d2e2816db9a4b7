"""Weights that change between a generation and the training on it are noticed, or TRL's own pass runs."""

import gc
import weakref

import engine_stand_in
import pytest
import torch
from peft import OFTConfig
from tiny_models import tiny_model, words
from torch import nn
from trainer_parity import assert_same_training, build, letters, lora, moved
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from liger_trainer import LigerGRPOConfig, LigerGRPOTrainer, LigerRLOOConfig, LigerRLOOTrainer
from liger_trainer.trainers.online.policy_weights import PolicyWeights

CLASSES = {
    "grpo": (LigerGRPOTrainer, LigerGRPOConfig, GRPOTrainer, GRPOConfig),
    "rloo": (LigerRLOOTrainer, LigerRLOOConfig, RLOOTrainer, RLOOConfig),
}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    engine_stand_in.install(monkeypatch)


def added(weight):
    with torch.no_grad():
        weight.add_(0.01)


def trainer_with(classes, folder, change, **options):
    """A trainer with a reward function that does `change` to its model."""
    trainer_class, args_class = classes
    kept = []

    def reward(completions, **columns):
        change(kept[0].model)
        return letters(completions, **columns)

    generator = torch.Generator().manual_seed(4)
    rows = [{"prompt": words(generator, 2, 6)} for _ in range(16)]
    given = {"reward_funcs": reward} | options.pop("trainer_options", {})
    options = {"num_generations": 2, "max_completion_length": 6, "beta": 0.0, "use_vllm": True} | options
    trainer = moved(
        build(trainer_class, args_class, tiny_model("llama"), folder, rows, trainer_options=given, **options)
    )
    kept.append(trainer)
    return trainer


def of_all(model):
    for weight in model.parameters():
        added(weight)


def of_one(model):
    added(model.model.layers[0].mlp.down_proj.weight)


def of_a_head_that_is_replaced(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)


def from_a_state_dict(model):
    model.load_state_dict({name: value * 1.1 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("change", [of_all, of_one, of_a_head_that_is_replaced, from_a_state_dict])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_reward_function_that_changes_weights_is_refused(kind, change, tmp_path):
    trainer = trainer_with(CLASSES[kind][:2], tmp_path, change)
    with pytest.raises(RuntimeError, match=r"weight was written after the completions.*Set reuse_log_probs=False"):
        trainer.train()


@pytest.mark.parametrize("kind", CLASSES)
def test_without_reuse_such_a_function_has_the_stock_trainers_numbers(kind, tmp_path):
    ours = trainer_with(CLASSES[kind][:2], tmp_path, of_one, reuse_log_probs=False, max_steps=2)
    stock = trainer_with(CLASSES[kind][2:], tmp_path, of_one, max_steps=2)
    # A ratio is the exponential of a sum of log-probabilities near -30, so their rounding stays in it. The stock
    # trainer's own loss changes by 1e-5 if its matrix products are summed in the other order.
    assert_same_training(ours, stock, rtol=1e-4, loss_size=1.0)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_reward_function_may_leave_the_model_in_evaluation_mode(kind, tmp_path):
    """It scores completions with the policy, and does not call `train` afterwards."""
    options = {"max_steps": 2, "learning_rate": 0.01, "split": (2, 2)}
    ours, stock = (
        trainer_with(classes, tmp_path, lambda model: model.eval(), **options)
        for classes in (CLASSES[kind][:2], CLASSES[kind][2:])
    )
    assert_same_training(ours, stock, rtol=1e-4, loss_size=1.0)
    assert ours.old_policy.left_out == 2


@pytest.mark.parametrize("options", [{}, {"trainer_options": {"peft_config": lora()}}], ids=["all weights", "adapter"])
@pytest.mark.parametrize("kind", CLASSES)
def test_steps_and_evaluations_are_no_change(kind, options, tmp_path):
    evaluated = {"split": (2, 4), "max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.01}
    trainer = trainer_with(CLASSES[kind][:2], tmp_path, lambda model: None, **evaluated, **options)
    trainer.train()
    assert trainer.old_policy.run == {}


@pytest.mark.parametrize("kind", CLASSES)
def test_an_adapter_that_writes_to_its_weights_in_each_pass(kind, tmp_path):
    """The pass of the old policy would have written them too."""
    adapter = OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj", "down_proj"], coft=True)
    options = {"max_steps": 2, "trainer_options": {"peft_config": adapter}}
    ours, stock = (
        trainer_with(classes, tmp_path, lambda model: None, **options)
        for classes in (CLASSES[kind][:2], CLASSES[kind][2:])
    )
    assert_same_training(ours, stock, rtol=1e-4, loss_size=1.0)
    assert ours.old_policy.left_out == 2 and ours.old_policy.run == {}


def test_no_weight_is_kept_alive():
    """A trainer outlives its model, for its logs."""
    model = tiny_model("llama")
    weights = PolicyWeights(model)
    replaced, last = weakref.ref(model.lm_head.weight), weakref.ref(model.model.norm.weight)
    model.lm_head.weight = nn.Parameter(torch.zeros(1))
    gc.collect()
    assert replaced() is None and weights.changed() == "lm_head.weight"
    del model
    gc.collect()
    assert last() is None and weights.changed() is not None


def test_a_write_through_data_is_not_counted():
    """As docs/trainers.md says."""
    model = tiny_model("llama")
    weights = PolicyWeights(model)
    model.lm_head.weight.data.add_(1)
    assert weights.changed() is None
    added(model.lm_head.weight)
    assert weights.changed() == "lm_head.weight"
