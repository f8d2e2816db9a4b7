"""The flag: `use_liger` and `liger_config`, added to the argument classes of transformers and TRL."""

from dataclasses import dataclass, field
from typing import Literal

import torch

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
            'fused_linear_cross_entropy. For example {"rope": false}. And rebuild_above_mib (16): results of norms and '
            "gates of more MiB are computed again in the backward pass instead of kept."
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
