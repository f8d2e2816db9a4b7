"""The base of all trainers of speculative heads: their default arguments, what they refuse, and the heads' metrics."""

import os
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer import TRAINING_ARGS_NAME

from liger_trainer.head.outputs import HeadOptions
from liger_trainer.head.sums import HeadSums
from liger_trainer.trainers.model_card import CardText, accuracy_lines
from liger_trainer.trainers.sft_trainer import LigerSFTConfig, LigerSFTTrainer


class LigerHeadsTrainer(LigerSFTTrainer):
    """[`LigerSFTTrainer`] for heads on a model: one loss and one accuracy for each head.

    A subclass sets the attributes below. It adds the sums of each batch to `_sums`, and names the metrics in
    `_metric_names`.

    Attributes:
        arguments_class (`type`): The class of `args`.
        output_suffix (`str`): Ends the name of the default `output_dir`.
        trained (`str`): What is trained, as errors name it.
        way_to_train_the_model (`str`): How to train the model too, as the end of an error. Empty if it cannot.
    """

    arguments_class: ClassVar[type[LigerSFTConfig]]
    output_suffix: ClassVar[str]
    trained: ClassVar[str]
    way_to_train_the_model: ClassVar[str] = ""
    loss_hook = None
    gives_token_predictions = False

    def __init__(
        self, model: str | PreTrainedModel | nn.Module, args: LigerSFTConfig | None = None, **kwargs: Any
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config.name_or_path
            args = self.arguments_class(f"{name.split('/')[-1]}-{self.output_suffix}")
        self._check_args(args, kwargs)
        if self._freezes_model(args):
            self._check_no_adapter(model)  # before the model is frozen
            self._check_not_quantized(model)
        super().__init__(model, args, **kwargs)
        self._sums = HeadSums()

    @property
    def loss_name(self) -> str:
        """Return the name of the loss for the model card."""
        raise NotImplementedError(f"{type(self).__name__} has no name for its loss.")

    @property
    def freezes_model(self) -> bool:  # type: ignore[override]  # it may depend on the arguments
        return self._freezes_model(self.args)

    @classmethod
    def _freezes_model(cls, args: Any) -> bool:
        """Return whether only the heads train."""
        return True

    # Refused

    @classmethod
    def _check_args(cls, args: Any, kwargs: dict[str, Any]) -> None:
        """ValueError for options that would be silently ignored. Called before anything is loaded."""
        if not isinstance(args, cls.arguments_class):
            raise ValueError(f"args is a {type(args).__name__}; expected a {cls.arguments_class.__name__}.")
        config: Any = args.liger_config or {}
        if not args.use_liger or not config.get("fused_linear_cross_entropy", True):
            name = "liger_config has fused_linear_cross_entropy: false" if args.use_liger else "use_liger is false"
            raise ValueError(f"{name}, but the fused LM head computes the loss of {cls.trained}. Remove that option.")
        ignored = {
            "label_smoothing_factor": args.label_smoothing_factor or None,
            "loss_type": None if args.loss_type == "nll" else args.loss_type,
            "compute_loss_func": kwargs.get("compute_loss_func"),
            "train_mtp": args.train_mtp or None,
        }
        for name, value in ignored.items():
            if value is not None:
                raise ValueError(
                    f"{name} is {value!r}, but the loss of {cls.trained} has no such option. Remove {name}."
                )
        of_the_model = {"peft_config": kwargs.get("peft_config"), "neftune_noise_alpha": args.neftune_noise_alpha}
        for name, value in of_the_model.items():
            if value is not None and cls._freezes_model(args):
                raise ValueError(
                    f"{name} is {value!r}, but {cls.__name__} freezes the model, which runs as it is served. Remove "
                    f"{name}{cls.way_to_train_the_model}."
                )
        if (kwargs.get("optimizers") or (None,))[0] is not None:
            raise ValueError(
                f"optimizers has an optimizer that was made before {cls.trained}, so it would train nothing of it. Set "
                "args.optim, or pass optimizer_cls_and_kwargs."
            )

    @classmethod
    def _check_no_adapter(cls, model: Any) -> None:
        if getattr(model, "peft_config", None):
            raise ValueError(
                f"The model has an adapter, but {cls.__name__} freezes the model. Merge it (merge_and_unload, or "
                f"`liger-trainer merge`) first{cls.way_to_train_the_model}."
            )

    @classmethod
    def _check_not_quantized(cls, model: Any) -> None:
        """ValueError for a quantized model. The stock trainer's advice would be an adapter, which would not train."""
        quantizer = getattr(model, "hf_quantizer", None)
        if getattr(model, "is_quantized", False) and not getattr(quantizer, "is_qat_trainable", False):
            kind = type(quantizer).__name__.removesuffix("HfQuantizer")
            raise ValueError(
                f"The model is quantized ({kind}), but {cls.__name__} freezes the model, and transformers only trains "
                "adapters on a quantized one. Load it in 16 bits; fp8: true halves its memory."
            )

    # The frozen model

    def _apply_liger(self, model: nn.Module, options: HeadOptions | None = None) -> None:
        if self.freezes_model:
            self._freeze(model)
        super()._apply_liger(model, options)

    def _freeze(self, model: nn.Module) -> None:
        """Freeze the model, before it is patched."""
        model.requires_grad_(False)

    def _finish_init(self) -> None:
        super()._finish_init()
        if self.freezes_model:
            self._check_no_adapter(self.model)  # TRL may have loaded one from a folder

    # The loss and the metrics

    @staticmethod
    def _check_labels(inputs: dict[str, Any]) -> None:
        """ValueError for a batch of the user's collator that has nothing to learn or to measure."""
        if inputs.get("labels") is None:
            raise ValueError(
                f"The batch has {', '.join(inputs)} and no labels, which heads learn from and are measured by. Let "
                "data_collator add labels: the tokens, and -100 where there is nothing to learn."
            )

    def _per_label(
        self, loss: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        """Divide a sum over the rows of a batch by the LM head's labels in the accumulated batch.

        Without `num_items_in_batch`, as in an evaluation, these are the ones in `labels`, which are already shifted.
        """
        count = labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
        loss = loss / torch.as_tensor(count, device=loss.device).clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())  # DDP averages over ranks
        return loss

    def _metric_names(self, heads: int) -> list[tuple[str, str]]:
        """The names of the loss and the accuracy of each of the heads that `_sums` counts."""
        raise NotImplementedError(f"{type(self).__name__} has no names for the metrics of its heads.")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        if mode in self._sums:
            self._metrics[mode] |= {name: [value] for name, value in self._mean_metrics(mode).items()}
        super().log(logs, start_time)

    def _mean_metrics(self, mode: str) -> dict[str, float]:
        """Means over all rows since the last log, on all ranks. All ranks have to call this."""
        (losses, hits, rows), tokens = self._sums.take(mode, self.accelerator)
        if mode == "train":
            self._total_train_tokens += int(self.accelerator.reduce(tokens, "sum")) // self.get_tp_size()
        metrics: dict[str, float] = {"num_tokens": self._total_train_tokens}
        for names, loss, hit, count in zip(self._metric_names(len(rows)), losses, hits, rows, strict=True):
            metrics[names[0]] = loss / max(count, 1)
            metrics[names[1]] = hit / max(count, 1)
        return metrics

    # Checkpoints

    def _save_beside_heads(self, output_dir: str) -> None:
        """Save what a folder of heads has besides them: the tokenizer and the arguments."""
        self.processing_class.save_pretrained(output_dir)
        torch.save(self.args, os.path.join(output_dir, TRAINING_ARGS_NAME))

    def card_text(self) -> CardText | None:
        """Leave out TRL's example for a frozen model: it would load a model from a folder that only has heads."""
        if not self.freezes_model:
            return super().card_text()
        name = Path(self.model.config._name_or_path).name
        return CardText(name, quick_start=False, trained=accuracy_lines(self.state.log_history))
