"""Options of TRL's trainers that generate completions (GRPO, RLOO, distillation): ours compared with TRL's."""

import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import VOCAB, tiny_model, tiny_tokenizer
from trainer_parity import letters, with_reference
from transformers import AutoModelForSequenceClassification, LlamaConfig
from trl import (
    DistillationConfig,
    DistillationTrainer,
    GRPOConfig,
    GRPOTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl_options import (
    adapters,
    as_conversation,
    case,
    chat_tokenizer,
    compare,
    expert_lora,
    source,
    with_columns,
    words,
)

from liger_trainer import (
    LigerDistillationConfig,
    LigerDistillationTrainer,
    LigerGRPOConfig,
    LigerGRPOTrainer,
    LigerRLOOConfig,
    LigerRLOOTrainer,
)

CHAT = {"processing_class": chat_tokenizer()}
EVAL = {"eval_strategy": "steps", "eval_steps": 1}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
CHECKPOINT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
# The second update uses the first one's completions. The policy has changed since it wrote them.
TWICE = {"num_iterations": 2, "learning_rate": 0.2, "epsilon": 0.05}


def prompts(n=8):
    generator = source()
    return [{"prompt": words(generator, 2, 6)} for _ in range(n)]


def lengths(completions, **columns):
    """A second reward, for texts and conversations."""
    return [len(text if isinstance(text, str) else text[0]["content"]) / 10 for text in completions]


def sometimes(completions, **columns):
    """A reward without an opinion on every second completion."""
    return [None if i % 2 else reward for i, reward in enumerate(letters(completions))]


async def letters_later(completions, **columns):
    return letters(completions)


def of_the_column(completions, bonus, **columns):
    return [reward + extra for reward, extra in zip(letters(completions), bonus, strict=True)]


def judge():
    """A reward model."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=0,
    )
    return AutoModelForSequenceClassification.from_config(config)


def lora(**options):
    return {"peft_config": LoraConfig(r=4, target_modules="all-linear", **options)}


def ending(model, folder):
    """About half of the completions end before they are cut."""
    model.generation_config.eos_token_id = list(range(2, 30))


def ending_with_reference(model, folder):
    ending(model, folder)
    return with_reference(model, folder)


def rewarded(*functions, **more):
    return {"given": {"reward_funcs": list(functions)} | more}


def shared(**given):
    """Options that all three share. `given` are arguments of the trainer together with an adapter."""
    rows = prompts()
    return [
        case(
            "conversation",
            True,
            rows=as_conversation(rows),
            given=CHAT | given | ({"reward_funcs": lengths} if "reward_funcs" in given else {}),
        ),
        case("other-columns", rows=with_columns(rows, source="w3"), given=given),
        case(
            "template-arguments",
            rows=as_conversation(rows),
            chat_template_kwargs={"formal": True},
            given=CHAT | given | ({"reward_funcs": lengths} if "reward_funcs" in given else {}),
        ),
        case("ending", True, rows=rows, given=given, prepare=ending),
        case("accumulated", rows=rows, given=given, split=(2, 2)),
        case("autocast", rows=rows, given=given, bf16=True, max_steps=1, rtol=0.1),
        case("adam", rows=rows, given=given, optim="adamw_torch", learning_rate=1e-3, max_grad_norm=0.5),
        case("checkpoint", rows=rows, given=given, **CHECKPOINT),
        case("checkpoint-reentrant", rows=rows, given=given, **REENTRANT),
        case("tied-softcap", rows=rows, given=given, model=lambda: tiny_model("gemma2", tie_word_embeddings=True)),
        case("evaluation", rows=rows, given=given, **EVAL),
        case("sampling", rows=rows, given=given, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1),
        *(
            case(f"adapter-{name}", rows=rows, part=part, given=given | {"peft_config": config})
            for name, (config, part) in adapters().items()
            if name in ("lora-dropout", "rslora", "dora", "lora-head-saved", "ia3", "norms")
        ),
        case("adapter-checkpoint", rows=rows, given=given | lora(), **CHECKPOINT),
        case("adapter-checkpoint-reentrant", rows=rows, given=given | lora(), **REENTRANT),
        case("adapter-experts", rows=rows, model="qwen3_moe", given=given | {"peft_config": expert_lora()}),
    ]


REWARDS = {"reward_funcs": letters}
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
GRPO_CASES = [
    *shared(**REWARDS),
    *(
        case(
            f"{loss}-{name}",
            loss == "dapo" and name == "sequence",
            rows=prompts(),
            **{"loss_type": loss, "loss_size": 1.0, "given": REWARDS, "prepare": ending} | TWICE | options,
        )
        for loss, (name, options) in itertools.product(
            LOSSES,
            {
                "sequence": {"importance_sampling_level": "sequence"},
                "lora": {"given": REWARDS | lora()},
                "reference": {"beta": 0.2, "prepare": ending_with_reference},
                "entropy-mask": {"top_entropy_quantile": 0.5},
                "truncated-masked": {"mask_truncated_completions": True},
                "evaluated": EVAL | {"num_generations_eval": 2},
            }.items(),
        )
        if not (name == "sequence" and loss in ("cispo", "sapo", "vespo"))
    ),
    *(
        case(f"rewards-scaled-by-{scale}", rows=prompts(), given=REWARDS, scale_rewards=scale, num_generations=4)
        for scale in ("group", "batch", "none")
    ),
    case(
        "rewards-weighted", rows=prompts(), reward_weights=[0.7, 0.3], num_generations=4, **rewarded(letters, lengths)
    ),
    case(
        "rewards-normalized-apart",
        True,
        rows=prompts(),
        reward_weights=[0.7, 0.3],
        num_generations=4,
        multi_objective_aggregation="normalize_then_sum",
        **rewarded(letters, lengths),
    ),
    case("rewards-missing", rows=prompts(), num_generations=4, **rewarded(letters, sometimes)),
    case("rewards-later", rows=prompts(), **rewarded(letters_later)),
    case("rewards-of-a-column", rows=with_columns(prompts(), bonus=0.3), **rewarded(of_the_column)),
    case(
        "rewards-of-a-model",
        rows=prompts(),
        **rewarded(judge(), letters, reward_processing_classes=[tiny_tokenizer(), None]),
    ),
    case("two-sided", rows=prompts(), given=REWARDS, delta=1.1, **TWICE),
    case("clipped-apart", rows=prompts(), given=REWARDS, epsilon_high=0.3, **TWICE),
    case("entropy-bonus-of-an-adapter", rows=prompts(), given=REWARDS | lora(), entropy_coef=0.3),
    case(
        "entropy-mask-reference",
        rows=prompts(),
        given=REWARDS,
        top_entropy_quantile=0.3,
        beta=0.3,
        prepare=with_reference,
    ),
    case(
        "off-policy-of-an-adapter",
        rows=prompts(),
        given=REWARDS | lora(),
        off_policy_mask_threshold=0.01,
        loss_size=1.0,
        **TWICE,
    ),
    case(
        "bias-correction-of-an-adapter",
        rows=prompts(),
        given=REWARDS | lora(),
        use_bias_correction_kl=True,
        beta=0.2,
        loss_size=1.0,
        **TWICE,
    ),
    case(
        "synced-mixed",
        rows=prompts(),
        given=REWARDS,
        beta=0.2,
        sync_ref_model=True,
        ref_model_sync_steps=1,
        ref_model_mixup_alpha=0.3,
        prepare=with_reference,
        max_steps=3,
    ),
    case("fp32-head-twice", rows=prompts(), given=REWARDS, cast_lm_head_to_fp32=True, loss_size=1.0, **TWICE),
    case(
        "fp32-head-bf16-model",
        rows=prompts(),
        given=REWARDS,
        cast_lm_head_to_fp32=True,
        max_steps=1,
        rtol=0.1,
        model=lambda: tiny_model("llama", dtype=torch.bfloat16),
    ),
    case(
        "experts-evaluated",
        rows=prompts(),
        model="qwen3_moe",
        given=REWARDS,
        router_aux_loss_coef=0.2,
        metrics=("aux_loss",),
        **EVAL,
    ),
    case(
        "adapter-of-a-peft-model",
        rows=prompts(),
        given=REWARDS,
        beta=0.2,
        prepare=lambda model, folder: get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")),
    ),
    case("not-shuffled", rows=prompts(), given=REWARDS, shuffle_dataset=False, num_generations=4),
    case("generated-in-advance", rows=prompts(), given=REWARDS, generation_batch_size=8, max_steps=2),
]
RLOO_CASES = [
    *shared(**REWARDS),
    *(
        case(name, rows=prompts(), **{"given": REWARDS, "loss_size": 1.0} | options)
        for name, options in {
            "reference-twice": {"beta": 0.2, "prepare": ending_with_reference} | TWICE,
            "reference-of-an-adapter": {"beta": 0.2, "given": REWARDS | lora()} | TWICE | {"learning_rate": 0.02},
            "no-reference-twice": {"beta": 0.0, "prepare": ending} | TWICE,
            "normalized": {"beta": 0.0, "normalize_advantages": True, "num_generations": 4},
            "truncated-masked": {"beta": 0.0, "mask_truncated_completions": True, "prepare": ending},
            "rewards-weighted": {"reward_weights": [0.7, 0.3], "beta": 0.0} | rewarded(letters, lengths),
            "rewards-missing": {"beta": 0.0, "num_generations": 4} | rewarded(letters, sometimes),
            "rewards-of-a-model": {"beta": 0.0}
            | rewarded(judge(), letters, reward_processing_classes=[tiny_tokenizer(), None]),
            "clipped-evaluated": {"beta": 0.0, "reward_clip_range": (2.0, 7.0)} | EVAL,
            "synced-mixed": {
                "beta": 0.2,
                "sync_ref_model": True,
                "ref_model_sync_steps": 1,
                "max_steps": 3,
                "ref_model_mixup_alpha": 0.3,
                "prepare": with_reference,
            },
            "experts-evaluated": {"beta": 0.0, "model": "qwen3_moe", "router_aux_loss_coef": 0.2} | EVAL,
        }.items()
    ),
]


def teacher(model_type="llama", **more):
    return {"teacher_model": tiny_model(model_type, seed=7, **more)}


DISTILLATION_CASES = [
    *shared(**teacher()),
    *(
        case(f"beta-{beta:g}-{name}", rows=prompts(), beta=beta, **{"given": teacher()} | options)
        for beta, (name, options) in itertools.product(
            (0.0, 0.5, 1.0),
            {
                "hot": {"temperature": 1.7, "prepare": ending},
                "lora": {"given": teacher() | lora(), "prepare": ending},
                "evaluated": {"prepare": ending} | EVAL,
                "of-experts": {"given": teacher("qwen3_moe")},
                "checkpoint": {"prepare": ending} | CHECKPOINT,
            }.items(),
        )
    ),
]
SHORT = {"max_completion_length": 6}


@pytest.mark.parametrize("options", GRPO_CASES)
def test_grpo(options, tmp_path):
    defaults = {"num_generations": 2} | SHORT
    compare((LigerGRPOTrainer, LigerGRPOConfig), (GRPOTrainer, GRPOConfig), tmp_path, options, defaults)


@pytest.mark.parametrize("options", RLOO_CASES)
def test_rloo(options, tmp_path):
    """If the policy has not changed, the loss is the mean of advantages of both signs: zero up to rounding."""
    defaults = {"num_generations": 2, "beta": 0.0, "loss_size": 1.0, "learning_rate": 0.02} | SHORT
    compare((LigerRLOOTrainer, LigerRLOOConfig), (RLOOTrainer, RLOOConfig), tmp_path, options, defaults)


@pytest.mark.parametrize("options", DISTILLATION_CASES)
def test_distillation(options, tmp_path):
    ours = (LigerDistillationTrainer, LigerDistillationConfig)
    compare(ours, (DistillationTrainer, DistillationConfig), tmp_path, options, SHORT)
