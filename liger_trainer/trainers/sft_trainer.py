"""`LigerSFTTrainer`: `trl.SFTTrainer` with our fused head in the place of TRL's own."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from accelerate import DistributedType
from torch import nn
from trl import SFTConfig, SFTTrainer

from liger_trainer.data.formats import has_images
from liger_trainer.head.module import who_sees_outputs
from liger_trainer.head.outputs import FusedLMOutput
from liger_trainer.head.request import HeadRequest, run_request
from liger_trainer.head.sums import HeadSums
from liger_trainer.mtp.training import TARGETS, TrainedPredictor, check_base
from liger_trainer.trainers.arguments import LigerArguments
from liger_trainer.trainers.late_metrics import LateMetrics
from liger_trainer.trainers.packed_images import pack_images
from liger_trainer.trainers.trl import LigerTRLMixin
from liger_trainer.varlen.host_copies import values_of


@dataclass
class LigerSFTConfig(LigerArguments, SFTConfig):
    """[`~trl.SFTConfig`] with the fields of [`LigerArguments`], for [`LigerSFTTrainer`]."""

    train_mtp: bool = field(
        default=False,
        metadata={
            "help": "Also train the multi-token prediction head of the model's checkpoint (`mtp.*`, or a layer "
            "beyond the depth), and save it with the model under its own names. The model learns exactly as without it."
        },
    )
    mtp_targets: Literal["hard", "soft"] = field(
        default="hard",
        metadata={
            "help": "What the multi-token prediction head learns. 'hard': cross-entropy with the labels. 'soft': "
            "Kullback-Leibler divergence from the model's own distribution for the same token, at positions with a "
            "label."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.train_mtp, bool):
            raise ValueError(f"train_mtp is {self.train_mtp!r}; expected true or false.")
        if self.mtp_targets not in TARGETS:
            raise ValueError(f"mtp_targets is {self.mtp_targets!r}; expected 'hard' or 'soft'.")
        if self.mtp_targets == "soft" and not self.trains_mtp:
            raise ValueError(
                "mtp_targets is 'soft', but no MTP head is trained. Set train_mtp: true, or remove mtp_targets."
            )

    @property
    def trains_mtp(self) -> bool:
        """Return whether the MTP head of the model's checkpoint is trained."""
        return self.train_mtp


@dataclass(eq=False)  # hashable, as a function is
class _Scorer:
    """Stands in for the model in TRL's `compute_loss`, which calls it with `fused_lm_head=True`.

    Attributes:
        trainer (`LigerSFTTrainer`): The trainer.
        model (`Callable`): The model.
        request_fields (`dict`): What the head computes, as fields of `HeadRequest`.
        on_device (`dict`): The inputs that TRL has from the host, as the model gets them.
        inputs (`dict`): The batch, for a user's `token_loss`.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*): The labels of the accumulated batch.
        smoothed (`bool`): Whether the head smooths the labels.
        late (`bool`): Whether TRL gets placeholders in place of the metrics.
        mtp_losses (`list[torch.Tensor]`): The loss of an MTP head in each call with labels.
        replaced (`list[FusedLMOutput]`): The outputs that TRL got with placeholders.
    """

    trainer: "LigerSFTTrainer"
    model: Callable[..., Any]
    request_fields: dict[str, Any]
    on_device: dict[str, Any]
    inputs: dict[str, Any]
    num_items_in_batch: torch.Tensor | int | None
    smoothed: bool
    late: bool
    mtp_losses: list[torch.Tensor] = field(default_factory=list)
    replaced: list[FusedLMOutput] = field(default_factory=list)

    def __call__(self, **call: Any) -> Any:
        request = HeadRequest.taken_from(call)  # TRL's, or one that asks for predictions too
        if not request.token_scores:
            return run_request(self.model, request, **call)
        request = dataclasses.replace(request, **self.request_fields)
        outputs = run_request(self.model, request, **(call | self.on_device))
        if outputs.observed is not None:
            self.mtp_losses.append(outputs.observed)
        if self.trainer.overrides_token_loss:
            outputs.log_probs = -self.trainer._token_loss_of(outputs, self.inputs)
        if self.smoothed:
            self._finish_smoothing(outputs)
        if self.late:
            self.replaced.append(outputs)
            outputs = dataclasses.replace(outputs, **self.trainer._late_metrics.placeholders())
        return outputs

    def _finish_smoothing(self, outputs: FusedLMOutput) -> None:
        """Treat the auxiliary loss and a batch without labels as the stock trainer does with a smoothed loss."""
        if outputs.aux_loss is not None:
            outputs.aux_loss = outputs.aux_loss.detach()
        # Without labels, the stock trainer divides a smoothed loss by zero, and other losses by one.
        log_probs = outputs.log_probs
        assert log_probs is not None and outputs.label_mask is not None, "the request asks for them"
        given = self.num_items_in_batch
        count = outputs.label_mask.sum() if given is None else given
        has_labels = torch.as_tensor(count, device=log_probs.device) > 0
        outputs.log_probs = torch.where(has_labels, log_probs, torch.nan)


def _with_mtp_loss(result: Any, losses: list[torch.Tensor]) -> Any:
    """Add the loss of an MTP head to `result` of TRL's `compute_loss`. ValueError unless there is one loss."""
    if len(losses) != 1:
        raise ValueError(f"train_mtp is true, and the model was called {len(losses)} times with labels, not once.")
    if isinstance(result, tuple):
        return result[0] + losses[0], result[1]
    return result + losses[0]


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
        arguments = inspect.signature(SFTTrainer.__init__).bind_partial(self, *args, **kwargs).arguments
        config: Any = arguments.get("args")
        if getattr(config, "trains_mtp", False):
            check_base(arguments["model"], config)  # before the rows are prepared
        packs_images = bool(getattr(config, "packing", False)) and has_images(arguments.get("train_dataset"))
        if packs_images:
            config.packing = False  # TRL rejects packing for images; `pack_images` does it below
        try:
            super().__init__(*args, **kwargs)
        finally:
            if packs_images:
                config.packing = True
        if packs_images:
            pack_images(self)

    def _finish_init(self) -> None:
        super()._finish_init()
        self._mtp = TrainedPredictor(self) if getattr(self.args, "train_mtp", False) else None
        self._mtp_sums = HeadSums()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        overrides_loss = self.overrides_token_loss
        # A user's code may give the labels' log-probabilities different gradients, or use the gradient of the entropy.
        is_read = self.overrides_compute_loss or not isinstance(model, nn.Module) or bool(who_sees_outputs(model))
        model = self._without_needless_mask(model)
        if not self.uses_fused_head or self.compute_loss_func is not None or (is_read and not overrides_loss):
            if self._mtp is not None:
                raise ValueError("train_mtp is true, but your own code reads the model's outputs. Remove one of them.")
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        # TRL counts tokens and reads metrics between forward and backward, where the host would wait for the GPU. If
        # they are only logged, TRL gets the host's copy of the mask, and placeholders in place of the metrics.
        late = self._metrics_may_be_late(is_read or return_outputs, num_items_in_batch)
        trl_inputs, on_device = self._counted_on_host(inputs) if late else (inputs, {})
        scorer = _Scorer(
            trainer=self,
            model=model,
            request_fields=self._request_fields(inputs, num_items_in_batch),
            on_device=on_device,
            inputs=trl_inputs | on_device,
            num_items_in_batch=num_items_in_batch,
            smoothed=self._is_smoothed,
            late=late,
        )
        recording = self._late_metrics.recording(scorer.replaced) if late else nullcontext()
        with self._without_trl_smoothing(), recording:
            result = super().compute_loss(scorer, trl_inputs, return_outputs, num_items_in_batch)
        return result if self._mtp is None else _with_mtp_loss(result, scorer.mtp_losses)

    @property
    def _is_smoothed(self) -> bool:
        """Return whether the head smooths the labels. A user's `token_loss` does what it wants instead."""
        return not self.overrides_token_loss and self.label_smoother is not None and self.args.loss_type == "nll"

    def _request_fields(self, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None) -> dict[str, Any]:
        """Return what the head computes for TRL's loss, as fields of `HeadRequest`.

        These are the outputs of each token, the smoothing, and the loss of an MTP head.
        """
        overrides_loss = self.overrides_token_loss
        observer = None
        if self._mtp is not None:
            observer = partial(self._mtp_loss, self._mtp, inputs, num_items_in_batch)
        return {
            "token_outputs": ("log_probs", "entropy", "is_top1", *self.token_outputs) if overrides_loss else None,
            # TRL reduces by `-log_probs.sum() / num_tokens`, so all tokens have the same upstream gradient, and the
            # head can compute its gradients in the forward pass. It checks this promise: a broken one gives NaN.
            "uniform_grad": not overrides_loss and self.args.loss_type == "nll",
            "label_smoothing": self.label_smoother.epsilon if self._is_smoothed else 0.0,
            "logits_observer": observer,
        }

    @contextmanager
    def _without_trl_smoothing(self) -> Iterator[None]:
        """Context manager: TRL gets no smoother, because the head has smoothed `log_probs`.

        With a smoother, TRL would build logits again. The stock trainer adds no auxiliary loss to a smoothed one.
        """
        smoother = self.label_smoother
        router_aux_loss_coef = self.router_aux_loss_coef
        if self._is_smoothed:
            self.router_aux_loss_coef = 0.0
        self.label_smoother = None
        try:
            yield
        finally:
            self.label_smoother = smoother
            self.router_aux_loss_coef = router_aux_loss_coef

    def _mtp_loss(
        self,
        mtp: TrainedPredictor,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None,
        logits: Any,
    ) -> torch.Tensor:
        """Return the loss of the MTP head, to be added to the model's loss.

        Its value is 0, so `loss` stays the model's; only its gradient counts. It is divided by the labels of the LM
        head in the accumulated batch, like the model's loss.
        """
        loss, sums = mtp.loss(logits, inputs)
        self._mtp_sums.add("train" if self.model.training else "eval", sums, inputs)
        count = inputs["labels"][:, 1:].ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
        loss = loss / torch.as_tensor(count, device=loss.device).clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # DDP averages over ranks
        return loss - loss.detach()

    # If only an adapter is saved, the MTP head is saved next to it.

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self._mtp is not None and self.args.should_save:
            self._mtp.save(output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._mtp is None:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        with self._mtp.loading():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._mtp.load(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if self._mtp is None:
            return super()._load_best_model()
        with self._mtp.loading():
            super()._load_best_model()
        self._mtp.load(self.state.best_model_checkpoint)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        if mode in self._mtp_sums:
            (losses, hits, rows), _ = self._mtp_sums.take(mode, self.accelerator)
            self._metrics[mode]["mtp_loss"] = [losses[0] / max(rows[0], 1)]
            self._metrics[mode]["mtp_accuracy"] = [hits[0] / max(rows[0], 1)]
        super().log(logs, start_time)

    @property
    def _metrics(self) -> dict[str, Any]:
        """TRL's lists of metrics. Values that are still on the GPU are read here."""
        return self._late_metrics.read()

    @_metrics.setter
    def _metrics(self, lists: dict[str, Any]) -> None:
        self._late_metrics = LateMetrics(lists)

    def _metrics_may_be_late(self, is_read: bool, num_items_in_batch: Any) -> bool:
        """Return True if TRL only uses entropy, accuracy and the label mask for metrics, and gathers nothing."""
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
