"""Defines the fields that every arguments class of this package adds to the stock one."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from liger_trainer.patching import OPERATIONS, check_config
from liger_trainer.patching.apply import REBUILD_ABOVE_MIB
from liger_trainer.trainers.features import FEATURES, FeatureFields

if TYPE_CHECKING:  # it always goes before a class of arguments of transformers or TRL
    from transformers import TrainingArguments as StockArguments
else:
    StockArguments = object


@dataclass
class LigerArguments(FeatureFields, StockArguments):
    """The fields that every arguments class of this package adds to the stock one.

    Building a trainer raises a ValueError for an option that the trainer would ignore. With `use_liger` on a GPU, one
    stock option has another default, so that a step does not wait for the GPU: `accelerator_config` has
    `non_blocking=True` unless you set it.
    """

    use_liger: bool = field(
        default=True,
        metadata={
            "help": "Patch the model with fused kernels and compute the loss without logits. "
            "False: this is exactly the stock trainer."
        },
    )
    liger_config: dict | str | None = field(
        default=None,
        metadata={
            "help": f"Switches single parts off; all are on by default: {', '.join(OPERATIONS)}. "
            'For example {"rope": false}. It may also have '
            f"{REBUILD_ABOVE_MIB}, {check_config(None)[REBUILD_ABOVE_MIB]:g} by default: results of norms and gates "
            "that take more MiB than that are computed again in the backward pass instead of being kept."
        },
    )

    eval_predictions: Literal["logits", "tokens"] = field(
        default="logits",
        metadata={
            "help": "What `compute_metrics` gets. 'logits': logits, as in the stock trainer. 'tokens': a dict of "
            "`token_ids` (argmax), `log_probs` and `ranks` of the labels, which costs neither logits nor a second "
            "forward."
        },
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._VALID_DICT_FIELDS = [*cls._VALID_DICT_FIELDS, "liger_config"]  # may be JSON on a command line

    def __post_init__(self) -> None:
        for feature in FEATURES:
            feature.resolve(self)
        if self.use_liger and torch.cuda.is_available() and isinstance(self.accelerator_config, dict | None):
            self.accelerator_config: Any = {"non_blocking": True} | (self.accelerator_config or {})
        super().__post_init__()
        for feature in FEATURES:
            feature.check(self)
        if not isinstance(self.use_liger, bool):
            raise ValueError(f"use_liger is {self.use_liger!r}; expected true or false.")
        if self.eval_predictions not in ("logits", "tokens"):
            raise ValueError(f"eval_predictions is {self.eval_predictions!r}; expected 'logits' or 'tokens'.")
        config: Any = self.liger_config  # None, a dict, or a text that was not JSON, which `check_config` rejects
        check_config(config)
