"""`LigerTrainer`: a `transformers.Trainer` that patches its model and computes the loss without logits."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from liger_trainer.head.module import base_model_of, report_unfused, who_sees_outputs, why_peft_needs_logits
from liger_trainer.head.request import HeadRequest, run_request
from liger_trainer.patching.core.binding import own_class
from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.base import LigerTrainerMixin
from liger_trainer.trainers.patched_models import PatchedModels
from liger_trainer.trainers.router_loss import check_router_loss, router_loss_of_step, router_loss_weights


@dataclass
class LigerTrainingArguments(LigerArguments, TrainingArguments):
    """[`~transformers.TrainingArguments`] with the fields of [`LigerArguments`], for [`LigerTrainer`]."""

    router_aux_loss: Literal["per_micro_batch", "per_step"] = field(
        default="per_micro_batch",
        metadata={
            "help": "How the auxiliary loss of a mixture of experts counts in a step of several micro-batches. "
            "'per_micro_batch': once for each, as in the stock trainer, so it grows with gradient_accumulation_steps. "
            "'per_step': as their mean, as in TRL's trainers."
        },
    )


class LigerTrainer(LigerTrainerMixin, Trainer):
    """[`~transformers.Trainer`] with the same losses, gradients and metrics, on fused kernels.

    It takes the arguments of `Trainer`, with a [`LigerTrainingArguments`] as `args`; a plain `TrainingArguments` counts
    as one with `use_liger=True`. Training builds no (B, S, V) logits, and neither does an evaluation of only the loss.
    With `compute_metrics`, evaluation builds them for the metrics, unless `eval_predictions="tokens"`.

    Raises:
        ValueError: `use_liger=True` with a model that has neither an LM head nor a classification head that pools one
            token of each row; or unknown keys in `liger_config`.
    """

    gives_token_predictions = True
    takes_classifiers = True
    label_smoother: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._patched = PatchedModels()
        super().__init__(*args, **kwargs)
        if self.model_init is None:  # else `call_model_init` has patched the model
            self._apply_liger(self.model)
        self._finish_init()
        check_router_loss(self)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model = super().call_model_init(trial)
        config = getattr(model, "config", None)
        if self.uses_liger and config is not None:
            # `Trainer` does this to the model that it is built with, and not to those of later trainings. They would
            # fill a cache in each step, so that padding is computed and no step is captured.
            config.use_cache = self.args.use_cache
        self._apply_liger(model)
        return model

    def unfused_reason(self, model: nn.Module) -> str | None:
        return why_peft_needs_logits(model)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        with router_loss_of_step(self, num_items_in_batch):
            return self._fused_loss(model, inputs, return_outputs, num_items_in_batch)

    def _fused_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool, num_items_in_batch: Any
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        if not self.uses_fused_head:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        request = HeadRequest.taken_from(inputs)  # an overriding `compute_loss` may have passed skip_logits
        if self._loss_only and request.skip_logits is None:
            request = replace(request, skip_logits=True)
        if "labels" not in inputs or self.compute_loss_func is not None:
            return super().compute_loss(model, request.added_to(inputs), return_outputs, num_items_in_batch)
        seen = who_sees_outputs(model) if isinstance(model, nn.Module) and not self.overrides_token_loss else None
        if seen is not None:
            report_unfused(self.model, seen)
            request = replace(request, skip_logits=False)
        wants_logits = return_outputs if request.skip_logits is None else not request.skip_logits
        model = self._without_needless_mask(self._with_predictions(model))
        if self.overrides_token_loss:
            return super().compute_loss(
                self._token_loss_model(model, wants_logits), inputs, return_outputs, num_items_in_batch
            )
        smoother, kind = self.label_smoother, own_class(base_model_of(self.model)).__name__
        if smoother is None or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            return super().compute_loss(model, request.added_to(inputs), return_outputs, num_items_in_batch)
        if wants_logits:  # the stock trainer recognizes a causal model by its class name, which FSDP2 changes
            self.label_smoother = partial(smoother, shift_labels=True)
        else:  # the model keeps its labels and smooths them itself
            self.label_smoother, request = None, replace(request, label_smoothing=smoother.epsilon)
        try:
            return super().compute_loss(model, request.added_to(inputs), return_outputs, num_items_in_batch)
        finally:
            self.label_smoother = smoother

    def _token_loss_model(
        self, model: Callable[..., Any], wants_logits: bool
    ) -> Callable[..., dict[str, torch.Tensor]]:
        """Return a stand-in for `model` that returns the loss of `token_loss`. `Trainer.compute_loss` scales it."""
        request = HeadRequest(token_scores=True, token_outputs=("log_probs", *self.token_outputs))

        def forward(num_items_in_batch: Any = None, **inputs: Any) -> dict[str, torch.Tensor]:
            outputs = run_request(model, request, **inputs)
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
        """Return the weight of the auxiliary loss in the model's own forward."""
        weights = router_loss_weights(self.model)
        return weights[0][2] if weights else 0.0
