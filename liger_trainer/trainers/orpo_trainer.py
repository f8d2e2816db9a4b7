"""`LigerORPOTrainer`: TRL's ORPO without logits. Importing this imports `trl.experimental`."""

from dataclasses import dataclass

from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.scored_pairs import LigerPairMixin, ScoredPairFields


@dataclass
class LigerORPOConfig(ScoredPairFields, LigerArguments, ORPOConfig):
    """[`~trl.experimental.orpo.ORPOConfig`] with `padding_in_metrics` and the fields of [`LigerArguments`].

    It is for [`LigerORPOTrainer`].
    """


class LigerORPOTrainer(LigerPairMixin, ORPOTrainer):
    """[`~trl.experimental.orpo.ORPOTrainer`] with the same losses, gradients and metrics, on fused kernels.

    It takes the arguments of `ORPOTrainer`, with a [`LigerORPOConfig`] as `args`; a plain `ORPOConfig` counts as one
    with `use_liger=True`. It builds no (B, S, V) logits in training or evaluation, except for encoder-decoder models:
    only their layers are patched. A subclass changes the loss by overriding `odds_ratio_loss`.
    """

    loss_hook = "odds_ratio_loss"
    learns_prompts = True
