"""The same results as the fused kernels give, from real logits, for a head that cannot be fused.

This takes more time and memory, and the numbers are the same.
"""

import torch
import torch.nn.functional as F


def scores_of_logits(
    logits: torch.Tensor, target: torch.Tensor, *, temperature: float, label_smoothing: float
) -> dict[str, torch.Tensor]:
    """The fields of `FusedLMOutput` with one value per token (...), from logits (..., V) and labels (...)."""
    target = target.to(logits.device)
    mask = target != -100
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    log_probs = log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    detached = log_p.detach()
    scores = {
        "log_probs": (1 - label_smoothing) * log_probs + label_smoothing * log_p.mean(-1)
        if label_smoothing
        else log_probs,
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": torch.logsumexp(2 * detached, -1),
        "mean_logits": (logits.detach().float() / temperature).mean(-1),
        "is_top1": detached.argmax(-1) == target,
    }
    return {name: value.masked_fill(~mask, 0) for name, value in scores.items()}


def smoothed_loss_sum(logits: torch.Tensor, target: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """The sum of `F.cross_entropy` in fp32 over the labels (...) that are not -100, from logits (..., V)."""
    return F.cross_entropy(
        logits.float().flatten(0, -2), target.flatten(), reduction="sum", label_smoothing=label_smoothing
    )
