"""Result types of the operations that return several tensors, for the kernels and their PyTorch twins."""

from typing import NamedTuple

import torch


class LogProbs(NamedTuple):
    """Log-probabilities and statistics of each row.

    Fields that were not requested are None. The others have the shape of `target` and are fp32, or float64 for float64
    inputs; `is_top1` is bool. They are zero at ignored positions.

    Attributes:
        log_probs: Log-probability of each target, in nats.
        entropy: Entropy of each row's distribution p, in nats.
        log_sum_sq_probs: `log(sum_v p_v ** 2)`.
        mean_logits: Mean of each row's logits.
        is_top1: Whether the target has the largest logit.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None


class Divergence(NamedTuple):
    """Divergence of a student from its teacher, and the student's entropy, of each row.

    Both have the shape of `hidden` without its last dimension, in nats. They are fp32 or float64, and zero where `mask`
    is False.
    """

    divergence: torch.Tensor
    entropy: torch.Tensor


class TokenRanks(NamedTuple):
    """Argmax, log-probability and rank of each target. All have the shape of `target` and are -100 at ignored
    positions.

    Args:
        argmax (`torch.Tensor`): int64, the first of the largest logits.
        log_probs (`torch.Tensor`): fp32 or float64, `log_softmax(z)[target]`, in nats.
        rank (`torch.Tensor`): int64, how many logits are larger than the target's. It is 0 for the most likely token,
            and for every token that ties with it.
    """

    argmax: torch.Tensor
    log_probs: torch.Tensor
    rank: torch.Tensor


class HeadsLoss(NamedTuple):
    """`loss` (), fp32 (float64 for float64), is differentiable: the sum of row_weight * loss over all rows that count.

    The others have no gradient and are (K,), one number for each head. `head_losses`, in the dtype of `loss`, are sums
    of row losses without row_weight. `head_top1`, int64, counts rows with the target at the first largest logit.
    `head_rows`, int64, counts rows that are not ignored."""

    loss: torch.Tensor
    head_losses: torch.Tensor
    head_top1: torch.Tensor
    head_rows: torch.Tensor
