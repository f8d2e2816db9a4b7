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
    `KTOConfig` counts as one with `use_liger=True`. Every option keeps its meaning, since the loss code is TRL's.
    Unlike the stock trainer, it can train a LoRA on `lm_head`, and with `eval_predictions="tokens"` it gives
    `compute_metrics` token ids, log-probabilities and ranks without a second forward pass.

    Raises:
        ValueError: An option would have no effect.
    """

    gives_token_predictions = True
