"""`LigerRLOOTrainer`: `trl.RLOOTrainer` with our fused head behind TRL's own contract."""

from trl import RLOOTrainer

from liger_trainer.trl_seam import LigerTRLMixin


class LigerRLOOTrainer(LigerTRLMixin, RLOOTrainer):
    """[`~trl.RLOOTrainer`] with the same losses, gradients and metrics, on fused kernels.

    The policy and the reference model are patched, and neither builds logits but for the tokens being generated. Takes
    the arguments of `RLOOTrainer`; `args` is a [`LigerRLOOConfig`] (a plain `RLOOConfig` counts as `use_liger=True`).
    Every option keeps its meaning, since the loss code is TRL's. Beyond stock: a LoRA on `lm_head` trains.

    Raises:
        ValueError: An option that would have no effect.
    """

    loss_hook = None
    ignored_fields = ("label_smoothing_factor",)
