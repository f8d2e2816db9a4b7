"""`LigerRLOOTrainer`: `trl.RLOOTrainer` with our fused head behind TRL's own contract."""

from dataclasses import dataclass

from trl import RLOOConfig, RLOOTrainer

from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.trl import LigerTRLMixin


@dataclass
class LigerRLOOConfig(LigerArguments, RLOOConfig):
    """[`~trl.RLOOConfig`] with `use_liger` and `liger_config`, for [`LigerRLOOTrainer`]."""

    _VALID_DICT_FIELDS = [*RLOOConfig._VALID_DICT_FIELDS, "liger_config"]


class LigerRLOOTrainer(LigerTRLMixin, RLOOTrainer):
    """[`~trl.RLOOTrainer`] with the same losses, gradients and metrics, on fused kernels.

    The policy and the reference model are patched, and neither builds logits but for the tokens being generated. Takes
    the arguments of `RLOOTrainer`; `args` is a [`LigerRLOOConfig`] (a plain `RLOOConfig` counts as `use_liger=True`).
    Every option keeps its meaning, since the loss code is TRL's. Beyond stock: a LoRA on `lm_head` trains.

    Raises:
        ValueError: An option that would have no effect.
    """

    loss_hook = None
    ignored_fields = ("label_smoothing_factor",)
