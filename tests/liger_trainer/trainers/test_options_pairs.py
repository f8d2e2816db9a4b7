"""Options, forms of rows and adapters of TRL's preference trainers (DPO, KTO, CPO, ORPO), compared with ours."""

import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl_options import (
    TOOL,
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
    LigerCPOConfig,
    LigerCPOTrainer,
    LigerDPOConfig,
    LigerDPOTrainer,
    LigerKTOConfig,
    LigerKTOTrainer,
    LigerORPOConfig,
    LigerORPOTrainer,
)

CHAT = {"processing_class": chat_tokenizer()}
EVAL = {"eval_strategy": "steps", "eval_steps": 1}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
CHECKPOINT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
ALL_LINEAR = {"given": {"peft_config": LoraConfig(r=4, target_modules="all-linear")}}
BF16 = {"bf16": True, "max_steps": 1, "rtol": 0.1}


def pairs(n=8):
    generator = source()
    return [
        {
            "prompt": words(generator, 2, 8),
            "chosen": " " + words(generator, 2, 8),
            "rejected": " " + words(generator, 2, 8),
        }
        for _ in range(n)
    ]


def labelled(n=8):
    generator = source()
    return [
        {"prompt": words(generator, 2, 8), "completion": " " + words(generator, 2, 9), "label": i % 3 != 1}
        for i in range(n)
    ]


def without_prompt(rows):
    """The prompt is the common beginning of chosen and rejected."""
    return [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in rows]


def conversations_without_prompt(rows):
    return [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in as_conversation(rows)]


def reference(model_type="llama", **more):
    """A reference other than the policy, because otherwise every log-ratio would be zero."""
    return {"given": {"ref_model": tiny_model(model_type, seed=7)} | more}


REFERENCE = reference()["given"]


def sizes(prediction):
    """Metrics for trainers that pass something other than logits to `compute_metrics`."""
    return {"size": float(torch.as_tensor(prediction.predictions).abs().mean())}


def shared(rows, **given):
    """Options that all four share. `given` are arguments of the trainer in cases without an adapter."""
    adam = {"optim": "adamw_torch", "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
    return [
        case("conversation", True, rows=as_conversation(rows), given=CHAT | given),
        case("other-columns", rows=with_columns(rows, source="w3"), given=given),
        case("cut", rows=rows, max_length=12, given=given),
        case("accumulated", rows=rows, split=(2, 2), given=given),
        case("autocast", rows=rows, given=given, **BF16),
        case("adam", rows=rows, given=given, **adam),
        case("checkpoint", rows=rows, given=given, **CHECKPOINT),
        case("checkpoint-reentrant", rows=rows, given=given, **REENTRANT),
        case("tied-softcap", rows=rows, model=lambda: tiny_model("gemma2", tie_word_embeddings=True), given=given),
        case("evaluation", rows=rows, given=given, **EVAL),
        case(
            "evaluation-accumulated",
            rows=rows,
            given=given,
            per_device_eval_batch_size=2,
            eval_accumulation_steps=1,
            **EVAL,
        ),
        case("noise", rows=rows, neftune_noise_alpha=5.0, given=given),
        *(
            case(f"adapter-{name}", rows=rows, part=part, given={"peft_config": config})
            for name, (config, part) in adapters().items()
            if name in ("lora-dropout", "rslora", "dora", "lora-head-saved", "lora-layer", "ia3", "vera", "norms")
        ),
        case("adapter-checkpoint", rows=rows, **ALL_LINEAR, **CHECKPOINT),
        case("adapter-checkpoint-reentrant", rows=rows, **ALL_LINEAR, **REENTRANT),
        case("adapter-experts", rows=rows, model="qwen3_moe", given={"peft_config": expert_lora()}),
        case("adapter-autocast", rows=rows, **ALL_LINEAR, **BF16 | {"rtol": 0.3}),
    ]


MPO = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
DIVERGENCES = ["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
DPO_CASES = [
    *shared(pairs(), **REFERENCE),
    case("prompt-in-both", True, rows=without_prompt(pairs()), **reference()),
    case("conversation-prompt-in-both", rows=conversations_without_prompt(pairs()), **reference(**CHAT)),
    case("tools", rows=with_columns(as_conversation(pairs()), tools=[TOOL]), **reference(**CHAT)),
    case(
        "template-arguments",
        rows=with_columns(as_conversation(pairs()), chat_template_kwargs={"formal": True}),
        **reference(**CHAT),
    ),
    *(
        case(f"{loss}-{divergence}", rows=pairs(), loss_type=[loss], f_divergence_type=divergence, **reference())
        for loss, divergence in itertools.product(("sigmoid", "ipo", "hinge", "sigmoid_norm"), DIVERGENCES[1:])
    ),
    *(
        case(f"smoothed-{loss}", rows=pairs(), loss_type=[loss], label_smoothing=0.2, **reference())
        for loss in ("robust", "exo_pair", "aot", "aot_unpaired")
    ),
    case("losses-evaluated", rows=pairs(), **MPO, **reference(), **EVAL),
    case("losses-of-an-adapter", True, rows=pairs(), **MPO, **ALL_LINEAR),
    case("losses-checkpoint", rows=pairs(), **MPO, **reference(), **CHECKPOINT),
    case("losses-apo", rows=pairs(), loss_type=["apo_zero", "sft"], loss_weights=[1.0, 0.5], **reference()),
    case("losses-aot", rows=pairs(), loss_type=["aot", "sigmoid_norm"], **reference()),
    case("weighted-losses-of-a-cut-row", rows=pairs(), **MPO, max_length=8, **reference()),
    case("sft-of-an-adapter", rows=pairs(), loss_type=["sft"], **ALL_LINEAR),
    case("precomputed-evaluated", rows=pairs(), precompute_ref_log_probs=True, **reference(), **EVAL),
    case("precomputed-adapter", True, rows=pairs(), precompute_ref_log_probs=True, **ALL_LINEAR),
    case("precomputed-losses", rows=pairs(), precompute_ref_log_probs=True, **MPO, **reference()),
    case(
        "synced",
        rows=pairs(),
        sync_ref_model=True,
        ref_model_sync_steps=1,
        ref_model_mixup_alpha=0.3,
        max_steps=3,
        **reference(),
    ),
    case(
        "synced-own-reference",
        rows=pairs(),
        sync_ref_model=True,
        ref_model_sync_steps=2,
        max_steps=3,
        given=lambda folder: {"ref_model": tiny_model("llama", seed=3)},
    ),
    case("weighting-and-length", rows=pairs(), use_weighting=True, ld_alpha=0.5, beta=0.4, **reference()),
    case("weighting-of-an-adapter", rows=pairs(), use_weighting=True, **ALL_LINEAR),
    case("padding", rows=pairs(), pad_to_multiple_of=8, **reference(), **EVAL),
    case(
        "experts",
        rows=pairs(),
        model="qwen3_moe",
        router_aux_loss_coef=0.2,
        metrics=("aux_loss",),
        **reference("qwen3_moe"),
        **EVAL,
    ),
    case(
        "experts-of-an-adapter",
        rows=pairs(),
        model="qwen3_moe",
        router_aux_loss_coef=0.2,
        given={"peft_config": expert_lora()},
    ),
    case(
        "evaluation-metrics",
        rows=pairs(),
        given={"compute_metrics": sizes, "ref_model": tiny_model("llama", seed=7)},
        **EVAL,
    ),
    case("vision-language-model", rows=pairs(), model="qwen2_5_vl", **reference("qwen2_5_vl")),
    case("linear-attention", rows=pairs(), model="qwen3_next", **reference("qwen3_next")),
    case(
        "dropout",
        rows=pairs(),
        model=lambda: tiny_model("llama", attention_dropout=0.3),
        disable_dropout=False,
        **reference(),
    ),
    case(
        "adapter-of-a-peft-model",
        rows=pairs(),
        prepare=lambda model, folder: get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")),
    ),
    case("adapter-prompt", rows=pairs(), part="prompt_encoder", given={"peft_config": adapters()["prompt"][0]}),
    case("adapter-p-tuning", rows=pairs(), part="embedding", given={"peft_config": adapters()["p-tuning"][0]}),
]
KTO_CASES = [
    *shared(labelled(), **REFERENCE),
    case("from-pairs", True, rows=pairs(), **reference()),
    case("conversation-from-pairs", rows=as_conversation(pairs()), **reference(**CHAT)),
    case("from-pairs-prompt-in-both", rows=without_prompt(pairs()), **reference()),
    case("tools", rows=with_columns(as_conversation(labelled()), tools=[TOOL]), **reference(**CHAT)),
    *(
        case(f"{loss}-{name}", loss == "apo_zero_unpaired" and name == "lora", rows=labelled(), loss_type=loss, **given)
        for loss, (name, given) in itertools.product(
            ("kto", "apo_zero_unpaired"),
            {
                "lora": ALL_LINEAR,
                "weights": {"desirable_weight": 1.7, "undesirable_weight": 0.4} | reference(),
                "evaluated": reference() | EVAL,
                "precomputed-adapter": ALL_LINEAR | {"precompute_ref_log_probs": True},
                "precomputed-evaluated": reference() | EVAL | {"precompute_ref_log_probs": True},
                "checkpoint": reference() | CHECKPOINT,
                "cut": reference() | {"max_length": 8},
            }.items(),
        )
    ),
    case(
        "synced",
        rows=labelled(),
        sync_ref_model=True,
        ref_model_sync_steps=1,
        ref_model_mixup_alpha=0.3,
        max_steps=3,
        **reference(),
    ),
    case(
        "experts",
        rows=labelled(),
        model="qwen3_moe",
        router_aux_loss_coef=0.2,
        metrics=("aux_loss",),
        **reference("qwen3_moe"),
        **EVAL,
    ),
    case(
        "experts-apo",
        rows=labelled(),
        model="qwen3_moe",
        router_aux_loss_coef=0.2,
        loss_type="apo_zero_unpaired",
        **reference("qwen3_moe"),
    ),
    case(
        "adapter-of-a-peft-model",
        rows=labelled(),
        prepare=lambda model, folder: get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")),
    ),
    case("adapter-p-tuning", rows=labelled(), part="embedding", given={"peft_config": adapters()["p-tuning"][0]}),
]
CPO_CASES = [
    *shared(pairs()),
    *(
        case(f"{loss}-{name}", rows=pairs(), loss_type=loss, learning_rate=1e-2, **given)
        for loss, (name, given) in itertools.product(
            ("sigmoid", "hinge", "ipo", "simpo"),
            {"lora": ALL_LINEAR, "evaluated": EVAL, "weight": {"beta": 0.3, "cpo_alpha": 0.5}}.items(),
        )
    ),
    case("simpo-alpha", rows=pairs(), loss_type="simpo", alpha=0.2, cpo_alpha=0.5, simpo_gamma=1.0),
    case("experts", rows=pairs(), model=lambda: tiny_model("qwen3_moe", output_router_logits=True), **EVAL),
]
ORPO_CASES = [
    *shared(pairs()),
    case("lora-evaluated", rows=pairs(), **ALL_LINEAR, **EVAL),
    case("beta", rows=pairs(), beta=2.0, max_steps=3),
    case("experts", rows=pairs(), model=lambda: tiny_model("qwen3_moe", output_router_logits=True), **EVAL),
]


@pytest.mark.parametrize("options", DPO_CASES)
def test_dpo(options, tmp_path):
    compare((LigerDPOTrainer, LigerDPOConfig), (DPOTrainer, DPOConfig), tmp_path, options, {"max_length": 64})


@pytest.mark.parametrize("options", KTO_CASES)
def test_kto(options, tmp_path):
    compare((LigerKTOTrainer, LigerKTOConfig), (KTOTrainer, KTOConfig), tmp_path, options, {"max_length": 64})


@pytest.mark.parametrize("options", CPO_CASES)
def test_cpo(options, tmp_path):
    compare((LigerCPOTrainer, LigerCPOConfig), (CPOTrainer, CPOConfig), tmp_path, options, {"max_length": 64})


@pytest.mark.parametrize("options", ORPO_CASES)
def test_orpo(options, tmp_path):
    compare((LigerORPOTrainer, LigerORPOConfig), (ORPOTrainer, ORPOConfig), tmp_path, options, {"max_length": 64})
