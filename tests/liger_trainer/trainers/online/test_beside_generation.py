"""Patched models where completions are written: memory that is given back, other engines, and whole runs."""

import pytest
import torch
from engine_stand_in import EngineStandIn, WritingEngine, shapes_of
from peft import LoraConfig
from tiny_models import tiny_model
from trainer_parity import assert_same_training, build, letters
from trl import GRPOConfig, GRPOTrainer

from liger_trainer import LigerGRPOConfig, LigerGRPOTrainer, LigerRLOOConfig, LigerRLOOTrainer
from liger_trainer.trainers.shared_prompts import shared_prompts_of
from liger_trainer.varlen import groups
from liger_trainer.varlen.graphs.step_graphs import StepGraphs, use_graphs

CLASSES = {"grpo": (LigerGRPOTrainer, LigerGRPOConfig), "rloo": (LigerRLOOTrainer, LigerRLOOConfig)}
PROMPTS = [{"prompt": f"w4 w5 w{i} w7"} for i in range(10, 26)]


def model_of():
    model = tiny_model("llama")
    model.set_attn_implementation("sdpa")
    return model


def one(classes, folder, config=None, reward=letters, **options):
    given = {"reward_funcs": reward} | ({"peft_config": config} if config is not None else {})
    options = {"num_generations": 2, "max_completion_length": 4, "beta": 0.0} | options
    return build(*classes, model_of(), folder, PROMPTS, trainer_options=given, **options)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    "options, released",
    [
        ({"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}, 1),
        ({"use_vllm": True, "vllm_mode": "colocate"}, 0),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_enable_sleep_mode": True}, 0),
    ],
    ids=["sleeps", "awake", "server"],
)
def test_captured_steps_give_their_memory_to_an_engine_that_wakes(options, released, kind, tmp_path, monkeypatch):
    """Before it generates."""
    events = []
    write = EngineStandIn.generate

    def generate(self, *args, **kwargs):
        events.append("generates")
        return write(self, *args, **kwargs)

    monkeypatch.setattr(EngineStandIn, "generate", generate)
    monkeypatch.setattr(EngineStandIn, "vllm_client", WithInfo(), raising=False)
    monkeypatch.setattr(f"trl.trainer.{kind}_trainer.VLLMGeneration", EngineStandIn)
    monkeypatch.setattr(StepGraphs, "release", lambda self: events.append("released"))
    trainer = one(CLASSES[kind], tmp_path, **options)
    rows = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    with use_graphs(StepGraphs()):
        trainer._prepare_inputs(rows)
    assert events == ["released"] * released + ["generates"]


class WithInfo:
    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}


def even(completion_ids, **columns):
    """The part of its tokens that are even."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


RUNS = {
    "full": {"learning_rate": 3e-3},
    "lora": {
        "learning_rate": 2e-2,
        "config": LoraConfig(r=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj", "lm_head"]),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_with_an_engine_raises_its_reward(kind, tmp_path, monkeypatch):
    """From TRL's sync to the engine's completions, the correction, sorted rows and shared prompts."""
    monkeypatch.setattr(groups, "PAYS", groups.ALWAYS)
    monkeypatch.setattr(WritingEngine, "model_of", staticmethod(model_of))
    monkeypatch.setattr(WritingEngine, "shapes", shapes_of(model_of(), tmp_path / "checkpoint"))
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", WritingEngine)
    trainer = one(
        CLASSES["grpo"],
        tmp_path,
        reward=even,
        use_vllm=True,
        split=(8, 4),
        num_generations=8,
        max_steps=40,
        max_completion_length=8,
        optim="adamw_torch",
        lr_scheduler_type="constant",
        sort_by_prompt=True,
        **RUNS[kind],
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    rewards = [log["reward"] for log in logs]
    assert sum(rewards[:5]) / 5 < 0.6
    assert sum(rewards[-5:]) / 5 > 0.9
    # The engine has written with the weights of the policy, and is off by what it adds: 0.01 of a normal distribution.
    assert all(log["sampling/sampling_logp_difference/max"] < 0.06 for log in logs)
    assert trainer.old_policy.left_out == 40 and trainer.old_policy.run == {}
    assert trainer.sorting.sorted == shared_prompts_of(trainer.model).saved


@pytest.fixture
def all_requests_first(monkeypatch):
    """Start the thread that writes when it has every request.

    transformers starts it before. Then the scheduler decides which rows share a batch, and with that who draws which
    random number.
    """
    manager = pytest.importorskip("transformers.generation.continuous_batching").ContinuousBatchingManager
    start, add_requests = manager.start, manager.add_requests

    def add_and_start(self, *args, **kwargs):
        ids = add_requests(self, *args, **kwargs)
        start(self)
        return ids

    monkeypatch.setattr(manager, "start", lambda self: None)
    monkeypatch.setattr(manager, "add_requests", add_and_start)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_continuous_batching_writes_the_same(kind, tmp_path, all_requests_first):
    """transformers' own, in few blocks: by default it fills half of the memory."""
    blocks = {"num_blocks": 32, "block_size": 16, "max_batch_tokens": 64}
    options = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": blocks}
    if kind == "lora":
        options["config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(2)
    ours = one(CLASSES["grpo"], tmp_path, max_steps=2, **options)
    torch.manual_seed(2)
    stock = one((GRPOTrainer, GRPOConfig), tmp_path, max_steps=2, **options)
    ours.model.load_state_dict(stock.model.state_dict())
    assert_same_training(ours, stock, ("reward",))
    assert ours.model.config._attn_implementation == stock.model.config._attn_implementation
