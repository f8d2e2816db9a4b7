"""What calls of a fused head ask for and return, and the options that stay the same from call to call."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers.utils import ModelOutput

TOKEN_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
EXTRA_OUTPUTS = ("hidden_states", "vocab_mean")


@dataclass
class FusedLMOutput(ModelOutput):
    """What `model(..., labels=labels, fused_lm_head=True)` returns.

    It has the fields of TRL's `FusedCausalLMOutput`, and the hidden states. Per-token fields are `(B, S - 1)` for
    next-token labels `(B, S)`, or `(B, S)` with `shift_labels`; they are zero where the label is -100, fp32 (`is_top1`:
    bool), and `None` where not asked for.

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
        vocab_mean (`torch.Tensor`, *optional*): Mean of each row of logits `(B, S)`, with a label or without, when
            asked for; without gradient.
        predictions (`dict`, *optional*): Under `token_predictions=True`: `token_ids` (the argmax), `log_probs` (of the
            model's own distribution, whatever temperature and label smoothing), `ranks` and `labels`, each `(B, S - 1)`
            and -100 where the label is.
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


@dataclass
class HeadOptions:
    """What TRL fixes once per model in `add_fused_lm_head`."""

    temperature: float = 1.0
    cast_lm_head_to_fp32: bool = False
    outputs: tuple[str, ...] = ("log_probs",)


class LossRequest(NamedTuple):
    """What one call of the model asks of its head, beside the arguments of the model's own forward.

    Attributes:
        labels, shift_labels (`torch.Tensor` or `None`): (B, S), to be shifted by one, or shifted already.
        num_items_in_batch: What the sum over the labels is divided by; None: their number.
        label_smoothing (`float`): Between 0 and 1.
        token_predictions (`bool`): Whether the output has `predictions`.
        token_outputs (`tuple` or `None`): Fields of `FusedLMOutput`; None: those of `HeadOptions`.
        uniform_grad (`bool`): The promise that all labels get one upstream gradient, which spares a product.
    """

    labels: torch.Tensor | None
    shift_labels: torch.Tensor | None
    num_items_in_batch: torch.Tensor | int | None
    label_smoothing: float
    token_predictions: bool
    token_outputs: tuple[str, ...] | None
    uniform_grad: bool
