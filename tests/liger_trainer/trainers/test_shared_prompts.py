"""Prompts computed once in GRPO, RLOO and DPO: every gradient and number equals the stock trainers'."""

import json

import pytest
import torch
from peft import LoraConfig
from tiny_models import ragged_pairs, tiny_model, words
from trainer_parity import (
    DPO_LIMITS,
    LORA,
    assert_same_run,
    assert_same_training,
    build,
    build_dpo,
    letters,
    lora,
    moved,
    trained,
    with_reference,
)
from trl import DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from varlen_batches import capture_on_cpu

from liger_trainer import (
    LigerDPOConfig,
    LigerDPOTrainer,
    LigerGRPOConfig,
    LigerGRPOTrainer,
    LigerRLOOConfig,
    LigerRLOOTrainer,
)
from liger_trainer.trainers.shared_prompts import shared_prompts_of
from liger_trainer.varlen import groups, host_copies, plan_batch

METRICS = ("loss", "grad_norm", "entropy", "reward", "kl")
CLASSES = {
    "grpo": (LigerGRPOTrainer, LigerGRPOConfig, GRPOTrainer, GRPOConfig),
    "rloo": (LigerRLOOTrainer, LigerRLOOConfig, RLOOTrainer, RLOOConfig),
}


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Share prompts of any length."""
    monkeypatch.setattr(groups, "PAYS", groups.ALWAYS)


def model_of(name="llama"):
    model = tiny_model(name)
    model.set_attn_implementation("sdpa")
    model.generation_config.eos_token_id = [*range(2, 12)]  # some completions end before the others
    return model


def online(trainer_class, args_class, folder, model_type="llama", trainer_options=None, **options):
    generator = torch.Generator().manual_seed(4)
    rows = [{"prompt": words(generator, 2, 6)} for _ in range(8)]
    options = {"num_generations": 4, "max_completion_length": 6, "beta": 0.2} | options
    given = {"reward_funcs": letters} | (trainer_options or {})
    model = with_reference(model_of(model_type), folder)
    return moved(build(trainer_class, args_class, model, folder, rows, trainer_options=given, **options))


def compare(kind, folder, metrics=METRICS, **options):
    ours_class, ours_args, stock_class, stock_args = CLASSES[kind]
    ours = online(ours_class, ours_args, folder, **options)
    stock = online(stock_class, stock_args, folder, **options)
    assert_same_training(ours, stock, metrics, loss_size=1.0)
    return ours


OPTIONS = [
    pytest.param({"split": (8, 1)}, id="two-groups"),
    pytest.param({"num_iterations": 2, "max_steps": 2, "learning_rate": 0.2}, id="two-updates"),
    pytest.param({"steps_per_generation": 2, "split": (4, 2), "max_steps": 2}, id="two-steps-a-generation"),
    pytest.param({"gradient_checkpointing": True, "temperature": 0.7}, id="checkpointing"),
    pytest.param({"trainer_options": {"peft_config": lora()}}, id="lora"),
    pytest.param({"model_type": "qwen3_moe", "router_aux_loss_coef": 0.3}, id="experts"),
    pytest.param({"model_type": "gemma3_text"}, id="windows"),
    pytest.param({"mask_truncated_completions": True}, id="truncated-masked"),
]


@pytest.mark.diagonal
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", CLASSES)
def test_completions_of_a_prompt_share_it(kind, options, tmp_path):
    trainer = compare(kind, tmp_path, **options)
    shared = shared_prompts_of(trainer.model)
    assert shared.saved > 0
    assert shared.unshared == {}
    report = json.loads((tmp_path / type(trainer).__name__ / "liger_report.json").read_text())
    assert report["shared_prompts"] == shared.to_dict()


def test_the_reference_and_the_old_policy_share_too(tmp_path, monkeypatch):
    """For a model without an adapter, the reference is a separate model."""
    trainer = compare("grpo", tmp_path, num_iterations=2, max_steps=2)
    policy = shared_prompts_of(trainer.model)
    reference = shared_prompts_of(trainer.ref_model)
    assert reference.calls == 1  # once a generation batch
    assert policy.calls == 1 + 2  # the old policy once, then each update


# A prompt that begins the other one, which has padding ids inside; equal completions, and some of one token.
PREFIXES = ([5, 6, 7], [5, 6, 7, 0, 0])
COMPLETIONS = ([0, 0, 9], [0, 0, 9], [8], [0], [0, 9, 5], [9], [0], [11, 5, 6, 7, 0, 3])


def awkward(trainer_class, args_class, folder, model_type="llama", env_mask=False, **options):
    """A trainer that gets `COMPLETIONS` of `PREFIXES`; with `env_mask`, some of their tokens are of an environment."""
    prompts = [PREFIXES[0]] * 4 + [PREFIXES[1]] * 4
    completions = [list(ids) for ids in COMPLETIONS]

    def tokenize(self, texts):
        return prompts, None, {}

    def generate(self, *args, **kwargs):
        return (completions, None) if args_class in (LigerGRPOConfig, GRPOConfig) else completions

    def rollout(texts, trainer):
        found = {"prompt_ids": prompts, "completion_ids": completions}
        found["logprobs"] = [[-1.0] * len(ids) for ids in completions]
        return found | {"env_mask": [[int(i % 3 != 1) for i in ids] for ids in completions]}

    methods = {} if env_mask else {"_tokenize_prompts": tokenize, "_generate_single_turn": generate}
    given = {"reward_funcs": lambda completions, **_: [0.3, 0.9, 0.1, 0.6, 0.2, 0.8, 0.5, 0.0]}
    if env_mask:
        given["rollout_func"] = rollout
    named = type(trainer_class.__name__, (trainer_class,), methods)
    rows = [{"prompt": "w5"}, {"prompt": "w6"}]
    options = {"num_generations": 4, "split": (8, 1), "max_completion_length": 6} | options
    return build(named, args_class, model_of(model_type), folder, rows, trainer_options=given, **options)


TWICE = {"num_iterations": 2, "max_steps": 2}
AWKWARD = [
    pytest.param("grpo", TWICE | {"importance_sampling_level": "sequence"}, id="sequences"),
    pytest.param("grpo", {"env_mask": True}, id="environment"),
    pytest.param("grpo", {"loss_type": "bnpo", "mask_truncated_completions": True}, id="truncated"),
    pytest.param("grpo", {"split": (2, 4), "top_entropy_quantile": 0.5, "pad_to_multiple_of": 8}, id="entropy"),
    pytest.param("grpo", {"split": (4, 2), "model_type": "gemma3_text"}, id="windows"),
    pytest.param("rloo", {"split": (4, 2), "beta": 0.0}, id="rloo"),
]


@pytest.mark.parametrize("kind, options", AWKWARD)
def test_awkward_rows(kind, options, tmp_path):
    ours_class, ours_args, stock_class, stock_args = CLASSES[kind]
    ours = awkward(ours_class, ours_args, tmp_path, **options)
    stock = awkward(stock_class, stock_args, tmp_path, **options)
    assert_same_training(ours, stock, ("loss", "grad_norm", "entropy"), loss_size=1.0)
    assert shared_prompts_of(ours.model).saved > 0


CAPTURED = [
    pytest.param("grpo", {"num_iterations": 2}, id="grpo"),
    pytest.param("grpo", {"trainer_options": {"peft_config": lora()}}, id="grpo-lora"),
    pytest.param("rloo", {"num_iterations": 2}, id="rloo"),
]


@pytest.mark.parametrize("kind, options", CAPTURED)
def test_captured_steps_share_too(kind, options, tmp_path, monkeypatch):
    """With other lengths in each step, but for the second update on a generation batch."""
    capture_on_cpu(monkeypatch)
    trainer = compare(kind, tmp_path, max_steps=3, learning_rate=0.02, **options)
    summary = trainer.captured_steps
    assert summary.replayed >= 2, summary.to_dict()
    assert shared_prompts_of(trainer.model).calls >= summary.replayed


def test_dropout_of_an_adapter_keeps_rows_apart(tmp_path):
    ours, args, *_ = CLASSES["grpo"]
    config = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    trainer = online(ours, args, tmp_path, trainer_options={"peft_config": config})
    trainer.train()
    assert [*shared_prompts_of(trainer.model).unshared] == ["a Dropout with p=0.1 is on"]


@pytest.mark.parametrize("kind", ["grpo", "dpo"])
def test_noise_of_embeddings_keeps_rows_apart_and_the_report_says_so(kind, tmp_path):
    ours, args, *_ = CLASSES["grpo"]
    given = {"neftune_noise_alpha": 5.0, "max_steps": 1}
    if kind == "grpo":
        trainer = online(ours, args, tmp_path, **given)
    else:
        trainer = build_dpo(LigerDPOTrainer, model_of(), tmp_path, **given)
    trainer.train()
    shared = shared_prompts_of(trainer.model)
    assert shared is not None and shared.calls == 0
    (reason,) = shared.unshared
    assert "neftune" in reason


def test_share_prompts_false_shares_nothing(tmp_path):
    ours, args, *_ = CLASSES["grpo"]
    trainer = online(ours, args, tmp_path, share_prompts=False)
    trainer.train()
    assert shared_prompts_of(trainer.model) is None


def test_a_bad_value_is_refused(tmp_path):
    for args in (LigerGRPOConfig, LigerDPOConfig, LigerRLOOConfig):
        with pytest.raises(ValueError, match="share_prompts is 'no'; expected true or false"):
            args(output_dir=str(tmp_path), share_prompts="no", use_cpu=True, bf16=False)


@pytest.mark.parametrize("kind", CLASSES)
def test_the_host_knows_the_rows_of_every_call(kind, tmp_path, monkeypatch):
    """Without waiting for the device, each call's ids, masks and labels equal what was remembered of them."""
    known = []
    stock = plan_batch.values_of

    def values(*tensors):
        for x in tensors:
            copy = host_copies._known(x)
            known.append(copy is not None and torch.equal(copy, x.cpu()))
        return stock(*tensors)

    ours, args, *_ = CLASSES[kind]
    trainer = online(ours, args, tmp_path, split=(4, 2), num_iterations=2, max_steps=3)
    monkeypatch.setattr(plan_batch, "values_of", values)  # not earlier: a proof makes its batches on the host
    monkeypatch.setattr("liger_trainer.trainers.online.rows._is_on_host", lambda x: host_copies._known(x) is not None)
    trainer.train()
    assert known and all(known)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="full"),
        pytest.param({"trainer_options": {"peft_config": LoraConfig(r=4, target_modules=LORA)}}, id="lora"),
        pytest.param({"ld_alpha": 0.5, "loss_type": ["sigmoid", "sft"]}, id="prompts-and-lengths"),
        pytest.param({"precompute_ref_log_probs": True}, id="precomputed"),
        pytest.param({"gradient_checkpointing": True}, id="checkpointing"),
    ],
)
def test_pairs_share_their_prompt(options, tmp_path):
    want = trained(build_dpo(DPOTrainer, model_of(), tmp_path, **options))
    trainer = build_dpo(LigerDPOTrainer, model_of(), tmp_path, **options)
    assert_same_run(trained(trainer), want, limits=DPO_LIMITS)
    shared = shared_prompts_of(trainer.model)
    steps = len(trainer.train_dataset) // 4
    assert shared.saved >= steps * 4 * 2  # prompts of three tokens: each pair saves two
    assert shared.unshared == {}


def test_captured_pairs_share_too(tmp_path, monkeypatch):
    want = trained(build_dpo(DPOTrainer, model_of(), tmp_path))
    capture_on_cpu(monkeypatch)
    trainer = build_dpo(LigerDPOTrainer, model_of(), tmp_path)
    assert_same_run(trained(trainer), want, limits=DPO_LIMITS)
    assert trainer.captured_steps.replayed >= 1, trainer.captured_steps.to_dict()
    assert shared_prompts_of(trainer.model).saved > 0


def test_pairs_without_a_prompt_of_two_tokens_are_as_before(tmp_path):
    rows = [row | {"prompt": row["prompt"].split()[0]} for row in ragged_pairs()]
    trainer = build_dpo(LigerDPOTrainer, model_of(), tmp_path, rows=rows)
    trained(trainer)
    assert shared_prompts_of(trainer.model) is None
