"""Trains the MTP head together with its model: checks the options, and computes the head's loss.

The head learns from the model's hidden states and from the same labels. Its loss has no gradient for the model, the
embeddings and the LM head, so the model learns exactly as it does without the head.
"""

import contextlib
from functools import partial
from typing import Any

import torch
from accelerate import DistributedType
from torch import nn

from liger_trainer.base_weights.unloaded import find_checkpoint
from liger_trainer.head.deferred import DeferredLogits
from liger_trainer.head.flat_rows import FlatRows, flat_rows
from liger_trainer.head.module import base_model_of, head_reason, innermost, output_head
from liger_trainer.head.targets import head_targets
from liger_trainer.mtp.predictor import (
    detached,
    load_head,
    load_predictor,
    load_with_adapter,
    predict,
    save_with_adapter,
)
from liger_trainer.patching.apply import apply_liger
from liger_triton import HeadsLoss, linear_heads_cross_entropy

_PLAIN = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


class TrainedPredictor:
    """The MTP head of `trainer.model`, loaded from its base, and the loss that trains it.

    Args:
        trainer (`Any`): A `LigerSFTTrainer` that has just been built.

    Raises:
        ValueError: The model's checkpoint has no supported head, or the trainer could not train or save it.
    """

    def __init__(self, trainer: Any) -> None:
        _check(trainer)
        model: Any = base_model_of(trainer.model)
        args = trainer.args
        init = getattr(args, "model_init_kwargs", None) or {}
        base = find_checkpoint(model.name_or_path, init.get("revision"), init.get("subfolder") or "")
        self._model = model
        try:
            self._predictor: Any = load_predictor(model, base)
        except ValueError as error:
            raise ValueError(f"train_mtp is true, and {error} Remove train_mtp.") from error
        apply_liger(self._predictor, getattr(args, "liger_config", None))
        self._by_rows = trainer.wants_part("varlen_attention")
        self._has_adapter = trainer.model is not model  # then only the adapter is saved

    def save(self, folder: str) -> None:
        """Save the head next to an adapter. Do nothing for a whole model, which contains it."""
        if self._has_adapter:
            save_with_adapter(self._model, folder)

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """Within it the trainer loads its model from a checkpoint, before `load`.

        A head with other names than the model's is detached: transformers would not find it in the files.
        """
        if self._has_adapter or self._predictor.names_in_files.is_own:
            return contextlib.nullcontext()
        return detached(self._model)

    def load(self, checkpoint: str) -> None:
        """Read the head of a checkpoint, where the model has not loaded it with its own weights. ValueError if it has
        none."""
        if self._has_adapter:
            load_with_adapter(self._predictor, checkpoint)
        elif not self._predictor.names_in_files.is_own:
            load_head(self._predictor, checkpoint)

    def loss(self, logits: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the head's cross-entropy for a batch, without its logits, inside the model's forward.

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
            raise ValueError(f"The batch has {images}, but train_mtp is for text. Remove such rows, or train_mtp.")
        if not isinstance(logits, DeferredLogits) or logits.is_materialized:
            raise ValueError(f"train_mtp needs the input of the LM head, but {head_reason(self._model)}.")
        rows = flat_rows(inputs)
        target = head_targets(inputs, 1)[1:].flatten(1)[:, rows.places]
        loss, *sums = logits.fused(partial(self._cross_entropy, rows), target)
        return loss, torch.stack([s.float() for s in sums])

    def _cross_entropy(
        self,
        rows: FlatRows,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        logit_scale: float,
        softcap: float | None,
        **_: Any,
    ) -> HeadsLoss:
        """Call `linear_heads_cross_entropy` for the head. `hidden` (B, S, H) and `weight` (V, H) get no gradient."""
        embedding = self._model.get_input_embeddings().weight.detach()
        guessed = predict(self._predictor, rows.of(hidden.detach()), embedding, rows, self._by_rows)
        return linear_heads_cross_entropy(
            [guessed.to(hidden.dtype)], weight.detach(), target, softcap=softcap, logit_scale=logit_scale
        )


def _check(trainer: Any) -> None:
    model: Any = base_model_of(trainer.model)
    accelerator = trainer.accelerator
    if not trainer.uses_fused_head:
        raise ValueError(
            "train_mtp is true, but the fused LM head is off (use_liger, liger_config). Remove one of them."
        )
    if any(config.is_prompt_learning for config in getattr(trainer.model, "peft_config", {}).values()):
        raise ValueError("train_mtp is true, but the adapter puts tokens before the text. Remove train_mtp.")
    if not isinstance(model.get_input_embeddings(), nn.Embedding):
        raise ValueError(
            "train_mtp is true, but the adapter trains the input embeddings, and the head would read the base's. Leave "
            "them out of the adapter, or remove train_mtp."
        )
    if accelerator.distributed_type not in _PLAIN:
        raise ValueError(
            f"train_mtp is true, but the launch is {accelerator.distributed_type.value}, which shards weights. Train "
            "in one process, or with DDP."
        )
    if trainer.args.label_smoothing_factor:
        smoothing = trainer.args.label_smoothing_factor
        raise ValueError(
            f"train_mtp is true and label_smoothing_factor is {smoothing}, but the head's loss cannot be smoothed. "
            "Remove one of them."
        )
    if trainer.compute_loss_func is not None:
        raise ValueError("train_mtp is true, but compute_loss_func does not train the head. Remove one of them.")
    if (reason := head_reason(model)) is not None:
        raise ValueError(f"train_mtp is true and needs the input of the LM head, but {reason}. Remove train_mtp.")
    head: Any = innermost(output_head(model))
    if hasattr(head, "base_layer"):
        raise ValueError("train_mtp is true, but the LM head has an adapter. Leave it out, or remove train_mtp.")
    if head.bias is not None:
        raise ValueError(f"train_mtp is true, but the LM head of {type(model).__name__} has a bias. Remove train_mtp.")
    if not getattr(trainer.args, "keep_unloaded_weights", True):
        raise ValueError("train_mtp is true, but keep_unloaded_weights: false leaves the head out. Remove one of them.")
