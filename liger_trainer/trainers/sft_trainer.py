"""`LigerSFTTrainer`: `trl.SFTTrainer` with our fused head in the place of TRL's own."""

import dataclasses
import inspect
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import DistributedType
from torch import nn
from trl import SFTConfig, SFTTrainer

from liger_trainer.data.formats import has_images
from liger_trainer.head.module import who_sees_outputs
from liger_trainer.head.outputs import FusedLMOutput
from liger_trainer.head.request import HeadRequest, run_request
from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.late_metrics import LateMetrics
from liger_trainer.trainers.packed_images import pack_images
from liger_trainer.trainers.trl import LigerTRLMixin
from liger_trainer.varlen.host_copies import values_of


@dataclass
class LigerSFTConfig(LigerArguments, SFTConfig):
    """[`~trl.SFTConfig`] with the fields of [`LigerArguments`], for [`LigerSFTTrainer`]."""


class LigerSFTTrainer(LigerTRLMixin, SFTTrainer):
    """[`~trl.SFTTrainer`] with the same losses, gradients and metrics, on fused kernels.

    It takes the arguments of `SFTTrainer`, with a [`LigerSFTConfig`] as `args`; a plain `SFTConfig` counts as one with
    `use_liger=True`. A step runs one forward pass, whatever the options. Unlike the stock trainer, it can train a LoRA
    on `lm_head`, and `label_smoothing_factor` costs neither logits nor a second forward pass. As in TRL, the auxiliary
    loss of a mixture of experts is logged but not added when the loss is smoothed. Rows with images can be packed for
    training.
    """

    loss_hook: str | None = "token_loss"
    gives_token_predictions = True
    ignored_fields = ()
    args: SFTConfig
    label_smoother: Any
    router_aux_loss_coef: float
    _late_metrics: LateMetrics

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(SFTTrainer.__init__).bind_partial(self, *args, **kwargs).arguments
        config: Any = given.get("args")
        packs_images = bool(getattr(config, "packing", False)) and has_images(given.get("train_dataset"))
        if packs_images:
            config.packing = False  # which TRL refuses for images
        try:
            super().__init__(*args, **kwargs)
        finally:
            if packs_images:
                config.packing = True
        if packs_images:
            pack_images(self)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        own_loss, smoother = self.has_own_loss, self.label_smoother
        # Code that is not TRL's may give the log-probabilities of labels different gradients, or read the entropy's.
        is_read = self._overrides_compute_loss or not isinstance(model, nn.Module) or bool(who_sees_outputs(model))
        model = self._without_needless_mask(model)
        if not self.head_is_ours or self.compute_loss_func is not None or (is_read and not own_loss):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        smoothed = not own_loss and smoother is not None and self.args.loss_type == "nll"
        token_outputs = ("log_probs", "entropy", "is_top1", *self.token_outputs) if own_loss else None
        # TRL reduces by `-log_probs.sum() / num_tokens`, so that all tokens have one upstream gradient. Then the head
        # computes its gradients in the forward pass. It checks the promise: a broken one gives NaN.
        uniform_grad = not own_loss and self.args.loss_type == "nll"
        label_smoothing = smoother.epsilon if smoothed else 0.0

        late = self._metrics_may_be_late(is_read or return_outputs, num_items_in_batch)
        given, on_device = self._counted_on_host(inputs) if late else (inputs, {})
        replaced: list[FusedLMOutput] = []

        def scored(**call: Any) -> Any:
            request = HeadRequest.taken_from(call)  # TRL's, or one that asks for predictions too
            if not request.token_scores:
                return run_request(model, request, **call)
            request = dataclasses.replace(
                request,
                token_outputs=token_outputs,
                uniform_grad=uniform_grad,
                label_smoothing=label_smoothing,
            )
            outputs = run_request(model, request, **(call | on_device))
            if own_loss:
                outputs.log_probs = -self._token_loss_of(outputs, given | on_device)
            if smoothed and outputs.aux_loss is not None:
                outputs.aux_loss = outputs.aux_loss.detach()
            if smoothed:
                # The stock trainer divides a smoothed loss of no labels by zero, and its other losses by one.
                count = outputs.label_mask.sum() if num_items_in_batch is None else num_items_in_batch
                has_labels = torch.as_tensor(count, device=outputs.log_probs.device) > 0
                outputs.log_probs = torch.where(has_labels, outputs.log_probs, torch.nan)
            if late:
                replaced.append(outputs)
                outputs = dataclasses.replace(outputs, **self._late_metrics.placeholders())
            return outputs

        stock = self.label_smoother, self.router_aux_loss_coef
        self.label_smoother = None  # log_probs are smoothed already; with it, TRL would build logits in a second pass
        if smoothed:  # the stock trainer adds no auxiliary loss to a smoothed one
            self.router_aux_loss_coef = 0.0
        recording = self._late_metrics.recording(replaced) if late else nullcontext()
        try:
            with recording:
                return super().compute_loss(scored, given, return_outputs, num_items_in_batch)
        finally:
            self.label_smoother, self.router_aux_loss_coef = stock

    @property
    def _metrics(self) -> dict[str, Any]:
        """TRL's lists of metrics. Values that are still on the GPU are read now."""
        return self._late_metrics.read()

    @_metrics.setter
    def _metrics(self, lists: dict[str, Any]) -> None:
        self._late_metrics = LateMetrics(lists)

    def _metrics_may_be_late(self, is_read: bool, num_items_in_batch: Any) -> bool:
        """Return True if TRL uses entropy, accuracy and the label mask only for metrics, and gathers nothing."""
        alone = self.accelerator.distributed_type == DistributedType.NO
        return alone and self.model.training and not is_read and num_items_in_batch is not None

    @staticmethod
    def _counted_on_host(inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return `inputs` with the host's copy of the tensor that TRL counts tokens in, and the device's tensor."""
        name = "attention_mask" if "attention_mask" in inputs else "position_ids"
        counted = inputs.get(name)
        if not isinstance(counted, torch.Tensor):
            return inputs, {}
        return {**inputs, name: values_of(counted)[0]}, {name: counted}
