"""The output of calls of a fused head, and the options that stay the same from call to call."""

from dataclasses import dataclass

import torch
from transformers.utils import ModelOutput

from liger_trainer.varlen.groups import SharingRule

TOKEN_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
EXTRA_OUTPUTS = ("hidden_states", "vocab_mean")


@dataclass
class FusedLMOutput(ModelOutput):
    """The result of `model(..., labels=labels, fused_lm_head=True)`.

    It has the fields of TRL's `FusedCausalLMOutput`, and some of its own. Fields with one value per token have the
    shape `(B, S - 1)` for labels `(B, S)`, or `(B, S)` with `shift_labels`. They are fp32, except `is_top1`, and zero
    where the label is -100. A field that the call did not ask for is `None`.

    Args:
        loss (`torch.Tensor`): Negative log-likelihood summed over the labels that count and divided by
            `num_items_in_batch` (their number when not passed), plus the model's weighted MoE auxiliary loss when
            router logits are requested.
        log_probs (`torch.Tensor`): Log-probability of each label; with `label_smoothing` e,
            `(1 - e) * log p(label) + e * mean_v log p(v)`.
        entropy (`torch.Tensor`): Entropy of the distribution, in nats.
        log_sum_sq_probs (`torch.Tensor`): `log(sum_v p_v ** 2)`, without gradient.
        mean_logits (`torch.Tensor`): Mean of the temperature-scaled logits, without gradient.
        is_top1 (`torch.Tensor`): Whether the label is the most likely token.
        label_mask (`torch.Tensor`): Whether the label is not -100.
        aux_loss (`torch.Tensor`, *optional*): MoE load-balancing loss.
        hidden_states (`torch.Tensor`, *optional*): The head's input `(B, S - 1, H)`, when asked for.
        vocab_mean (`torch.Tensor`, *optional*): Mean of each row of temperature-scaled logits `(B, S)`, also of rows
            without a label, when asked for; without gradient.
        predictions (`dict`, *optional*): With `token_predictions=True`, a dict of `token_ids` (the most likely tokens),
            `log_probs`, `ranks` and `labels`, each `(B, S - 1)` and -100 where the label is -100. The log-probabilities
            are of the model's own distribution, without temperature and label smoothing.
        observed (`torch.Tensor`, *optional*): The result of the request's `logits_observer`.
    """

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    vocab_mean: torch.Tensor | None = None
    predictions: dict[str, torch.Tensor] | None = None
    observed: torch.Tensor | None = None


@dataclass
class HeadOptions:
    """The options that TRL's `add_fused_lm_head` sets once for a model.

    Attributes:
        temperature (`float`): Divides the logits.
        cast_lm_head_to_fp32 (`bool`): Whether the head projects in fp32, outside autocast.
        outputs (`tuple`): Fields of `FusedLMOutput` that a call computes unless it asks for others.
        sharing (`SharingRule`, *optional*): When rows of a call that begin alike share it. Unset: never.
    """

    temperature: float = 1.0
    cast_lm_head_to_fp32: bool = False
    outputs: tuple[str, ...] = ("log_probs",)
    sharing: SharingRule | None = None
