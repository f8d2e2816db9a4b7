"""`LigerGRPOTrainer` against `trl.GRPOTrainer` from one seed: the same completions, every gradient, every number."""

import copy
import re

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig
from tiny_models import VOCAB, LogitRows, assert_same_gradients, tiny_model, words
from trainer_parity import (
    LLAMA_AND_SLOWLY_QWEN3,
    WRITING,
    assert_same_training,
    build,
    letters,
    lora,
    loss_types,
    moved,
    own_fields,
    with_reference,
)
from trl import GRPOConfig, GRPOTrainer

from liger_trainer import LigerGRPOConfig, LigerGRPOTrainer

LOSSES = loss_types(GRPOTrainer)
METRICS = ("loss", "grad_norm", "entropy", "reward", "reward_std", "completions/mean_length", "num_tokens")
KINDS = {"full": {}, "lora": {"peft_config": lora()}}


def rows(n=8, seed=4):
    generator = torch.Generator().manual_seed(seed)
    return [{"prompt": words(generator, 2, 6)} for _ in range(n)]


def one(trainer_class, args_class, model, folder, part="lora_B", trainer_options=None, **options):
    options = {"num_generations": 2, "max_completion_length": 6} | options
    given = {"reward_funcs": letters} | (trainer_options or {})
    return moved(build(trainer_class, args_class, model, folder, rows(), trainer_options=given, **options), part)


def pair(model, folder, **options):
    return (
        one(LigerGRPOTrainer, LigerGRPOConfig, model, folder, **options),
        one(GRPOTrainer, GRPOConfig, model, folder, **options),
    )


def test_every_option_is_covered():
    """A new field of GRPOConfig needs a test here. The losses are read from TRL's code and from its help."""
    wording = GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"].split(". ")[1]
    assert set(LOSSES) == set(re.findall(r"'(\w+)'", wording)) >= {"grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo"}
    assert own_fields(GRPOConfig) - WRITING == {
        "loss_type",
        "beta",
        "num_iterations",
        "epsilon",
        "epsilon_high",
        "delta",
        "temperature",
        "scale_rewards",
        "importance_sampling_level",
        "sapo_temperature_neg",
        "sapo_temperature_pos",
        "vespo_k_pos",
        "vespo_lambda_neg",
        "top_entropy_quantile",
        "entropy_coef",
        "use_adaptive_entropy",
        "entropy_target",
        "off_policy_mask_threshold",
        "use_bias_correction_kl",
        "mask_truncated_completions",
        "pad_to_multiple_of",
        "cast_lm_head_to_fp32",
        "sync_ref_model",
        "ref_model_sync_steps",
        "steps_per_generation",
        "max_completion_length",
        "router_aux_loss_coef",  # below
        "vespo_lambda_pos",
        "vespo_k_neg",
        "entropy_coef_min",
        "entropy_coef_max",
        "entropy_coef_delta",
        "ref_model_mixup_alpha",
        "disable_dropout",  # variants of options above
        "multi_objective_aggregation",  # about rewards
        "vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min",
        "vllm_importance_sampling_cap",  # needs vLLM
    }


@pytest.mark.parametrize(
    "loss_type, model_type, kind, split",
    [(loss_type, *(("llama", "full", (4, 1)), ("qwen3", "lora", (1, 4)))[i % 2]) for i, loss_type in enumerate(LOSSES)],
    ids=str,
)
def test_every_loss(loss_type, model_type, kind, split, tmp_path):
    """Two updates from one batch of completions. At the second, the policy has changed since it wrote them."""
    options = {"loss_type": loss_type, "num_iterations": 2, "max_steps": 2, "epsilon": 0.05, "epsilon_high": 0.1}
    options |= {"split": split, "trainer_options": KINDS[kind]}
    ours, stock = pair(tiny_model(model_type), tmp_path, learning_rate=0.2, **options)
    loss_size = 1.0 if loss_type in ("cispo", "vespo") else 0.0  # log-probs weighted by advantages of both signs
    logs = assert_same_training(ours, stock, METRICS, loss_size=loss_size)
    clipped = {"cispo": "cispo_clip_ratio", "sapo": None, "vespo": None}.get(loss_type, "clip_ratio/region_mean")
    assert clipped is None or logs[1][clipped] > 0


@pytest.mark.parametrize("kind, split", [("full", (4, 1)), ("lora", (1, 4))], ids=str)
@pytest.mark.parametrize("model_type", LLAMA_AND_SLOWLY_QWEN3)
def test_every_split_with_a_reference(model_type, kind, split, tmp_path):
    model = with_reference(tiny_model(model_type), tmp_path)
    options = {"split": split, "beta": 0.2, "trainer_options": KINDS[kind], "max_steps": 2}
    assert_same_training(*pair(model, tmp_path, **options), (*METRICS, "kl"))


TWICE = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.5}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"temperature": 0.7, "scale_rewards": "batch", "gradient_checkpointing": True}, id="temperature"),
        pytest.param({"importance_sampling_level": "sequence", "delta": 1.2, **TWICE}, id="sequence-level-two-sided"),
        pytest.param({"top_entropy_quantile": 0.4, "entropy_coef": 0.3}, id="high-entropy-tokens-and-bonus"),
        pytest.param(
            {"use_adaptive_entropy": True, "entropy_coef": 0.2, "entropy_target": 9.0, "max_steps": 2}, id="adaptive"
        ),
        pytest.param(
            {"off_policy_mask_threshold": 0.01, "beta": 0.1, "use_bias_correction_kl": True, **TWICE}, id="off-policy"
        ),
        pytest.param(
            {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5, **TWICE}, id="sapo"
        ),
        pytest.param({"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 1.0, **TWICE}, id="vespo"),
        pytest.param({"mask_truncated_completions": True, "pad_to_multiple_of": 8}, id="truncated-masked"),
        pytest.param({"cast_lm_head_to_fp32": True, "beta": 0.2}, id="fp32-head"),
        pytest.param({"beta": 0.2, "sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 2}, id="synced"),
        pytest.param({"steps_per_generation": 2, "max_steps": 2, "num_generations": 4}, id="steps-per-generation"),
    ],
)
def test_options(options, tmp_path):
    model = tiny_model("llama")
    if options.get("mask_truncated_completions"):
        model.generation_config.eos_token_id = list(range(2, 30))  # about half of the completions end
    model = with_reference(model, tmp_path) if "beta" in options else model
    assert_same_training(*pair(model, tmp_path, **options), METRICS)


def test_mixture_of_experts(tmp_path):
    assert_same_training(*pair(tiny_model("qwen3_moe"), tmp_path, router_aux_loss_coef=0.3), (*METRICS, "aux_loss"))


def test_prompt_learning(tmp_path):
    config = {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)}
    ours, stock = pair(tiny_model("llama"), tmp_path, part="prompt_encoder", trainer_options=config)
    assert_same_training(ours, stock, METRICS)


def test_evaluation(tmp_path):
    ours, stock = pair(tiny_model("llama"), tmp_path, eval_strategy="steps", eval_steps=1)
    logs = assert_same_training(ours, stock, METRICS)
    assert {"eval_loss", "eval_reward", "eval_entropy"} <= logs[1].keys()


def scored(trainer):
    """A generated batch in training."""
    trainer.model.train()
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def test_adapter_on_the_head_trains(tmp_path):
    """TRL refuses it."""
    given = {"trainer_options": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "lm_head"])}}
    with pytest.raises(ValueError, match="adapter to `lm_head`"):
        one(GRPOTrainer, GRPOConfig, tiny_model("llama"), tmp_path, **given)
    with pytest.raises(ValueError, match="cast_lm_head_to_fp32 is True, and an adapter is on the LM head"):
        one(LigerGRPOTrainer, LigerGRPOConfig, tiny_model("llama"), tmp_path, cast_lm_head_to_fp32=True, **given)
    ours = one(LigerGRPOTrainer, LigerGRPOConfig, tiny_model("llama"), tmp_path, **given)
    ours.train()
    grads = []
    batch = scored(ours)
    for fused in (True, False):
        ours.model.zero_grad()
        if not fused:
            head = ours.model.get_base_model().lm_head
            head.lora_bias["default"] = True  # this adapter has a bias, which the fused head cannot have
            head.lora_B["default"].bias = torch.nn.Parameter(torch.zeros(VOCAB))
        ours.compute_loss(ours.model, batch).backward()
        grads.append({n: p.grad.clone() for n, p in ours.model.named_parameters() if "lora" in n and "bias" not in n})
    assert all(grad.norm() > 0 for grad in grads[0].values()) and any("lm_head" in name for name in grads[0])
    assert_same_gradients(*grads)


def test_scaled_loss_with_an_auxiliary_one(tmp_path):
    ours, stock = pair(tiny_model("llama"), tmp_path, entropy_coef=0.1)
    batch, grads = scored(ours), []
    for trainer in (ours, stock):
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        auxiliary = sum(p.square().sum() for p in trainer.model.parameters())
        (trainer.compute_loss(trainer.model, batch) * 3.7 + 0.01 * auxiliary).backward()
        grads.append({n: p.grad for n, p in trainer.model.named_parameters()})
    assert_same_gradients(*grads)


@pytest.mark.parametrize("kind", KINDS)
def test_no_logits_of_policy_or_reference(kind, tmp_path, monkeypatch):
    """Generating makes one row of logits for each completion.

    Scoring makes three, for both models; so does training.
    """
    monkeypatch.setattr("liger_triton._chunks._CPU_CHUNK_BYTES", 4 * VOCAB * 3)
    model = with_reference(tiny_model("llama"), tmp_path)
    ours = one(
        LigerGRPOTrainer, LigerGRPOConfig, model, tmp_path, beta=0.2, num_iterations=2, trainer_options=KINDS[kind]
    )
    with LogitRows() as seen:
        batch = scored(ours)
    assert seen.rows == 4 and {"old_per_token_logps", "ref_per_token_logps"} <= batch.keys()
    ours.current_gradient_accumulation_steps = 1
    with LogitRows() as seen:
        ours.compute_loss(ours.model, batch).backward()
    assert seen.rows == 3
    with LogitRows() as seen:
        ours.prediction_step(ours.model.eval(), rows(4), prediction_loss_only=True)
    assert seen.rows == 4


def test_reference_is_patched_and_survives_a_copy(tmp_path):
    ours = one(LigerGRPOTrainer, LigerGRPOConfig, with_reference(tiny_model("llama"), tmp_path), tmp_path, beta=0.2)
    batch = scored(ours)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)

    def scores(model):
        return ours._get_per_token_logps_and_entropies(model, ids, mask, batch["completion_ids"].shape[1])[0]

    torch.testing.assert_close(scores(ours.ref_model).detach(), batch["ref_per_token_logps"], rtol=1e-6, atol=0)
    twin = copy.deepcopy(ours.ref_model)
    ours.ref_model.lm_head.weight.data.zero_()
    torch.testing.assert_close(scores(twin).detach(), batch["ref_per_token_logps"], rtol=1e-6, atol=0)


def test_use_liger_false_is_the_stock_trainer(tmp_path):
    ours = one(LigerGRPOTrainer, LigerGRPOConfig, tiny_model("llama"), tmp_path, use_liger=False)
    assert_same_training(ours, one(GRPOTrainer, GRPOConfig, tiny_model("llama"), tmp_path), METRICS, rtol=0)


def test_options_without_effect_are_refused(tmp_path):
    with pytest.raises(ValueError, match="label_smoothing_factor is 0.1, which GRPOTrainer does not use"):
        one(LigerGRPOTrainer, LigerGRPOConfig, tiny_model("llama"), tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="'tokens', but LigerGRPOTrainer does not compute metrics of tokens"):
        one(LigerGRPOTrainer, LigerGRPOConfig, tiny_model("llama"), tmp_path, eval_predictions="tokens")
