"""`LigerGRPOTrainer`: `trl.GRPOTrainer` with our fused head instead of TRL's."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from liger_trainer.head.module import output_head
from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.online.beside_generation import GivesMemoryBack
from liger_trainer.trainers.online.fields import OnlineFields
from liger_trainer.trainers.online.reused_log_probs import ReusesLogProbs
from liger_trainer.trainers.online.rollout_ratios import MODES, RatioMetrics, RatioOptions, importance_ratio
from liger_trainer.trainers.online.sorted_rows import SortsRows
from liger_trainer.trainers.trl import LigerTRLMixin


@dataclass
class LigerGRPOConfig(OnlineFields, LigerArguments, GRPOConfig):
    """[`~trl.GRPOConfig`] with the fields of [`OnlineFields`] and [`LigerArguments`], for [`LigerGRPOTrainer`]."""


class LigerGRPOTrainer(ReusesLogProbs, SortsRows, GivesMemoryBack, LigerTRLMixin, GRPOTrainer):
    """[`~trl.GRPOTrainer`] with the same losses, gradients and metrics, on fused kernels.

    The policy and the reference model are patched, and neither builds logits except for the tokens that it generates.
    The trainer takes the arguments of `GRPOTrainer`, with a [`LigerGRPOConfig`] as `args`; a plain `GRPOConfig` counts
    as one with `use_liger=True`. Every option keeps its meaning, since the loss code is TRL's. Unlike the stock
    trainer, it can train a LoRA on `lm_head`.

    Raises:
        ValueError: `cast_lm_head_to_fp32` is set with an adapter on `lm_head`.
    """

    shares_prompts = True
    args: GRPOConfig
    _ratio_metrics: RatioMetrics | None = None  # for the last generation batch that skipped the old policy's pass

    def _finish_init(self) -> None:
        if self.uses_fused_head and self.args.cast_lm_head_to_fp32 and hasattr(output_head(self.model), "base_layer"):
            raise ValueError(
                "cast_lm_head_to_fp32 is True, and an adapter is on the LM head. TRL's cast replaces the forward of "
                "the head by one without the adapter, so completions would be sampled without it. Set "
                "cast_lm_head_to_fp32=False, or remove 'lm_head' from target_modules."
            )
        super()._finish_init()

    def _corrects(self) -> bool:
        return bool(self.use_vllm and self.vllm_importance_sampling_correction)

    def _runs_old_policy(self) -> bool:
        """TRL itself skips the pass if nothing is corrected and the policy does not change."""
        return self._corrects()

    def _why_needed(self) -> str | None:
        if self.vllm_importance_sampling_mode not in MODES:
            return f"vllm_importance_sampling_mode is {self.vllm_importance_sampling_mode!r}"
        return self._why_moved()

    @property
    def _ratio_options(self) -> RatioOptions:
        return RatioOptions(
            self.vllm_importance_sampling_mode,
            self.vllm_importance_sampling_clip_min,
            self.vllm_importance_sampling_clip_max,
        )

    def _leave_out(self, undo: ExitStack) -> None:
        """Turn TRL's correction off until the batch is complete, so that TRL skips the pass."""
        self.vllm_importance_sampling_correction = False
        undo.callback(setattr, self, "vllm_importance_sampling_correction", True)
        parts = self.args.steps_per_generation if self._mode == "train" else 1
        self._ratio_metrics = RatioMetrics(parts, self._ratio_options.of_sequences)

    def _without_pass(self, batch: dict[str, Any]) -> dict[str, Any]:
        if "sampling_per_token_logps" not in batch:
            raise ValueError(
                "vllm_importance_sampling_correction is True, and rollout_func returned no logprobs. Return one "
                "for each token of each completion, or set vllm_importance_sampling_correction=False."
            )
        return batch

    def _lacks(self, inputs: dict[str, Any]) -> bool:
        return self._corrects() and "importance_sampling_ratio" not in inputs

    def _fill_in(self, inputs: dict[str, Any], old: torch.Tensor) -> None:
        mask, sampled = inputs["completion_mask"], inputs["sampling_per_token_logps"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        ratio = importance_ratio(old, sampled, mask, self._ratio_options)
        inputs["old_per_token_logps"] = old
        inputs["importance_sampling_ratio"] = ratio
        metrics = self._ratio_metrics
        assert metrics is not None, "the batch was generated without a pass"
        metrics.add(old, sampled, mask, ratio)
        if metrics.is_whole:
            for name, value in metrics.gathered(self.accelerator).items():
                self._metrics[self._mode][name].append(value)
