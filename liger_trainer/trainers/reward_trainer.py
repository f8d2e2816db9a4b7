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

    Nothing is computed for padding, and both answers of a pair share what they begin with. The trainer takes the
    arguments of `RewardTrainer`, with a [`LigerRewardConfig`] as `args`; a plain `RewardConfig` counts as one with
    `use_liger=True`. The loss code is TRL's, and a row is judged by the last token that is not padding, as in
    transformers.
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
            arguments.pop("margin", None)  # the loss reads it; the model would hand it on to each of its layers
            return model(**arguments)

        return super().compute_loss(call if self.uses_liger else model, inputs, *args, **kwargs)
