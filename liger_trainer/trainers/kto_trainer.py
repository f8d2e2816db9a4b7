"""`LigerKTOTrainer`: `trl.KTOTrainer` with our fused head behind TRL's own contract."""

from dataclasses import dataclass

from trl import KTOConfig, KTOTrainer

from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.trl import LigerTRLMixin


@dataclass
class LigerKTOConfig(LigerArguments, KTOConfig):
    """[`~trl.KTOConfig`] with `use_liger` and `liger_config`, for [`LigerKTOTrainer`]."""

    _VALID_DICT_FIELDS = [*KTOConfig._VALID_DICT_FIELDS, "liger_config"]


class LigerKTOTrainer(LigerTRLMixin, KTOTrainer):
    """[`~trl.KTOTrainer`] with the same losses, gradients and metrics, on fused kernels.

    The policy and the reference model are patched, and neither builds logits, the mismatched pairs of the KL estimate
    included. Takes the arguments of `KTOTrainer`; `args` is a [`LigerKTOConfig`] (a plain `KTOConfig` counts as
    `use_liger=True`). Every option keeps its meaning, since the loss code is TRL's. Beyond stock: a LoRA on `lm_head`
    trains, and `eval_predictions="tokens"` gives `compute_metrics` token ids, log-probabilities and ranks without a
    second forward.

    Raises:
        ValueError: An option that would have no effect.
    """

    loss_hook = None
    gives_token_predictions = True
    ignored_fields = ("label_smoothing_factor",)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(self._gathering_predictions(model), inputs, return_outputs, num_items_in_batch)
