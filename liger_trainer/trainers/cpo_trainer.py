"""`LigerCPOTrainer`: TRL's CPO, SimPO and AlphaPO without their logits. Importing this imports `trl.experimental`."""

from dataclasses import dataclass

from trl.experimental.cpo import CPOConfig, CPOTrainer

from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.scored_pairs import LigerPairMixin


@dataclass
class LigerCPOConfig(LigerArguments, CPOConfig):
    """[`~trl.experimental.cpo.CPOConfig`] with `use_liger` and `liger_config`, for [`LigerCPOTrainer`]."""

    _VALID_DICT_FIELDS = [*CPOConfig._VALID_DICT_FIELDS, "liger_config"]


class LigerCPOTrainer(LigerPairMixin, CPOTrainer):
    """[`~trl.experimental.cpo.CPOTrainer`] with the same losses, gradients and metrics, on fused kernels.

    SimPO is `loss_type="simpo", cpo_alpha=0.0`, CPO-SimPO the same with `cpo_alpha` above 0, AlphaPO
    `loss_type="alphapo"` with an `alpha`. Takes the arguments of `CPOTrainer`; `args` is a [`LigerCPOConfig`] (a plain
    `CPOConfig` counts as `use_liger=True`). No (B, S, V) logits are built, in training or evaluation, but for an
    encoder-decoder, whose layers alone are patched. A loss of one's own overrides `cpo_loss`.

    Raises:
        ValueError: An option is set that CPO ignores.
    """

    loss_hook = "cpo_loss"
