"""`LigerGRPOTrainer`: `trl.GRPOTrainer` with our fused head behind TRL's own contract."""

from trl import GRPOTrainer

from liger_trainer.fused_head import output_head
from liger_trainer.trl_seam import LigerTRLMixin


class LigerGRPOTrainer(LigerTRLMixin, GRPOTrainer):
    """[`~trl.GRPOTrainer`] with the same losses, gradients and metrics, on fused kernels.

    The policy and the reference model are patched, and neither builds logits but for the tokens being generated. Takes
    the arguments of `GRPOTrainer`; `args` is a [`LigerGRPOConfig`] (a plain `GRPOConfig` counts as `use_liger=True`).
    Every option keeps its meaning, since the loss code is TRL's. Beyond stock: a LoRA on `lm_head` trains.

    Raises:
        ValueError: An option that would have no effect, or `cast_lm_head_to_fp32` with an adapter on `lm_head`.
    """

    loss_hook = None
    ignored_fields = ("label_smoothing_factor",)

    def _finish_init(self) -> None:
        if self.head_is_ours and self.args.cast_lm_head_to_fp32 and hasattr(output_head(self.model), "base_layer"):
            raise ValueError(
                "cast_lm_head_to_fp32 is True, and an adapter is on the LM head: TRL's cast replaces the forward of "
                "the head by one without the adapter, which completions would be sampled from. Set "
                "cast_lm_head_to_fp32=False, or remove 'lm_head' from target_modules."
            )
        super()._finish_init()
