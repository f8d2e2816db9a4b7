"""`LigerKTOTrainer`: `trl.KTOTrainer` with our fused head in the place of TRL's own."""

from dataclasses import dataclass

from trl import KTOConfig, KTOTrainer

from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.trl import LigerTRLMixin


@dataclass
class LigerKTOConfig(LigerArguments, KTOConfig):
    """[`~trl.KTOConfig`] with the fields of [`LigerArguments`], for [`LigerKTOTrainer`]."""


class LigerKTOTrainer(LigerTRLMixin, KTOTrainer):
    """[`~trl.KTOTrainer`] with the same losses, gradients and metrics, on fused kernels.

    The policy and the reference model are patched, and neither builds logits, not even for the mismatched pairs of the
    KL estimate. The trainer takes the arguments of `KTOTrainer`, with a [`LigerKTOConfig`] as `args`; a plain
    `KTOConfig` counts as one with `use_liger=True`. Its options, a LoRA on `lm_head` and `eval_predictions` work as in
    [`LigerDPOTrainer`].
    """

    gives_token_predictions = True
