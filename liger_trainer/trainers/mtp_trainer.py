"""`LigerMTPTrainer`: the MTP head of a checkpoint, trained on the frozen model."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from liger_trainer.head.frozen import as_served
from liger_trainer.head.module import base_model_of
from liger_trainer.head.request import HeadRequest, run_request
from liger_trainer.mtp.training import TrainedPredictor
from liger_trainer.trainers.heads_trainer import LigerHeadsTrainer
from liger_trainer.trainers.sft_trainer import LigerSFTConfig


@dataclass
class LigerMTPConfig(LigerSFTConfig):
    """[`LigerSFTConfig`] for [`LigerMTPTrainer`].

    The loss, with N the labels in the accumulated batch over all ranks and p_t what the head guesses at token t:

        L = sum over t of CE(p_t, label of t + 2) / N              mtp_targets: hard
        L = sum over t of KL(q_{t+2} || p_t) / N                   mtp_targets: soft

    q is the model's own distribution for the same token. Tokens t + 2 without a label or in another document do not
    count.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_mtp:
            raise ValueError(
                "train_mtp is true, which trains the model too, but LigerMTPTrainer freezes it. Remove train_mtp, or "
                "use LigerSFTTrainer (trainer: sft)."
            )

    @property
    def trains_mtp(self) -> bool:
        return True


class LigerMTPTrainer(LigerHeadsTrainer):
    """[`LigerSFTTrainer`] for the multi-token prediction (MTP) head of a checkpoint: its data, packing and arguments.

    The model is frozen, and runs without a graph. The head is loaded from the model's checkpoint (`mtp.*`, or a layer
    beyond the depth) and becomes the model's attribute `mtp`; a head that an earlier trainer has left there is trained
    further. With `bf16` or `fp16` its weights are fp32, also in files, since 16-bit weights would lose small updates.
    Only a few rows of logits exist at any time, for the model and the head together. Training and evaluation log
    `mtp_loss` and `mtp_accuracy`: means over all targets of the head since the last log, on all ranks.

    The parameters of `model` stay frozen afterwards. `compute_metrics` gets the model's logits, not the head's.

    `output_dir` and every checkpoint get the head alone, as `mtp.safetensors`, under the names of the checkpoint.
    `liger-trainer export` writes the model with it. With `fp8`, the frozen linear layers are quantized to FP8.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]): The model. Its checkpoint has the head.
        args (`LigerMTPConfig`): Targets and everything else.
        kwargs: The other arguments of `SFTTrainer`.

    Raises:
        ValueError: The checkpoint has no supported head, or an option would be silently ignored.
    """

    arguments_class = LigerMTPConfig
    output_suffix = "MTP"
    trained = "an MTP head"

    @property
    def loss_name(self) -> str:
        """The loss, as the model card names it."""
        return f"of the MTP head, mtp_targets: {self.args.mtp_targets}"

    # The trained module

    def _finish_init(self) -> None:
        super()._finish_init()
        self._head = TrainedPredictor(self)

    # The loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        self._check_labels(inputs)
        call = {name: value for name, value in inputs.items() if name != "labels"} | {"use_cache": False}
        request = HeadRequest(logits_consumer=partial(self._scores, inputs=inputs))
        scores = run_request(model, request, **call)

        loss = self._per_label(scores["loss"], inputs["labels"][:, 1:], num_items_in_batch)
        self._sums.add("train" if self.model.training else "eval", scores["sums"], inputs)
        if not return_outputs:
            return loss
        with torch.no_grad():
            return loss, model(**call)

    def _scores(self, run: Callable[[], Any], inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Compute the loss of one batch, inside the model's forward. `run` calls the model's own forward.

        Returns:
            `dict`: `loss` (), summed and not yet divided by the number of labels, and `sums` (3, 1) as in
            `TrainedPredictor.loss`.
        """
        with as_served(base_model_of(self.model)):
            outputs = run()
        loss, sums = self._head.loss(outputs.logits, inputs)
        return {"loss": loss, "sums": sums}

    def _metric_names(self, heads: int) -> list[tuple[str, str]]:
        return [("mtp_loss", "mtp_accuracy")]

    # Checkpoints

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if not self.args.should_save:
            return
        output_dir = self.args.output_dir if output_dir is None else output_dir
        os.makedirs(output_dir, exist_ok=True)
        self._head.save(output_dir)
        self._save_beside_heads(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._head.load(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._head.load(self.state.best_model_checkpoint)
