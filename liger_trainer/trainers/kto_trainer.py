"""`LigerKTOTrainer`: `trl.KTOTrainer` with our fused head in the place of TRL's own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from trl import KTOConfig, KTOTrainer

from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.trl import LigerTRLMixin
from liger_trainer.varlen.host_copies import remember, values_of


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

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        if self.uses_liger:
            model = _with_known_labels(model, inputs["input_ids"], inputs["completion_mask"])
        return super()._compute_loss(model, inputs, return_outputs)

    def _compute_kl_logps(self, model: Any, batch: dict[str, Any]) -> torch.Tensor | None:
        if self.uses_liger and self.calculate_KL:
            model = _with_known_labels(model, batch["KL_input_ids"], batch["KL_completion_mask"])
        return super()._compute_kl_logps(model, batch)


def _with_known_labels(
    model: Callable[..., Any], input_ids: torch.Tensor, completion_mask: torch.Tensor
) -> Callable[..., Any]:
    """Wrap `model` so that the host knows the labels of calls on `input_ids`, if it knows ids and mask.

    The labels are TRL's: the ids of completions, and -100 for the rest. The reference gets the same tensor.
    """
    ids, mask = values_of(input_ids, completion_mask)
    if ids is input_ids or ids.device.type != "cpu":
        return model
    on_host = ids.masked_fill(mask == 0, -100)

    def call(**given: Any) -> Any:
        labels = given.get("labels")
        if given.get("input_ids") is input_ids and isinstance(labels, torch.Tensor) and labels.shape == ids.shape:
            remember(labels, on_host)
        return model(**given)

    return call
