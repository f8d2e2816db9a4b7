"""`LigerTrainer`: `transformers.Trainer` with the model patched at init and the loss computed without logits."""

from dataclasses import dataclass
from functools import partial

import torch
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from liger_trainer.head.find import base_model_of, why_peft_needs_logits
from liger_trainer.head.module import own_class
from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.base import LigerTrainerMixin
from liger_trainer.trainers.patched_models import PatchedModels


@dataclass
class LigerTrainingArguments(LigerArguments, TrainingArguments):
    """[`~transformers.TrainingArguments`] with `use_liger` and `liger_config`, for [`LigerTrainer`]."""

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "liger_config"]


class LigerTrainer(LigerTrainerMixin, Trainer):
    """[`~transformers.Trainer`] with the same losses, gradients and metrics, on fused kernels.

    Takes the arguments of `Trainer`; `args` is a [`LigerTrainingArguments`] (a plain `TrainingArguments` counts as
    `use_liger=True`). Training builds no (B, S, V) logits. Loss-only evaluation builds none either; with
    `compute_metrics` it does, as the metrics ask for them, unless `eval_predictions="tokens"`.

    Raises:
        ValueError: `use_liger=True` with a model that has no LM head, or unknown keys in `liger_config`.
    """

    gives_token_predictions = True
    _loss_only = False  # while `prediction_step` wants no logits

    def __init__(self, *args, **kwargs):
        self._patched = PatchedModels()
        with self._patched.undone_on_error():
            super().__init__(*args, **kwargs)
            if self.model_init is None:  # with model_init, call_model_init patches
                self._apply_liger(self.model)
            self._finish_init()

    def call_model_init(self, trial=None):
        model = super().call_model_init(trial)
        self._apply_liger(model)
        return model

    def _why_unfused(self, model) -> str | None:
        return why_peft_needs_logits(model)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self._loss_only and self.head_is_ours:
            inputs = {"skip_logits": True} | inputs
        if not self.head_is_ours or "labels" not in inputs or self.compute_loss_func is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        model = self._without_needless_mask(self._gathering_predictions(model))
        wants_logits = return_outputs and not inputs.get("skip_logits", False)
        if self.has_own_loss:
            return super().compute_loss(
                self._own_loss_model(model, wants_logits), inputs, return_outputs, num_items_in_batch
            )
        smoother = self.label_smoother
        if smoother is None or not self._is_causal_lm():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if wants_logits:  # the stock trainer knows a causal model by the name of its class, which FSDP2 changes
            self.label_smoother = partial(smoother, shift_labels=True)
        else:  # the model keeps its labels and smooths them itself
            self.label_smoother, inputs = None, {**inputs, "label_smoothing": smoother.epsilon}
            model = _that_smooths(model)
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.label_smoother = smoother

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        self._loss_only = prediction_loss_only or self._wants_tokens
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._loss_only = False

    def _refuse_token_predictions(self) -> None:
        super()._refuse_token_predictions()
        if self.compute_loss_func is not None:
            raise ValueError(
                "eval_predictions is 'tokens', and compute_loss_func is set, which needs the logits. Set "
                "eval_predictions to 'logits', or override token_loss instead of compute_loss_func."
            )

    def _is_causal_lm(self) -> bool:
        """The test by which the stock trainer shifts labels for its `LabelSmoother`, made right under FSDP2."""
        return own_class(base_model_of(self.model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def _own_loss_model(self, model, wants_logits: bool):
        """Stand-in for `model` returning the loss of `token_loss`; `Trainer.compute_loss` scales it as any model's."""

        def forward(skip_logits=None, num_items_in_batch=None, **inputs):
            outputs = model(**inputs, fused_lm_head=True, token_outputs=("log_probs", *self.token_outputs))
            per_token = self._token_loss_of(outputs, inputs)
            count = outputs.label_mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            loss = per_token.sum() / torch.as_tensor(count, device=per_token.device)
            if outputs.aux_loss is not None:
                loss = loss + self._aux_loss_weight() * outputs.aux_loss.to(loss.device)
            result = {"loss": loss}
            if wants_logits:
                labels = ("labels", "shift_labels")
                result["logits"] = model(**{k: v for k, v in inputs.items() if k not in labels}).logits
            return result

        return forward

    def _aux_loss_weight(self) -> float:
        """What the model's own forward multiplies its auxiliary loss by, when it adds that to a loss."""
        model = base_model_of(self.model)
        for owner in (model, model.config.get_text_config()):
            for name in ("router_aux_loss_coef", "aux_loss_coef"):
                if (weight := getattr(owner, name, None)) is not None:
                    return weight
        return 0.0


def _that_smooths(model):
    """`model`, which is asked for a smoothed loss; RuntimeError where it answers as a model that does not know how."""

    def forward(**call):
        outputs = model(**call)
        if outputs.get("logits") is not None:
            raise RuntimeError(
                "label_smoothing_factor had no effect: model.forward has been replaced since the trainer was built, "
                "by one that does not smooth labels. Build the trainer after replacing it."
            )
        return outputs

    return forward
