"""`LigerSFTTrainer`: `trl.SFTTrainer` with our fused head behind TRL's own contract.

So its losses and metrics stay TRL's.
"""

from dataclasses import dataclass

from trl import SFTConfig, SFTTrainer

from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.trl import LigerTRLMixin


@dataclass
class LigerSFTConfig(LigerArguments, SFTConfig):
    """[`~trl.SFTConfig`] with `use_liger` and `liger_config`, for [`LigerSFTTrainer`]."""

    _VALID_DICT_FIELDS = [*SFTConfig._VALID_DICT_FIELDS, "liger_config"]


class LigerSFTTrainer(LigerTRLMixin, SFTTrainer):
    """[`~trl.SFTTrainer`] with the same losses, gradients and metrics, on fused kernels.

    It runs one forward a step, whatever the options. Takes the arguments of `SFTTrainer`; `args` is a
    [`LigerSFTConfig`] (a plain `SFTConfig` counts as `use_liger=True`). Beyond stock: a LoRA on `lm_head` trains, and
    `label_smoothing_factor` costs neither logits nor a second forward. As in TRL, the auxiliary loss of a mixture of
    experts is not added to a smoothed loss, only logged.
    """

    gives_token_predictions = True
    untrue_warnings = ("`label_smoothing_factor` is deprecated in `SFTTrainer`",)  # of full logits and a second forward

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        model = self._gathering_predictions(model)
        if not self.head_is_ours or self.compute_loss_func is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        model = self._without_needless_mask(model)
        own_loss, smoother = self.has_own_loss, self.label_smoother
        smoothed = not own_loss and smoother is not None and self.args.loss_type == "nll"
        options = {}
        if own_loss:
            options["token_outputs"] = ("log_probs", "entropy", "is_top1", *self.token_outputs)
        elif self.args.loss_type == "nll":
            # TRL reduces by `-log_probs.sum() / num_tokens`: one upstream gradient for all tokens, so that the fused
            # head may compute its gradients in the forward pass. It checks the promise and returns NaN where it is
            # broken.
            options["uniform_grad"] = True
            if smoothed:
                options["label_smoothing"] = smoother.epsilon

        def scored(**call):
            if not call.get("fused_lm_head"):
                return model(**call)
            outputs = model(**call, **options)
            if own_loss:
                outputs.log_probs = -self._token_loss_of(outputs, inputs)
            if smoothed and outputs.aux_loss is not None:
                outputs.aux_loss = outputs.aux_loss.detach()
            return outputs

        stock = self.label_smoother, self.router_aux_loss_coef
        self.label_smoother = None  # smoothing is in log_probs already; stock would build logits in a second forward
        if smoothed:  # to which stock adds no auxiliary loss
            self.router_aux_loss_coef = 0.0
        try:
            return super().compute_loss(scored, inputs, return_outputs, num_items_in_batch)
        finally:
            self.label_smoother, self.router_aux_loss_coef = stock
