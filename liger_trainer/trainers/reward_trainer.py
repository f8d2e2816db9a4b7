"""`LigerRewardTrainer`: `trl.RewardTrainer` on fused kernels, without padding."""

from dataclasses import dataclass
from typing import Any

from trl import RewardConfig, RewardTrainer

from liger_trainer.head.classifier import ClassifierBinding
from liger_trainer.head.module import base_model_of
from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.shared_prompts import SharedPromptFields, sharing_rule
from liger_trainer.trainers.trl import LigerTRLMixin


@dataclass
class LigerRewardConfig(SharedPromptFields, LigerArguments, RewardConfig):
    """[`~trl.RewardConfig`] with `share_prompts` and the fields of [`LigerArguments`], for [`LigerRewardTrainer`]."""


class LigerRewardTrainer(LigerTRLMixin, RewardTrainer):
    """[`~trl.RewardTrainer`] with the same losses, gradients and metrics, on fused kernels.

    Padding is not computed, and the common beginning of both answers is computed once. The trainer takes the arguments
    of `RewardTrainer`, with a [`LigerRewardConfig`] as `args`; a plain `RewardConfig` counts as one with
    `use_liger=True`. The loss code is TRL's. As in transformers, the last token that is not padding gives the reward of
    a row.
    """

    shares_prompts = True
    takes_classifiers = True
    args: RewardConfig

    def _replaced_globals(self) -> dict[str, Any]:
        return {}

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        bound = ClassifierBinding.of(base_model_of(self.model))
        if bound is not None:
            rule = sharing_rule(self.args)
            bound.sharing = None if rule is None else rule._replace(halves=True)

        def call(**arguments: Any) -> Any:
            arguments.pop("margin", None)  # only the loss needs it; the model would pass it to each of its layers
            return model(**arguments)

        return super().compute_loss(call if self.uses_liger else model, inputs, *args, **kwargs)
