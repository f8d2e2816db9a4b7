"""`LigerCPOTrainer`: TRL's CPO, SimPO and AlphaPO without logits. Importing this imports `trl.experimental`."""

from dataclasses import dataclass

from trl.experimental.cpo import CPOConfig, CPOTrainer

from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.scored_pairs import LigerPairMixin, ScoredPairFields


@dataclass
class LigerCPOConfig(ScoredPairFields, LigerArguments, CPOConfig):
    """[`~trl.experimental.cpo.CPOConfig`] with `padding_in_metrics` and the fields of [`LigerArguments`].

    It is for [`LigerCPOTrainer`].
    """


class LigerCPOTrainer(LigerPairMixin, CPOTrainer):
    """[`~trl.experimental.cpo.CPOTrainer`] with the same losses, gradients and metrics, on fused kernels.

    For SimPO set `loss_type="simpo"` and `cpo_alpha=0.0`, for CPO-SimPO the same with `cpo_alpha` above 0, and for
    AlphaPO `loss_type="alphapo"` and an `alpha`. The trainer takes the arguments of `CPOTrainer`, with a
    [`LigerCPOConfig`] as `args`; a plain `CPOConfig` counts as one with `use_liger=True`. It builds no (B, S, V) logits
    in training or evaluation, except for encoder-decoder models: only their layers are patched. A subclass changes the
    loss by overriding `cpo_loss`.
    """

    loss_hook = "cpo_loss"
