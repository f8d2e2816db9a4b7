"""`LigerDPOTrainer`: `trl.DPOTrainer` with our fused head in the place of TRL's own."""

from dataclasses import dataclass
from typing import Any

import torch
from trl import DPOConfig, DPOTrainer

from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.shared_prompts import SharedPromptFields
from liger_trainer.trainers.trl import LigerTRLMixin
from liger_trainer.varlen.host_copies import remember, values_of

_SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")  # TRL reads label_smoothing only for these loss types


@dataclass
class LigerDPOConfig(SharedPromptFields, LigerArguments, DPOConfig):
    """[`~trl.DPOConfig`] with `share_prompts` and the fields of [`LigerArguments`], for [`LigerDPOTrainer`]."""


class LigerDPOTrainer(LigerTRLMixin, DPOTrainer):
    """[`~trl.DPOTrainer`] with the same losses, gradients and metrics, on fused kernels.

    The policy and the reference model are patched, and neither builds logits. The trainer takes the arguments of
    `DPOTrainer`, with a [`LigerDPOConfig`] as `args`; a plain `DPOConfig` counts as one with `use_liger=True`. Every
    option keeps its meaning, since the loss code is TRL's. Unlike the stock trainer, it can train a LoRA on `lm_head`,
    and with `eval_predictions="tokens"` it gives `compute_metrics` token ids, log-probabilities and ranks without a
    second forward pass.
    """

    gives_token_predictions = True
    shares_prompts = True
    args: DPOConfig

    def _finish_init(self) -> None:
        super()._finish_init()
        if self.uses_liger and self.args.label_smoothing and not set(self.args.loss_type) & set(_SMOOTHED):
            raise ValueError(
                f"label_smoothing is {self.args.label_smoothing}, which DPOTrainer does not use with loss_type "
                f"{self.args.loss_type}. Remove it, or take one of {', '.join(_SMOOTHED)}; 'robust' is 'sigmoid' for "
                "data where some preferences are wrong."
            )

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Compute the stock loss. If the host knows the batch, tell it the labels too, so it does not read the GPU."""
        if not self.uses_liger:
            return super()._compute_loss(model, inputs, return_outputs)
        ids, mask = values_of(inputs["input_ids"], inputs["completion_mask"])

        def call(**arguments: Any) -> Any:
            labels = arguments.get("labels")
            if isinstance(labels, torch.Tensor) and labels.shape == ids.shape and ids.device.type == "cpu":
                remember(labels, ids.masked_fill(mask == 0, -100))  # the labels that the stock trainer makes
            return model(**arguments)

        return super()._compute_loss(call, inputs, return_outputs)
