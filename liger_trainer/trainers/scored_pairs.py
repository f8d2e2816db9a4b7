"""The base of `LigerORPOTrainer` and `LigerCPOTrainer`, which run TRL's own code on a stand-in for the logits.

TRL scores pairs from full logits in `concatenated_forward`. Here that method runs unchanged, but its model returns
`ScoredLogits`, which holds everything that the method reads from logits: the log-probability of every label and the
mean of every row. If a later release reads anything else, that is an error and never a wrong number.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import trl
from torch import nn
from transformers.utils import ModelOutput

from liger_trainer.head.module import base_model_of, why_peft_needs_logits
from liger_trainer.head.request import HeadRequest, run_request
from liger_trainer.trainers.trl import LigerTRLMixin
from liger_trainer.varlen.host_copies import remember, values_of

if TYPE_CHECKING:  # it always goes before a class of arguments of TRL
    from transformers import TrainingArguments as StockArguments
else:
    StockArguments = object

_DEFAULTS = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}  # of cross_entropy; others are None
_OFF = 'liger_config={"fused_linear_cross_entropy": false}'
_OF_A_PAIR = (
    "chosen_input_ids",
    "chosen_attention_mask",
    "chosen_labels",
    "rejected_input_ids",
    "rejected_attention_mask",
    "rejected_labels",
)


@dataclass
class ScoredPairFields(StockArguments):
    """The field of trainers that score pairs from logits."""

    padding_in_metrics: bool = field(
        default=True,
        metadata={
            "help": "Average all positions in logits/chosen and logits/rejected, prompts and padding included, as the "
            "stock trainer does. Padding is computed for it. False: these two metrics average the answers alone, as in "
            "DPO. Padding is then left out and steps can be captured, which is faster. Losses, gradients and all other "
            "metrics are the same."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.padding_in_metrics, bool):
            raise ValueError(f"padding_in_metrics is {self.padding_in_metrics!r}; expected true or false.")


class ScoredLogits:
    """Stands in for logits (..., V) that are never computed, and holds the known values of each row.

    TRL's method runs outside the model's call, where the head's weights may be sharded, so `DeferredLogits` would not
    work here.

    Args:
        log_probs (`torch.Tensor`): Log-probability of `target` in each row (...), fp32, differentiable.
        target (`torch.Tensor`): Token of each row (...), int64; -100 for an unknown log-probability.
        vocab_mean (`torch.Tensor`): Mean over the vocabulary of each row (...), fp32.
        vocab_size (`int`): V.
        averaged (`torch.Tensor`, *optional*): Which rows `mean` averages (...), bool. Unset: all.
    """

    def __init__(
        self,
        log_probs: torch.Tensor,
        target: torch.Tensor,
        vocab_mean: torch.Tensor,
        vocab_size: int,
        averaged: torch.Tensor | None = None,
    ) -> None:
        self.log_probs = log_probs
        self.target = target
        self.vocab_mean = vocab_mean
        self.vocab_size = vocab_size
        self.averaged = averaged

    def _rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "ScoredLogits":
        return ScoredLogits(
            change(self.log_probs),
            change(self.target),
            change(self.vocab_mean),
            self.vocab_size,
            None if self.averaged is None else change(self.averaged),
        )

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.target.shape, self.vocab_size))

    @property
    def device(self) -> torch.device:
        return self.log_probs.device

    def __getitem__(self, index: Any) -> "ScoredLogits":
        index = index if isinstance(index, tuple) else (index,)
        if len(index) == len(self.shape) or Ellipsis in index:
            if index[-1] != slice(None):
                raise self._unknown(f"indexing with {index}")
            index = index[:-1]
        return self._rows(lambda rows: rows[index])

    def contiguous(self) -> "ScoredLogits":
        return self

    def detach(self) -> "ScoredLogits":
        return self._rows(torch.Tensor.detach)

    def view(self, *shape: int) -> "ScoredLogits":
        if shape[-1] != self.vocab_size:
            raise self._unknown(f"view{shape}")
        return self._rows(lambda rows: rows.reshape(shape[:-1]))

    def mean(self) -> torch.Tensor:
        """Return the mean of all logits of these rows, or of the averaged rows, ()."""
        if self.averaged is None:
            return self.vocab_mean.mean()
        return self.vocab_mean.masked_fill(~self.averaged, 0.0).sum() / self.averaged.sum()

    def of(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the log-probability of each label (...), zero where it is -100. ValueError if one is not known."""
        wanted = labels != -100
        if (wanted & (labels != self.target)).any():
            raise ValueError(
                "TRL asks for the log-probability of a label that is not the next token of input_ids. Make the data "
                f"collator copy input_ids to labels, with -100 for tokens that do not count, or set {_OFF}."
            )
        return self.log_probs.masked_fill(~wanted, 0.0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._unknown(f"`{name}`")

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is not F.cross_entropy:
            raise cls._unknown(f"`{getattr(func, '__name__', func)}`")
        return _cross_entropy(*args, **(kwargs or {}))

    @staticmethod
    def _unknown(what: str) -> NotImplementedError:
        return NotImplementedError(
            f"trl {trl.__version__} uses {what} on logits, which the fused head does not build. Set {_OFF}, or install "
            "trl 1.16."
        )


def _cross_entropy(input: ScoredLogits, target: torch.Tensor, **options: Any) -> torch.Tensor:
    if any(value != _DEFAULTS.get(name) for name, value in options.items()):
        raise ScoredLogits._unknown("cross_entropy with options")
    return -input.of(target).sum() / (target != -100).sum()


class LigerPairMixin(LigerTRLMixin):
    """Mixin for a TRL trainer with a `concatenated_forward` that scores chosen and rejected rows in one batch.

    Attributes:
        learns_prompts (`bool`): Whether the likelihood term covers the prompts of chosen rows too.
    """

    learns_prompts: bool = False
    padding_value: int | None

    def __init__(self, model: nn.Module | str | None = None, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        if getattr(args, "use_liger", True) and isinstance(model, str) and (args.use_cpu or args.world_size > 1):
            # The stock trainer would spread the model that it loads over all GPUs of the machine, in every process.
            args.model_init_kwargs = {"device_map": None} | (args.model_init_kwargs or {})
        super().__init__(model, args, *rest, **kwargs)

    def _replaced_globals(self) -> dict[str, Any]:
        return {}

    def unfused_reason(self, model: nn.Module) -> str | None:
        if self.is_encoder_decoder:
            name = type(base_model_of(model)).__name__
            return f"{name} is an encoder-decoder model, and its pairs are scored from logits"
        return why_peft_needs_logits(model)

    def _finish_init(self) -> None:
        if self.uses_liger and self.processing_class.pad_token_id is None:
            if self.processing_class.eos_token_id is None:
                raise ValueError("processing_class has neither pad_token nor eos_token; set its pad_token.")
            # CPOTrainer does this too; ORPOTrainer fails at the first batch. Llama 3, for example, has no pad token.
            self.processing_class.pad_token = self.processing_class.eos_token
            if self.padding_value is None:
                self.padding_value = self.processing_class.pad_token_id
            if self.use_dpo_data_collator:
                self.data_collator.pad_token_id = self.processing_class.pad_token_id
        super()._finish_init()

    def concatenated_forward(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        if not self.uses_fused_head:
            return super().concatenated_forward(model, batch)

        averages_all = getattr(self.args, "padding_in_metrics", True)
        mean = "vocab_mean" if averages_all else "mean_logits"  # the second is of positions with a label alone
        host_batch = _known_on_host(batch)

        def score(input_ids: torch.Tensor, attention_mask: torch.Tensor, **options: Any) -> ModelOutput:
            """Stand in for the model in TRL's method, which has joined the chosen and the rejected rows."""
            answers = self.concatenated_inputs(batch)["concatenated_labels"].to(input_ids.device)
            labels = self._scored_labels(answers, input_ids, attention_mask)
            if host_batch is not None:  # so that the rows are found without a wait for the GPU
                rows = self.concatenated_inputs(host_batch)
                mask = rows["concatenated_attention_mask"]
                on_host = self._scored_labels(rows["concatenated_labels"], rows["concatenated_input_ids"], mask)
                remember(attention_mask, mask)
                remember(labels, on_host)
            outputs = run_request(
                model,
                HeadRequest(token_scores=True, token_outputs=("log_probs", mean)),
                input_ids=input_ids,
                attention_mask=attention_mask,
                labels=labels,
                **options,
            )
            # A prompt-learning adapter puts its own positions first. The last position predicts no token with a label,
            # so the head gives no log-probability for it: TRL's logits have one position more, padded here.
            scored_positions = labels.shape[1] - 1
            log_probs = F.pad(outputs.log_probs[:, -scored_positions:], (0, 1))
            if averages_all:
                means = outputs.vocab_mean[:, -labels.shape[1] :]
                averaged = None
            else:
                means = F.pad(outputs.mean_logits[:, -scored_positions:], (0, 1))
                averaged = F.pad(answers[:, 1:] != -100, (0, 1))
            logits = ScoredLogits(
                log_probs,
                F.pad(labels[:, 1:], (0, 1), value=-100),
                means,
                self.model.config.get_text_config().vocab_size,
                averaged,
            )
            return ModelOutput(logits=logits, aux_loss=outputs.aux_loss)

        return super().concatenated_forward(score, batch)

    def _scored_labels(
        self, labels: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the labels to score, (N, S): with `learns_prompts`, the prompts of chosen rows have labels too."""
        if not self.learns_prompts:
            return labels
        is_scored = (labels == -100) & (attention_mask == 1)
        is_scored[len(labels) // 2 :] = False  # the rejected rows
        return torch.where(is_scored, input_ids, labels)

    @classmethod
    def get_batch_logps(
        cls,
        logits: Any,
        labels: torch.Tensor,
        average_log_prob: bool = False,
        is_encoder_decoder: bool = False,
    ) -> torch.Tensor:
        """Return the log-probabilities of the labels (N, S), summed over each row or averaged over its labels: (N,)."""
        if not isinstance(logits, ScoredLogits):
            return super().get_batch_logps(logits, labels, average_log_prob, is_encoder_decoder)
        mask = labels[:, 1:] != -100
        total = logits[:, :-1].of(labels[:, 1:]).sum(-1)
        return total / mask.sum(-1) if average_log_prob else total


def _known_on_host(batch: dict[str, Any]) -> dict[str, torch.Tensor] | None:
    """Return both answers on the CPU, or None where the batch is there itself or the host does not know it."""
    tensors = [batch[name] for name in _OF_A_PAIR]
    values = values_of(*tensors)
    if values[0] is tensors[0] or values[0].device.type != "cpu":
        return None
    return dict(zip(_OF_A_PAIR, values, strict=True))
