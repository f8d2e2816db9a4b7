"""`LigerGRPOTrainer`: `trl.GRPOTrainer` with our fused head in the place of TRL's own."""

from dataclasses import dataclass

from trl import GRPOConfig, GRPOTrainer

from liger_trainer.head.module import output_head
from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.online_rows import KnowsOnlineRows
from liger_trainer.trainers.shared_prompts import SharedPromptFields
from liger_trainer.trainers.trl import LigerTRLMixin


@dataclass
class LigerGRPOConfig(SharedPromptFields, LigerArguments, GRPOConfig):
    """[`~trl.GRPOConfig`] with `share_prompts` and the fields of [`LigerArguments`], for [`LigerGRPOTrainer`]."""


class LigerGRPOTrainer(KnowsOnlineRows, LigerTRLMixin, GRPOTrainer):
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

    def _finish_init(self) -> None:
        if self.uses_fused_head and self.args.cast_lm_head_to_fp32 and hasattr(output_head(self.model), "base_layer"):
            raise ValueError(
                "cast_lm_head_to_fp32 is True, and an adapter is on the LM head. TRL's cast replaces the forward of "
                "the head by one without the adapter, so completions would be sampled without it. Set "
                "cast_lm_head_to_fp32=False, or remove 'lm_head' from target_modules."
            )
        super()._finish_init()
