"""`LigerRLOOTrainer`: `trl.RLOOTrainer` with our fused head instead of TRL's."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from trl import RLOOConfig, RLOOTrainer

from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.online.beside_generation import GivesMemoryBack
from liger_trainer.trainers.online.fields import OnlineFields
from liger_trainer.trainers.online.reused_log_probs import ReusesLogProbs
from liger_trainer.trainers.online.sorted_rows import SortsRows
from liger_trainer.trainers.trl import LigerTRLMixin


@dataclass
class LigerRLOOConfig(OnlineFields, LigerArguments, RLOOConfig):
    """[`~trl.RLOOConfig`] with the fields of [`OnlineFields`] and [`LigerArguments`], for [`LigerRLOOTrainer`]."""


class LigerRLOOTrainer(ReusesLogProbs, SortsRows, GivesMemoryBack, LigerTRLMixin, RLOOTrainer):
    """[`~trl.RLOOTrainer`] with the same losses, gradients and metrics, on fused kernels.

    It takes the arguments of `RLOOTrainer`, with a [`LigerRLOOConfig`] as `args`; a plain `RLOOConfig` counts as one
    with `use_liger=True`. Models, options and a LoRA on `lm_head` work as in [`LigerGRPOTrainer`].
    """

    shares_prompts = True
    args: RLOOConfig
    _skips_next: bool = False  # the next scoring call is TRL's pass of the old policy, which is skipped

    def _runs_old_policy(self) -> bool:
        """TRL runs the pass for every batch."""
        return True

    def _why_needed(self) -> str | None:
        if self.beta != 0.0:
            return f"beta is {self.beta:g}: rewards are reduced by the distance of the old policy from the reference"
        return self._why_moved() if self._mode == "train" else None

    def _leave_out(self, undo: ExitStack) -> None:
        self._skips_next = True
        undo.callback(setattr, self, "_skips_next", False)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Score rows. Return NaN instead of a pass of the old policy, so that any use of it shows up."""
        if self._skips_next:
            self._skips_next = False
            unknown = torch.full((len(input_ids), logits_to_keep), float("nan"), device=input_ids.device)
            return unknown, None, None
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def _without_pass(self, batch: dict[str, Any]) -> dict[str, Any]:
        del batch["old_logps"]
        return batch

    def _lacks(self, inputs: dict[str, Any]) -> bool:
        return "old_logps" not in inputs

    def _fill_in(self, inputs: dict[str, Any], old: torch.Tensor) -> None:
        inputs["old_logps"] = (old * inputs["completion_mask"]).sum(1)
