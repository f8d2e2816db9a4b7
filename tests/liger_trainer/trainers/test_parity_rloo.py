"""`LigerRLOOTrainer` against `trl.RLOOTrainer` from one seed: the same completions, every gradient, every number."""

import pytest
import torch
from peft import LoraConfig
from tiny_models import VOCAB, LogitRows, assert_same_gradients, tiny_model, words
from trainer_parity import (
    LLAMA_AND_SLOWLY_QWEN3,
    WRITING,
    assert_same_training,
    build,
    letters,
    lora,
    moved,
    own_fields,
    with_reference,
)
from trl import RLOOConfig, RLOOTrainer

from liger_trainer import LigerRLOOConfig, LigerRLOOTrainer

METRICS = ("loss", "grad_norm", "entropy", "reward", "reward_std", "completions/mean_length", "num_tokens", "kl")
KINDS = {"full": {}, "lora": {"peft_config": lora()}}
TWICE = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.1}


def one(trainer_class, args_class, model_type, folder, trainer_options=None, **options):
    """`beta` is not 0 by default, so there is a reference."""
    generator = torch.Generator().manual_seed(4)
    rows = [{"prompt": words(generator, 2, 6)} for _ in range(8)]
    options = {"num_generations": 2, "max_completion_length": 6} | options
    given = {"reward_funcs": letters} | (trainer_options or {})
    model = with_reference(tiny_model(model_type), folder)
    return moved(build(trainer_class, args_class, model, folder, rows, trainer_options=given, **options))


def assert_same(ours, stock, metrics=METRICS):
    """If the policy has not changed yet, the loss is the mean of advantages of both signs: zero up to rounding."""
    return assert_same_training(ours, stock, metrics, loss_size=1.0)


def pair(*args, **options):
    return one(LigerRLOOTrainer, LigerRLOOConfig, *args, **options), one(RLOOTrainer, RLOOConfig, *args, **options)


def test_every_option_is_covered():
    """A new field of RLOOConfig needs a test here."""
    assert own_fields(RLOOConfig) - WRITING == {
        "beta",
        "num_iterations",
        "epsilon",
        "epsilon_high",
        "temperature",
        "normalize_advantages",
        "reward_clip_range",
        "pad_to_multiple_of",
        "sync_ref_model",
        "ref_model_sync_steps",
        "max_completion_length",
        "mask_truncated_completions",
        "router_aux_loss_coef",  # below
        "ref_model_mixup_alpha",
        "steps_per_generation",
        "disable_dropout",
    }


@pytest.mark.parametrize("kind, split", [("full", (4, 1)), ("lora", (1, 4))], ids=str)
@pytest.mark.parametrize("model_type", LLAMA_AND_SLOWLY_QWEN3)
def test_every_split(model_type, kind, split, tmp_path):
    options = {"split": split, "beta": 0.2, "trainer_options": KINDS[kind], "max_steps": 2}
    assert_same(*pair(model_type, tmp_path, **options))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"beta": 0.0, "temperature": 0.7, "normalize_advantages": True}, id="no-reference"),
        pytest.param({"epsilon": 0.05, "epsilon_high": 0.1, **TWICE}, id="clipped"),
        pytest.param({"reward_clip_range": (2.0, 7.0), "pad_to_multiple_of": 8, "num_generations": 4}, id="rewards"),
        pytest.param({"sync_ref_model": True, "ref_model_sync_steps": 1, **TWICE}, id="synced-reference"),
    ],
)
def test_options(options, tmp_path):
    metrics = METRICS if options.get("beta") != 0.0 else METRICS[:-1]
    logs = assert_same(*pair("llama", tmp_path, **options), metrics)
    assert "epsilon" not in options or logs[1]["clip_ratio/region_mean"] > 0


def test_mixture_of_experts(tmp_path):
    assert_same(*pair("qwen3_moe", tmp_path, router_aux_loss_coef=0.3), (*METRICS, "aux_loss"))


def test_evaluation(tmp_path):
    logs = assert_same(*pair("llama", tmp_path, eval_strategy="steps", eval_steps=1))
    assert {"eval_loss", "eval_reward", "eval_entropy", "eval_kl"} <= logs[1].keys()


def scored(trainer):
    """A generated batch in training."""
    trainer.model.train()
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def test_scaled_loss_with_an_auxiliary_one(tmp_path):
    ours, stock = pair("llama", tmp_path)
    batch, grads = scored(ours), []
    for trainer in (ours, stock):
        trainer.model.train()
        auxiliary = sum(p.square().sum() for p in trainer.model.parameters())
        (trainer.compute_loss(trainer.model, batch) * 3.7 + 0.01 * auxiliary).backward()
        grads.append({n: p.grad for n, p in trainer.model.named_parameters()})
    assert_same_gradients(*grads)


def test_adapter_on_the_head_trains(tmp_path):
    """TRL refuses it."""
    given = {"trainer_options": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "lm_head"])}}
    with pytest.raises(ValueError, match="adapter to `lm_head`"):
        one(RLOOTrainer, RLOOConfig, "llama", tmp_path, **given)
    ours = one(LigerRLOOTrainer, LigerRLOOConfig, "llama", tmp_path, **given)
    ours.compute_loss(ours.model, scored(ours)).backward()
    adapters = {n: p.grad.norm() for n, p in ours.model.named_parameters() if p.requires_grad}
    assert any("lm_head" in name for name in adapters) and all(norm > 0 for norm in adapters.values())


@pytest.mark.parametrize("kind", KINDS)
def test_no_logits_of_policy_or_reference(kind, tmp_path, monkeypatch):
    """Generating makes one row of logits for each completion.

    Scoring makes three, for both models; so does training.
    """
    monkeypatch.setattr("liger_triton._chunks._CPU_CHUNK_BYTES", 4 * VOCAB * 3)
    ours = one(LigerRLOOTrainer, LigerRLOOConfig, "llama", tmp_path, trainer_options=KINDS[kind])
    with LogitRows() as seen:
        batch = scored(ours)
    assert seen.rows == 4 and batch["advantages"].abs().sum() > 0
    with LogitRows() as seen:
        ours.compute_loss(ours.model, batch).backward()
    assert seen.rows == 3


def test_options_without_effect_are_refused(tmp_path):
    with pytest.raises(ValueError, match="label_smoothing_factor is 0.1, which RLOOTrainer does not use"):
        one(LigerRLOOTrainer, LigerRLOOConfig, "llama", tmp_path, label_smoothing_factor=0.1)
