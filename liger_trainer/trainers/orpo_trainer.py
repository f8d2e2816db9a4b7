"""`LigerORPOTrainer`: TRL's ORPO without its logits. Importing this imports `trl.experimental`."""

from dataclasses import dataclass

import torch
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.scored_pairs import LigerPairMixin


@dataclass
class LigerORPOConfig(LigerArguments, ORPOConfig):
    """[`~trl.experimental.orpo.ORPOConfig`] with `use_liger` and `liger_config`, for [`LigerORPOTrainer`]."""

    _VALID_DICT_FIELDS = [*ORPOConfig._VALID_DICT_FIELDS, "liger_config"]


class LigerORPOTrainer(LigerPairMixin, ORPOTrainer):
    """[`~trl.experimental.orpo.ORPOTrainer`] with the same losses, gradients and metrics, on fused kernels.

    Takes the arguments of `ORPOTrainer`; `args` is a [`LigerORPOConfig`] (a plain `ORPOConfig` counts as
    `use_liger=True`). No (B, S, V) logits are built, in training or evaluation, but for an encoder-decoder,
    whose layers alone are patched. A loss of one's own overrides `odds_ratio_loss`.

    Raises:
        ValueError: An option is set that ORPO ignores.
    """

    loss_hook = "odds_ratio_loss"

    def _chosen_labels(self, labels, input_ids, attention_mask):
        """ORPO's likelihood term covers the prompt too."""
        return torch.where(labels != -100, labels, torch.where(attention_mask == 1, input_ids, -100))
