"""`LigerMTPTrainer`: the MTP head of a checkpoint, trained on the frozen model."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer import TRAINING_ARGS_NAME

from liger_trainer.head.frozen import as_served
from liger_trainer.head.module import base_model_of
from liger_trainer.head.outputs import HeadOptions
from liger_trainer.head.request import HeadRequest, run_request
from liger_trainer.mtp.training import TrainedPredictor
from liger_trainer.trainers.heads_trainer import LigerHeadsTrainer
from liger_trainer.trainers.model_card import CardText, accuracy_lines
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

    freezes_model = True

    def __init__(
        self, model: str | PreTrainedModel | nn.Module, args: LigerMTPConfig | None = None, **kwargs: Any
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config.name_or_path
            args = LigerMTPConfig(f"{name.split('/')[-1]}-MTP")
        _check_args(args, kwargs)
        _check_no_adapter(model)  # before the model is frozen
        super().__init__(model, args, **kwargs)

    @property
    def loss_name(self) -> str:
        """The loss, as the model card names it."""
        return f"of the MTP head, mtp_targets: {self.args.mtp_targets}"

    # The trained module

    def _apply_liger(self, model: nn.Module, options: HeadOptions | None = None) -> None:
        model.requires_grad_(False)
        super()._apply_liger(model, options)

    def _finish_init(self) -> None:
        super()._finish_init()
        _check_no_adapter(self.model)  # TRL may have loaded one from a folder
        self._head = TrainedPredictor(self)

    # The loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        call = {name: value for name, value in inputs.items() if name != "labels"} | {"use_cache": False}
        request = HeadRequest(logits_consumer=partial(self._scores, inputs=inputs))
        scores = run_request(model, request, **call)

        labels = inputs["labels"][:, 1:]  # as many as the LM head has
        count = labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
        loss = scores["loss"] / torch.as_tensor(count, device=scores["loss"].device).clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # DDP averages over ranks
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
        self.processing_class.save_pretrained(output_dir)
        torch.save(self.args, os.path.join(output_dir, TRAINING_ARGS_NAME))

    def card_text(self) -> CardText | None:
        """Leave out TRL's example: it would load a model from a folder that only has a head."""
        name = Path(self.model.config._name_or_path).name
        return CardText(name, quick_start=False, trained=accuracy_lines(self.state.log_history))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._head.load(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._head.load(self.state.best_model_checkpoint)


def _check_args(args: LigerMTPConfig, kwargs: dict[str, Any]) -> None:
    """ValueError for options that would be silently ignored. Called before anything is loaded."""
    if not isinstance(args, LigerMTPConfig):
        raise ValueError(f"args is a {type(args).__name__}; expected a LigerMTPConfig.")
    ignored = {
        "loss_type": None if args.loss_type == "nll" else args.loss_type,
        "peft_config": kwargs.get("peft_config"),
        "neftune_noise_alpha": args.neftune_noise_alpha,  # the frozen model runs as it is served
    }
    for name, value in ignored.items():
        if value is not None:
            raise ValueError(f"{name} is {value!r}, but the head learns from a frozen model. Remove {name}.")
    if (kwargs.get("optimizers") or (None,))[0] is not None:
        raise ValueError(
            "optimizers has an optimizer that was made before the head, so it would not train it. Set args.optim, or "
            "pass optimizer_cls_and_kwargs."
        )


def _check_no_adapter(model: Any) -> None:
    if getattr(model, "peft_config", None):
        raise ValueError("The model has an adapter. Merge it (merge_and_unload, or `liger-trainer merge`) first.")
