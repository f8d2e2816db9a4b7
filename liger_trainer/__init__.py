"""Fine-tune language models with `transformers` and `trl`, faster and in less memory, with the same numbers.

Importing the package imports neither: every public name is resolved on first use (PEP 562).
"""

import importlib

_WHERE = {
    "LigerTrainer": "trainers.trainer",
    "LigerTrainingArguments": "trainers.trainer",
    "LigerSFTConfig": "trainers.sft_trainer",
    "LigerSFTTrainer": "trainers.sft_trainer",
    "LigerDPOConfig": "trainers.dpo_trainer",
    "LigerDPOTrainer": "trainers.dpo_trainer",
    "LigerORPOConfig": "trainers.orpo_trainer",
    "LigerORPOTrainer": "trainers.orpo_trainer",
    "LigerCPOConfig": "trainers.cpo_trainer",
    "LigerCPOTrainer": "trainers.cpo_trainer",
    "LigerKTOConfig": "trainers.kto_trainer",
    "LigerKTOTrainer": "trainers.kto_trainer",
    "LigerGRPOConfig": "trainers.grpo_trainer",
    "LigerGRPOTrainer": "trainers.grpo_trainer",
    "LigerRLOOConfig": "trainers.rloo_trainer",
    "LigerRLOOTrainer": "trainers.rloo_trainer",
    "LigerDistillationConfig": "trainers.distillation_trainer",
    "LigerDistillationTrainer": "trainers.distillation_trainer",
    "MedusaConfig": "medusa.config",
    "MedusaHeads": "medusa.heads",
    "LigerMedusaTrainer": "medusa.trainer",
    "LigerReport": "patching",
    "apply_liger": "patching",
    "remove_liger": "patching",
    "AutoLigerKernelForCausalLM": "auto",
}
__all__ = list(_WHERE)
__version__ = "0.1.0"


def __getattr__(name):
    if name in _WHERE:
        return getattr(importlib.import_module(f"liger_trainer.{_WHERE[name]}"), name)
    if name == "losses":
        return importlib.import_module("liger_trainer.losses")
    if name.startswith("apply_liger_kernel_to_"):
        return getattr(importlib.import_module("liger_trainer.auto"), name)
    raise AttributeError(f"module 'liger_trainer' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])
