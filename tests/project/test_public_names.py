"""The names that users import and type. Adding or removing one is a decision: change this and docs/reference.md."""

import ast
import dataclasses
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

import liger_trainer
import liger_triton
from liger_trainer import losses
from liger_trainer.command.recipe.keys import RecipeArguments
from liger_trainer.patching import check_config

KERNEL_MODULES = {  # public in both packages
    "LigerRMSNorm",
    "LigerLayerNorm",
    "LigerSwiGLUMLP",
    "LigerGEGLUMLP",
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCrossEntropyLoss",
}
TRAINERS = ("SFT", "DPO", "ORPO", "CPO", "KTO", "GRPO", "RLOO", "Reward", "Distillation")
NAMES = {
    "LigerTrainer",
    "LigerTrainingArguments",
    "LigerMedusaConfig",
    "LigerMTPConfig",
    "LigerMTPTrainer",
    "MedusaHeads",
    "LigerMedusaTrainer",
    "LigerReport",
    "LigerEagleConfig",
    "EagleDrafter",
    "LigerEagleTrainer",
    "apply_liger",
    "remove_liger",
    "AutoLigerKernelForCausalLM",
    "Mxfp4Config",
    *KERNEL_MODULES,
    *(f"Liger{name}{kind}" for name in TRAINERS for kind in ("Config", "Trainer")),
}
MODULES = {  # other modules with public names
    "liger_trainer.losses": {
        "cpo_loss",
        "dpo_loss",
        "kto_loss",
        "linear_loss",
        "orpo_loss",
        "sequence_logprobs",
        "simpo_loss",
    },
    "liger_trainer.data.rewards": {"boxed_answer", "REWARDS"},
    "liger_trainer.patching": {"OPERATIONS", "LigerReport", "apply_liger", "check_config", "remove_liger"},
    "liger_trainer.medusa.export": {"load_heads"},
    "liger_trainer.integrations.callback": {"LigerCallback"},
}
KERNELS = {
    "Divergence",
    "ExpertLoRA",
    "Float8",
    "Float8Form",
    "Float8Matrices",
    "Float8RowwiseForm",
    "Float8Weight",
    "HeadsLoss",
    "LogProbs",
    "MXFP4Weight",
    "TokenRanks",
    "add_rms_norm",
    "cross_entropy",
    "dequantize_mxfp4",
    "experts",
    "float8_cast",
    "float8_linear",
    "frozen_float8_linear",
    "gated_rms_norm",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_heads_cross_entropy",
    "linear_heads_kl",
    "linear_logprobs",
    "linear_token_ranks",
    "lora_linear",
    "lora_mlp",
    "rms_norm",
    "rollout_attention",
    "rope",
    "row_attention",
    "short_conv",
    "swiglu",
    "token_ranks",
    *KERNEL_MODULES,
}
SCORED_PAIRS = {"LigerORPOConfig", "LigerCPOConfig"}
SHARING = {f"Liger{name}Config" for name in ("DPO", "GRPO", "RLOO", "Reward")}
ONLINE = {"LigerGRPOConfig", "LigerRLOOConfig"}
OWN_OPTIONS = {
    "cuda_graphs",
    "use_liger",
    "liger_config",
    "eval_predictions",
    "host_memory_budget",
    "keep_unloaded_weights",
    "memory_budget",
    "optimizer_in_backward",
    "fp8",
    "fp8_recipe",
    "sample_max_new_tokens",
    "sample_prompts",
    "sample_steps",
    "skip_checks",
}
OF_ONE_CONFIG = {
    "LigerTrainingArguments": {"router_aux_loss"},  # TRL averages it
    "LigerSFTConfig": {"train_mtp", "mtp_targets"},
}
NEWER_NAMES = {"activation_checkpointing", "activation_checkpointing_kwargs"}  # older transformers lack it
COMMANDS = {
    "train",
    "recipes",
    "init",
    "path",
    "fit",
    "verify",
    "chat",
    "compare",
    "doctor",
    "evaluate",
    "merge",
    "medusa-eval",
    "eagle-eval",
    "export",
    "mtp-eval",
}
RECIPES = {
    "quickstart",
    "quickstart_dpo",
    "quickstart_medusa",
    "llama3_8b/sft_alpaca",
    "llama3_8b/sft_alpaca_lora",
    "llama3_8b/sft_alpaca_qlora",
    "llama3_8b/sft_qlora_16gb",
    "llama3_8b/sft_qlora_24gb",
    "llama3_8b/dpo_ultrafeedback",
    "llama3_8b/orpo",
    "llama3_8b/kto",
    "llama3_8b/grpo",
    "llama3_8b/reward",
    "llama3_8b/medusa_stage1",
    "llama3_8b/medusa_stage2",
    "llama3_8b/eagle3",
    "llama3_2_3b/sft_lora_24gb",
    "llama3_2_3b/grpo_lora_24gb",
    "qwen2_5_vl_3b/sft",
    "qwen3_30b_a3b/sft_lora",
    "gpt_oss_20b/sft_lora",
    "gpt_oss_20b/sft_lora_16gb",
    "qwen3_5_4b/mtp",
    "qwen3_5_4b/sft_lora_16gb",
    "qwen3_5_9b/sft_qlora_24gb",
    "qwen3_5_35b_a3b/sft_lora",
    "gemma4_e4b/sft_lora",
    "granite4_h_tiny/sft_lora",
}
CONFIGS = {
    "configs/single_gpu",
    "configs/ddp",
    "configs/fsdp2",
    "configs/fsdp2_machines",
    "configs/context_parallel",
    "configs/zero2",
    "configs/zero3",
}


def test_names_of_the_package():
    assert set(liger_trainer.__all__) == NAMES
    for name in NAMES:
        assert getattr(liger_trainer, name).__name__ == name
    assert liger_trainer.losses is losses
    assert callable(liger_trainer.apply_liger_kernel_to_llama)


def test_the_old_name_of_the_medusa_config():
    with pytest.warns(FutureWarning, match="MedusaConfig is called LigerMedusaConfig"):
        assert liger_trainer.MedusaConfig is liger_trainer.LigerMedusaConfig
    assert importlib.import_module("liger_trainer.medusa.config").MedusaConfig is liger_trainer.LigerMedusaConfig


def test_type_checkers_see_the_names_of_the_package():
    """The imports under `TYPE_CHECKING` and the table used at run time name the same things."""
    body = ast.parse(Path(liger_trainer.__file__).read_text()).body
    (block,) = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imported = [(alias.name, alias.asname, node.module) for node in block.body for alias in node.names]
    assert {name: module for name, _, module in imported} == {"losses": "liger_trainer", **liger_trainer._WHERE}
    assert all(name == again for name, again, _ in imported), "`import X as X` is what makes a name public to a checker"


@pytest.mark.parametrize("module", MODULES)
def test_names_of_modules(module):
    for name in MODULES[module]:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_names_of_the_kernels():
    assert set(liger_triton.__all__) == KERNELS
    for name in KERNELS:
        assert callable(getattr(liger_triton, name))


@pytest.mark.parametrize("name", ["LigerTrainingArguments", *(f"Liger{name}Config" for name in TRAINERS)])
def test_our_options_are_listed(name):
    own = getattr(liger_trainer, name)
    stock = next(base for base in own.__mro__ if base.__module__.partition(".")[0] in ("trl", "transformers"))
    names, stock_names = ({f.name for f in dataclasses.fields(each)} for each in (own, stock))
    options = OWN_OPTIONS | OF_ONE_CONFIG.get(name, set())
    if name in SHARING:
        options = options | {"share_prompts"}
    if name in SCORED_PAIRS:
        options = options | {"padding_in_metrics"}
    if name in ONLINE:
        options = options | {"reuse_log_probs", "sort_by_prompt"}
    assert names >= options | NEWER_NAMES
    assert names - stock_names - NEWER_NAMES == options


@pytest.mark.parametrize("name", ["LigerTrainingArguments", *(f"Liger{name}Config" for name in TRAINERS)])
def test_the_page_of_trainers_has_each_option(name):
    own = getattr(liger_trainer, name)
    stock = next(base for base in own.__mro__ if base.__module__.partition(".")[0] in ("trl", "transformers"))
    added = {field.name for field in dataclasses.fields(own)} - {field.name for field in dataclasses.fields(stock)}
    rows = [line for line in (ROOT / "docs" / "trainers.md").read_text().splitlines() if line.startswith("| `")]
    explained = {option for row in rows for option in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    missing = added - explained - {"activation_checkpointing_kwargs"}  # the page of checkpointing has it
    assert not missing, f"add a row for each of {missing} to the tables of fields in docs/trainers.md"


def test_commands_and_recipes():
    def output(*words):
        return subprocess.run(
            [sys.executable, "-m", "liger_trainer", *words], capture_output=True, text=True, check=True
        ).stdout

    text = output("--help")
    listed = {line.split()[0] for line in text.splitlines() if line.startswith("    ") and line[4] != " "}
    assert listed == COMMANDS, text
    recipes, configs = output("recipes").split("\n\n")
    assert {line.split()[0] for line in recipes.splitlines()} == RECIPES
    assert {line.split()[0] for line in configs.splitlines()} == CONFIGS


def stable_names():
    """Return the table "What is stable" of docs/reference.md: what each row names, by its first cell."""
    text = (ROOT / "docs" / "reference.md").read_text()
    section = text.split("## What is stable\n")[1].split("\n## ")[0]
    rows = {}
    for line in section.splitlines():
        if not line.startswith("| ") or line.startswith("| where"):
            continue
        where, names = line.strip("| ").split(" | ")
        listed = re.findall(r"`([^`]+)`", names)
        assert len(set(listed)) == len(listed), where
        rows[where.replace("`", "")] = set(listed)
    return rows


def test_the_page_on_what_is_stable_has_these_lists():
    of_page = stable_names()
    of_code = {
        "liger_trainer": NAMES,
        **MODULES,
        "liger_triton": KERNELS,
        "options that every config adds to the stock ones": OWN_OPTIONS,
        "keys of liger_config": set(check_config(None)),
        "keys that a recipe adds to the options of its trainer and of TRL's ModelConfig": {
            field.name for field in dataclasses.fields(RecipeArguments)
        },
        "liger-trainer": COMMANDS,
        "shipped recipes": RECIPES,
        "shipped configs": CONFIGS,
    }
    assert list(of_page) == list(of_code)
    for where, names in of_code.items():
        apart = sorted(of_page[where] ^ names)
        assert not apart, f"docs/reference.md and the code differ in {', '.join(apart)}, in the row {where!r}"
