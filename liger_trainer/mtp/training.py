"""Trains the MTP head of a model: checks the options, and computes the head's loss.

`LigerSFTTrainer` trains it together with the model, `LigerMTPTrainer` on the frozen model. In both the head learns from
the model's hidden states, and its loss has no gradient for the model, the embeddings and the LM head. So with
`LigerSFTTrainer` the model learns exactly as it does without the head.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn

from liger_trainer.base_weights.unloaded import Base, find_checkpoint
from liger_trainer.head.deferred import DeferredLogits
from liger_trainer.head.flat_rows import FlatRows, flat_rows
from liger_trainer.head.module import base_model_of, head_reason, innermost, output_head
from liger_trainer.head.sharding import sharding_reason
from liger_trainer.head.targets import head_targets
from liger_trainer.mtp.names import find_names
from liger_trainer.mtp.predictor import (
    detached,
    head_of,
    load_head,
    load_predictor,
    load_saved_head,
    predict,
    save_head,
)
from liger_trainer.patching.apply import apply_liger
from liger_triton import HeadsLoss, linear_heads_cross_entropy, linear_heads_kl

TARGETS = ("hard", "soft")  # the values of mtp_targets


@dataclass(frozen=True)
class _Wording:
    """How errors name the option that asks for the head, and what to do."""

    asked: str
    remedy: str
    other_option: str
    other_checkpoint: str


_JOINT = _Wording(
    asked="train_mtp is true",
    remedy="Remove train_mtp",
    other_option="Remove one of them",
    other_checkpoint="Remove train_mtp",
)
_ALONE = _Wording(
    asked="LigerMTPTrainer trains an MTP head",
    remedy="Use another model",
    other_option="Remove that option",
    other_checkpoint="Give a checkpoint of a LigerMTPTrainer",
)


class PredictorArguments(Protocol):
    """The trainer arguments that every trainer of a head has. Others, such as `model_init_kwargs`, only some have."""

    mtp_targets: str
    label_smoothing_factor: float


class PredictorTrainer(Protocol):
    """The trainer attributes that the training of the head reads. It writes none."""

    model: nn.Module
    accelerator: Accelerator
    freezes_model: bool
    compute_loss_func: Any  # a function of the user's, or None

    @property
    def args(self) -> PredictorArguments:
        """Return the trainer's arguments."""

    @property
    def uses_fused_head(self) -> bool:
        """Return whether the model has a fused LM head."""

    def wants_part(self, part: str) -> bool:
        """Return whether `liger_config` leaves this part on."""


def check_base(model: str | nn.Module, args: Any, revision: str | None = None) -> None:
    """ValueError if the checkpoint of `model` has several prediction layers, or no head of a known form.

    Called before the model is loaded, if it is a name, and before its rows are prepared. Files that are not here yet
    are checked when the head is loaded.
    """
    base = None
    if isinstance(model, str):
        base = _base_of(model, args, revision)
    elif head_of(base_model_of(model)) is None:
        base = _base_of(base_model_of(model).name_or_path, args)
    if base is None or (base.unread is not None and max(base.prediction_counts.values(), default=0) < 2):
        return
    try:
        find_names(base)
    except ValueError as error:
        wording = _JOINT if args.train_mtp else _ALONE
        raise ValueError(f"{wording.asked}, and {error} {wording.remedy}.") from error


def _base_of(name: str, args: Any, revision: str | None = None) -> Base:
    init = getattr(args, "model_init_kwargs", None) or {}
    return find_checkpoint(name, init.get("revision") or revision, init.get("subfolder") or "")


class TrainedPredictor:
    """The MTP head of `trainer.model`, loaded from its base, and the loss that trains it.

    Args:
        trainer (`PredictorTrainer`): A `LigerSFTTrainer` that has just been built. Its `args.mtp_targets` chooses the
            loss. If its `freezes_model` is true, only the head is saved.

    Raises:
        ValueError: The model's checkpoint has no supported head, or the trainer could not train or save it.
    """

    def __init__(self, trainer: PredictorTrainer) -> None:
        self._wording = _ALONE if trainer.freezes_model else _JOINT
        _check(trainer, self._wording)
        model: Any = base_model_of(trainer.model)
        args = trainer.args
        self._model = model
        self._predictor: Any = head_of(model) or self._load(args)
        self._predictor.requires_grad_(True)  # freezing the model has frozen the head of an earlier trainer
        has_adapter = trainer.model is not model
        self._saves_head_only = has_adapter or trainer.freezes_model
        if self._saves_head_only and trainer.accelerator.mixed_precision in ("bf16", "fp16"):
            # As PEFT does with adapters: autocast computes in 16 bits anyway, and most weights in bf16 are too coarse
            # for a step of 5e-5.
            self._predictor.float()
        apply_liger(self._predictor, getattr(args, "liger_config", None))
        self._by_rows = trainer.wants_part("varlen_attention")
        self._is_soft = args.mtp_targets == "soft"

    def _load(self, args: Any) -> nn.Module:
        try:
            return load_predictor(self._model, _base_of(self._model.name_or_path, args))
        except ValueError as error:
            raise self._error(f"and {error}") from error

    @property
    def predictor(self) -> nn.Module:
        """The head, a child of the model."""
        return self._predictor

    def save(self, folder: str) -> None:
        """Save the head next to an adapter or alone. Do nothing for a whole model, which contains it."""
        if self._saves_head_only:
            save_head(self._model, folder)

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """Within it the trainer loads its model from a checkpoint, before `load`.

        A head with other names than the model's is detached: transformers would not find it in the files.
        """
        if self._saves_head_only or self._predictor.names_in_files.is_own:
            return contextlib.nullcontext()
        return detached(self._model)

    def load(self, checkpoint: str) -> None:
        """Read the head of a checkpoint, where the model has not loaded it with its own weights. ValueError if it has
        none."""
        try:
            if self._saves_head_only:
                load_saved_head(self._predictor, checkpoint)
            elif not self._predictor.names_in_files.is_own:
                load_head(self._predictor, checkpoint)
        except ValueError as error:
            raise ValueError(f"{self._wording.asked}, and {error} {self._wording.other_checkpoint}.") from error

    def loss(self, logits: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the head's loss for a batch, without its logits, inside the model's forward.

        Args:
            logits (`DeferredLogits`): The model's, (B, S, V), with the input and the weight of the LM head.
            inputs (`dict`): The batch, with `input_ids` and `labels` (B, S).

        Returns:
            `tuple`: The sum of the losses (), with a gradient for the head alone, and (3, 1) fp32 for the metrics: the
            sum, the targets that were its first choice, and its targets.

        Raises:
            ValueError: The batch has images, or the LM head has computed real logits.
        """
        images = next((name for name in inputs if name.startswith(("pixel_", "image_", "video_"))), None)
        if images is not None:
            way_out = "Remove such rows" if self._wording is _ALONE else "Remove such rows, or train_mtp"
            raise ValueError(f"The batch has {images}, but an MTP head is trained on text. {way_out}.")
        if not isinstance(logits, DeferredLogits) or logits.is_materialized:
            raise self._error(f"which needs the input of the LM head, but {head_reason(self._model)}.")
        rows = flat_rows(inputs)
        target = head_targets(inputs, 1)[1:].flatten(1)[:, rows.places]
        loss, *sums = logits.fused(partial(self._head_loss, rows), target)
        return loss, torch.stack([s.float() for s in sums])

    def _head_loss(
        self,
        rows: FlatRows,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        logit_scale: float,
        softcap: float | None,
        **_: Any,
    ) -> HeadsLoss:
        """Compute the cross-entropy of the head, or its divergence from the model, summed over the rows of `target`.

        `hidden` (B, S, H) and `weight` (V, H) get no gradient. The model's distribution for the token that the head
        guesses at t is the one at t + 1.
        """
        embedding = self._model.get_input_embeddings().weight.detach()
        states = rows.of(hidden.detach())
        weight = weight.detach()
        guessed = predict(self._predictor, states, embedding, rows, self._by_rows).to(hidden.dtype)
        options: dict[str, Any] = {"softcap": softcap, "logit_scale": logit_scale}
        if self._is_soft:
            return linear_heads_kl([guessed], weight, states, weight, target != -100, target=target, **options)
        return linear_heads_cross_entropy([guessed], weight, target, **options)

    def _error(self, reason: str) -> ValueError:
        return ValueError(f"{self._wording.asked}, {reason} {self._wording.remedy}.")


def _check(trainer: PredictorTrainer, wording: _Wording) -> None:
    model: Any = base_model_of(trainer.model)
    asked, remedy = wording.asked, wording.remedy
    if not trainer.uses_fused_head:
        raise ValueError(f"{asked}, but the fused LM head is off (use_liger, liger_config). {wording.other_option}.")
    if any(config.is_prompt_learning for config in getattr(trainer.model, "peft_config", {}).values()):
        raise ValueError(f"{asked}, but the adapter puts tokens before the text. {remedy}.")
    if not trainer.freezes_model and not any(p.requires_grad for p in _parameters_without_head(trainer.model)):
        raise ValueError(
            f"{asked}, but each parameter of the model is frozen, so that only the head would learn. Call "
            "model.requires_grad_(True), such as after a LigerMTPTrainer, or train the head with LigerMTPTrainer."
        )
    if not isinstance(model.get_input_embeddings(), nn.Embedding):
        raise ValueError(
            f"{asked}, but the adapter trains the input embeddings, and the head would read the base's. Leave them out "
            f"of the adapter. Or: {remedy}."
        )
    split = sharding_reason(trainer.accelerator, model)
    if split is not None:
        raise ValueError(f"{asked}, but {split}")
    if trainer.args.label_smoothing_factor:
        smoothing = trainer.args.label_smoothing_factor
        raise ValueError(
            f"{asked} and label_smoothing_factor is {smoothing}, but the head's loss cannot be smoothed. "
            f"{wording.other_option}."
        )
    if trainer.compute_loss_func is not None:
        raise ValueError(f"{asked}, but compute_loss_func does not train the head. {wording.other_option}.")
    reason = head_reason(model)
    if reason is not None:
        raise ValueError(f"{asked}, which needs the input of the LM head, but {reason}. {remedy}.")
    head: Any = innermost(output_head(model))
    if hasattr(head, "base_layer"):
        raise ValueError(f"{asked}, but the LM head has an adapter. Leave it out. Or: {remedy}.")
    if head.bias is not None:
        raise ValueError(f"{asked}, but the LM head of {type(model).__name__} has a bias. {remedy}.")
    if not getattr(trainer.args, "keep_unloaded_weights", True):
        raise ValueError(f"{asked}, but keep_unloaded_weights: false leaves the head out. {wording.other_option}.")


def _parameters_without_head(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of `model`, but for a head that an earlier trainer has left there."""
    head = head_of(base_model_of(model))
    of_head = set() if head is None else {id(p) for p in head.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in of_head:
            yield parameter
