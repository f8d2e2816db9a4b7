"""Fine-tune language models with `transformers` and `trl`, faster and in less memory, with the same numbers.

Importing the package imports neither: every public name is resolved on first use (PEP 562).
"""

import importlib

_WHERE = {
    "LigerTrainer": "trainer",
    "LigerTrainingArguments": "training_args",
    "LigerSFTConfig": "training_args",
    "LigerSFTTrainer": "sft_trainer",
    "LigerDPOConfig": "training_args",
    "LigerDPOTrainer": "dpo_trainer",
    "LigerORPOConfig": "orpo_trainer",
    "LigerORPOTrainer": "orpo_trainer",
    "LigerCPOConfig": "cpo_trainer",
    "LigerCPOTrainer": "cpo_trainer",
    "LigerKTOConfig": "training_args",
    "LigerKTOTrainer": "kto_trainer",
    "LigerGRPOConfig": "training_args",
    "LigerGRPOTrainer": "grpo_trainer",
    "LigerRLOOConfig": "training_args",
    "LigerRLOOTrainer": "rloo_trainer",
    "LigerDistillationConfig": "training_args",
    "LigerDistillationTrainer": "distillation_trainer",
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
