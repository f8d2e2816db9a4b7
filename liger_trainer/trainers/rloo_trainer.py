"""`LigerRLOOTrainer`: `trl.RLOOTrainer` with our fused head in the place of TRL's own."""

from dataclasses import dataclass

from trl import RLOOConfig, RLOOTrainer

from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.online_rows import KnowsOnlineRows
from liger_trainer.trainers.shared_prompts import SharedPromptFields
from liger_trainer.trainers.trl import LigerTRLMixin


@dataclass
class LigerRLOOConfig(SharedPromptFields, LigerArguments, RLOOConfig):
    """[`~trl.RLOOConfig`] with `share_prompts` and the fields of [`LigerArguments`], for [`LigerRLOOTrainer`]."""


class LigerRLOOTrainer(KnowsOnlineRows, LigerTRLMixin, RLOOTrainer):
    """[`~trl.RLOOTrainer`] with the same losses, gradients and metrics, on fused kernels.

    It takes the arguments of `RLOOTrainer`, with a [`LigerRLOOConfig`] as `args`; a plain `RLOOConfig` counts as one
    with `use_liger=True`. Models, options and a LoRA on `lm_head` work as in [`LigerGRPOTrainer`].
    """

    shares_prompts = True
