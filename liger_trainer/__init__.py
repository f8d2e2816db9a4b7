"""Fine-tune language models with `transformers` and `trl`, faster and in less memory, with the same numbers.

Importing this package imports neither of them: each public name is imported when it is first used (PEP 562).
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what editors and type checkers see; a test compares these names with `_WHERE`
    from liger_trainer import losses as losses
    from liger_trainer.base_weights.mxfp4 import Mxfp4Config as Mxfp4Config
    from liger_trainer.eagle.config import LigerEagleConfig as LigerEagleConfig
    from liger_trainer.eagle.drafter import EagleDrafter as EagleDrafter
    from liger_trainer.eagle.trainer import LigerEagleTrainer as LigerEagleTrainer
    from liger_trainer.integrations.liger_kernel_names import AutoLigerKernelForCausalLM as AutoLigerKernelForCausalLM
    from liger_trainer.medusa.config import LigerMedusaConfig as LigerMedusaConfig
    from liger_trainer.medusa.heads import MedusaHeads as MedusaHeads
    from liger_trainer.medusa.trainer import LigerMedusaTrainer as LigerMedusaTrainer
    from liger_trainer.patching import LigerReport as LigerReport
    from liger_trainer.patching import apply_liger as apply_liger
    from liger_trainer.patching import remove_liger as remove_liger
    from liger_trainer.trainers.cpo_trainer import LigerCPOConfig as LigerCPOConfig
    from liger_trainer.trainers.cpo_trainer import LigerCPOTrainer as LigerCPOTrainer
    from liger_trainer.trainers.distillation_trainer import LigerDistillationConfig as LigerDistillationConfig
    from liger_trainer.trainers.distillation_trainer import LigerDistillationTrainer as LigerDistillationTrainer
    from liger_trainer.trainers.dpo_trainer import LigerDPOConfig as LigerDPOConfig
    from liger_trainer.trainers.dpo_trainer import LigerDPOTrainer as LigerDPOTrainer
    from liger_trainer.trainers.grpo_trainer import LigerGRPOConfig as LigerGRPOConfig
    from liger_trainer.trainers.grpo_trainer import LigerGRPOTrainer as LigerGRPOTrainer
    from liger_trainer.trainers.kto_trainer import LigerKTOConfig as LigerKTOConfig
    from liger_trainer.trainers.kto_trainer import LigerKTOTrainer as LigerKTOTrainer
    from liger_trainer.trainers.mtp_trainer import LigerMTPConfig as LigerMTPConfig
    from liger_trainer.trainers.mtp_trainer import LigerMTPTrainer as LigerMTPTrainer
    from liger_trainer.trainers.orpo_trainer import LigerORPOConfig as LigerORPOConfig
    from liger_trainer.trainers.orpo_trainer import LigerORPOTrainer as LigerORPOTrainer
    from liger_trainer.trainers.reward_trainer import LigerRewardConfig as LigerRewardConfig
    from liger_trainer.trainers.reward_trainer import LigerRewardTrainer as LigerRewardTrainer
    from liger_trainer.trainers.rloo_trainer import LigerRLOOConfig as LigerRLOOConfig
    from liger_trainer.trainers.rloo_trainer import LigerRLOOTrainer as LigerRLOOTrainer
    from liger_trainer.trainers.sft_trainer import LigerSFTConfig as LigerSFTConfig
    from liger_trainer.trainers.sft_trainer import LigerSFTTrainer as LigerSFTTrainer
    from liger_trainer.trainers.trainer import LigerTrainer as LigerTrainer
    from liger_trainer.trainers.trainer import LigerTrainingArguments as LigerTrainingArguments
    from liger_triton.modules import LigerCrossEntropyLoss as LigerCrossEntropyLoss
    from liger_triton.modules import LigerFusedLinearCrossEntropyLoss as LigerFusedLinearCrossEntropyLoss
    from liger_triton.modules import LigerGEGLUMLP as LigerGEGLUMLP
    from liger_triton.modules import LigerLayerNorm as LigerLayerNorm
    from liger_triton.modules import LigerRMSNorm as LigerRMSNorm
    from liger_triton.modules import LigerSwiGLUMLP as LigerSwiGLUMLP

_NAMES = {  # module: public names
    "liger_trainer.trainers.trainer": ("LigerTrainer", "LigerTrainingArguments"),
    "liger_trainer.trainers.sft_trainer": ("LigerSFTConfig", "LigerSFTTrainer"),
    "liger_trainer.trainers.dpo_trainer": ("LigerDPOConfig", "LigerDPOTrainer"),
    "liger_trainer.trainers.orpo_trainer": ("LigerORPOConfig", "LigerORPOTrainer"),
    "liger_trainer.trainers.cpo_trainer": ("LigerCPOConfig", "LigerCPOTrainer"),
    "liger_trainer.trainers.kto_trainer": ("LigerKTOConfig", "LigerKTOTrainer"),
    "liger_trainer.trainers.grpo_trainer": ("LigerGRPOConfig", "LigerGRPOTrainer"),
    "liger_trainer.trainers.rloo_trainer": ("LigerRLOOConfig", "LigerRLOOTrainer"),
    "liger_trainer.trainers.reward_trainer": ("LigerRewardConfig", "LigerRewardTrainer"),
    "liger_trainer.trainers.distillation_trainer": ("LigerDistillationConfig", "LigerDistillationTrainer"),
    "liger_trainer.trainers.mtp_trainer": ("LigerMTPConfig", "LigerMTPTrainer"),
    "liger_trainer.eagle.config": ("LigerEagleConfig",),
    "liger_trainer.eagle.drafter": ("EagleDrafter",),
    "liger_trainer.eagle.trainer": ("LigerEagleTrainer",),
    "liger_trainer.medusa.config": ("LigerMedusaConfig",),
    "liger_trainer.medusa.heads": ("MedusaHeads",),
    "liger_trainer.medusa.trainer": ("LigerMedusaTrainer",),
    "liger_trainer.patching": ("LigerReport", "apply_liger", "remove_liger"),
    "liger_trainer.integrations.liger_kernel_names": ("AutoLigerKernelForCausalLM",),
    "liger_trainer.base_weights.mxfp4": ("Mxfp4Config",),
    "liger_triton.modules": (  # which needs neither transformers nor trl
        "LigerRMSNorm",
        "LigerLayerNorm",
        "LigerSwiGLUMLP",
        "LigerGEGLUMLP",
        "LigerCrossEntropyLoss",
        "LigerFusedLinearCrossEntropyLoss",
    ),
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [*_WHERE]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name == "losses":
        return importlib.import_module("liger_trainer.losses")
    if name == "MedusaConfig":  # until 0.2
        warnings.warn("MedusaConfig is called LigerMedusaConfig.", FutureWarning, stacklevel=2)
        return __getattr__("LigerMedusaConfig")
    if name.startswith("apply_liger_kernel_to_"):
        return getattr(importlib.import_module("liger_trainer.integrations.liger_kernel_names"), name)
    raise AttributeError(f"module 'liger_trainer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
