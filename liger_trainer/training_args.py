"""The flag: `use_liger` and `liger_config`, added to the argument classes of transformers and TRL."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import TrainingArguments
from trl import DistillationConfig, DPOConfig, GRPOConfig, KTOConfig, RLOOConfig, SFTConfig

from liger_trainer.patching import check_config


@dataclass
class LigerArguments:
    """The fields that every arguments class of this package adds to the stock one.

    One stock option has another default with `use_liger`, so that a step does not wait for the GPU: on a GPU,
    `accelerator_config` has `non_blocking=True` unless it is set.
    """

    use_liger: bool = field(
        default=True,
        metadata={
            "help": "Patch the model with fused kernels and compute the loss without logits. "
            "False: the stock trainer, exactly."
        },
    )
    liger_config: dict | str | None = field(
        default=None,
        metadata={
            "help": "Switches single parts, all on by default: rms_norm, layer_norm, rope, swiglu, geglu, "
            'fused_linear_cross_entropy. For example {"rope": false}.'
        },
    )

    eval_predictions: Literal["logits", "tokens"] = field(
        default="logits",
        metadata={
            "help": "What `compute_metrics` gets: 'logits' as in the stock trainer, or 'tokens', a dict of `token_ids` "
            "(argmax), `log_probs` and `ranks` of the labels, without logits and without a second forward."
        },
    )

    def __post_init__(self):
        if self.use_liger and torch.cuda.is_available() and isinstance(self.accelerator_config, dict | None):
            self.accelerator_config = {"non_blocking": True} | (self.accelerator_config or {})
        super().__post_init__()
        if not isinstance(self.use_liger, bool):
            raise ValueError(f"use_liger is {self.use_liger!r}; expected true or false.")
        if self.eval_predictions not in ("logits", "tokens"):
            raise ValueError(f"eval_predictions is {self.eval_predictions!r}; expected 'logits' or 'tokens'.")
        check_config(self.liger_config)
        if self.use_liger and self.use_liger_kernel:
            raise ValueError(
                "use_liger and use_liger_kernel are both true, and each patches the same modules; "
                "remove use_liger_kernel."
            )


@dataclass
class LigerTrainingArguments(LigerArguments, TrainingArguments):
    """[`~transformers.TrainingArguments`] with `use_liger` and `liger_config`, for [`LigerTrainer`]."""

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "liger_config"]


@dataclass
class LigerSFTConfig(LigerArguments, SFTConfig):
    """[`~trl.SFTConfig`] with `use_liger` and `liger_config`, for [`LigerSFTTrainer`]."""

    _VALID_DICT_FIELDS = [*SFTConfig._VALID_DICT_FIELDS, "liger_config"]


@dataclass
class LigerDPOConfig(LigerArguments, DPOConfig):
    """[`~trl.DPOConfig`] with `use_liger` and `liger_config`, for [`LigerDPOTrainer`]."""

    _VALID_DICT_FIELDS = [*DPOConfig._VALID_DICT_FIELDS, "liger_config"]


@dataclass
class LigerKTOConfig(LigerArguments, KTOConfig):
    """[`~trl.KTOConfig`] with `use_liger` and `liger_config`, for [`LigerKTOTrainer`]."""

    _VALID_DICT_FIELDS = [*KTOConfig._VALID_DICT_FIELDS, "liger_config"]


@dataclass
class LigerGRPOConfig(LigerArguments, GRPOConfig):
    """[`~trl.GRPOConfig`] with `use_liger` and `liger_config`, for [`LigerGRPOTrainer`]."""

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "liger_config"]


@dataclass
class LigerRLOOConfig(LigerArguments, RLOOConfig):
    """[`~trl.RLOOConfig`] with `use_liger` and `liger_config`, for [`LigerRLOOTrainer`]."""

    _VALID_DICT_FIELDS = [*RLOOConfig._VALID_DICT_FIELDS, "liger_config"]


@dataclass
class LigerDistillationConfig(LigerArguments, DistillationConfig):
    """[`~trl.DistillationConfig`] with `use_liger` and `liger_config`, for [`LigerDistillationTrainer`]."""

    _VALID_DICT_FIELDS = [*DistillationConfig._VALID_DICT_FIELDS, "liger_config"]
