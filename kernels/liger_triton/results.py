"""What operations with several results return. The kernels and their twins share these."""

from typing import NamedTuple

import torch


class LogProbs(NamedTuple):
    """Each of the shape of `target`, fp32 or, for float64, that (`is_top1` bool), zero at ignored positions; None where
    not asked for."""

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None


class Divergence(NamedTuple):
    """Each of the shape of `hidden` without its last dimension, fp32 or float64, zero where `mask` is False."""

    divergence: torch.Tensor
    entropy: torch.Tensor


class TokenRanks(NamedTuple):
    """Each of the shape of `target`; -100 at ignored positions.

    Args:
        argmax (`torch.Tensor`): int64, the first of the largest logits.
        log_probs (`torch.Tensor`): fp32 or float64, `log_softmax(z)[target]`, in nats.
        rank (`torch.Tensor`): int64, how many logits are larger than the target's: 0 for the most likely token, and
            for every one of several that tie with it.
    """

    argmax: torch.Tensor
    log_probs: torch.Tensor
    rank: torch.Tensor


class HeadsLoss(NamedTuple):
    """`loss` (), fp32 (float64 for float64), differentiable: the sum over all rows that count of row_weight * loss.
    Without a gradient, each (K,): `head_losses`, of the dtype of `loss`, the sums of the rows' losses without
    row_weight; `head_top1`, int64, how many rows have their target as the first largest logit; `head_rows`, int64, how
    many rows count."""

    loss: torch.Tensor
    head_losses: torch.Tensor
    head_top1: torch.Tensor
    head_rows: torch.Tensor
