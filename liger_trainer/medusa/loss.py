"""Computes the losses of Medusa heads: cross-entropy with the labels, or divergence from the model's distribution.

`LigerMedusaTrainer` calls `heads_loss` inside the call of the LM head, through `DeferredLogits.fused`.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from liger_trainer.medusa.heads import MedusaHeads
from liger_triton import HeadsLoss, linear_heads_cross_entropy, linear_heads_kl
from liger_triton.known_gradients import with_gradients
from liger_triton.linear_head import EVERY_ROW, counted_rows


def heads_loss(
    heads: MedusaHeads,
    soft: bool,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    row_weight: torch.Tensor,
    logit_scale: float,
    softcap: float | None,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    """Compute the losses of all heads, summed over their rows. A trained LM head gets cross-entropy.

    Args:
        heads (`MedusaHeads`): The K heads of the model.
        soft (`bool`): Use the Kullback-Leibler divergence from the model's own distribution at positions with a label,
            instead of cross-entropy with the labels.
        hidden, weight (`torch.Tensor`): The input (B, S, H) and the weight (V, H) of the LM head.
        target (`torch.Tensor`): Class ids, int64, -100 where there is nothing to guess: (K, B, S) or, if the model is
            trained too, (K + 1, B, S), the first of them for the LM head.
        row_weight (`torch.Tensor`): The weight of a row of each head, fp32, (K,) or (K + 1,); 1 for the LM head.
        logit_scale, softcap (`float`): The model's scaling and capping of logits.

    Returns:
        `tuple`: The loss (), with a gradient, and for each head, in the order of `target`: the sum of its losses
        without `row_weight`, the number of targets that were its first choice, and the number of its targets.
    """
    tied = heads.config.tied
    joint = len(target) > heads.config.num_heads  # the model is trained too
    options: dict[str, Any] = {"softcap": softcap, "logit_scale": logit_scale}
    target = target.flatten(1)

    def score(blocks: list[torch.Tensor], weights: list[torch.Tensor]) -> HeadsLoss:
        rows = [x.flatten(0, 1).to(hidden.dtype) for x in blocks]
        projections: Any = weight if tied else [w[: len(weight)] for w in weights]
        if soft:
            labels = target[joint:]
            return linear_heads_kl(
                rows,
                projections,
                hidden.detach().flatten(0, 1),
                weight.detach(),
                labels != -100,
                row_weight=row_weight[joint:],
                target=labels,
                **options,
            )
        if joint:
            rows, projections = [hidden.flatten(0, 1), *rows], weight if tied else [weight, *projections]
        return linear_heads_cross_entropy(rows, projections, target, row_weight=row_weight, **options)

    # ZeRO-3 only gathers the parameters of a module while its own backward runs.
    by_zero_3 = any(hasattr(p, "ds_id") for p in heads.parameters())
    if not (soft or joint or by_zero_3):
        return _score_one_by_one(heads, hidden, weight, target, row_weight, options)
    scores = heads(hidden, score)
    if not (soft and joint):
        return tuple(scores)
    lm = linear_heads_cross_entropy([hidden.flatten(0, 1)], weight, target[:1], **options)
    return lm.loss + scores.loss, *(torch.cat(both) for both in zip(lm[1:], scores[1:], strict=True))


def _score_one_by_one(
    heads: MedusaHeads,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    row_weight: torch.Tensor,
    options: dict[str, Any],
) -> tuple[torch.Tensor, ...]:
    """Compute the cross-entropy of heads on a frozen model, where they share nothing, for `target` (K, B * S).

    Each head is scored by itself, including its backward pass, so memory does not grow with their number. A head only
    computes rows with something to guess, and no padding.
    """
    ignored, counted = -100, [slice(None)] * len(heads)
    if not torch.compiler.is_compiling():  # a data-dependent number of rows would break the graph
        ignored, counted = EVERY_ROW, counted_rows(target, len(weight))

    def score(k: int, x: torch.Tensor, projection: torch.Tensor | None) -> HeadsLoss:
        projections = weight if projection is None else [projection[: len(weight)]]
        rows = x.to(hidden.dtype).unsqueeze(0)
        labels = target[k, counted[k]].unsqueeze(0)
        scores = linear_heads_cross_entropy(
            rows, projections, labels, row_weight=row_weight[k : k + 1], ignore_index=ignored, **options
        )
        return scores._replace(loss=_with_backward_done(scores.loss, list(heads[k].parameters())))

    flat = hidden.flatten(0, 1)
    alone = [head(flat[counted[k]], partial(score, k)) for k, head in enumerate(heads)]
    loss, *sums = zip(*alone, strict=True)
    return torch.stack(loss).sum(), *(torch.cat(s) for s in sums)


def _with_backward_done(loss: torch.Tensor, parameters: list[nn.Parameter]) -> torch.Tensor:
    """Run the backward pass of `loss` now, and return a loss that only keeps the gradients of `parameters`."""
    if not loss.requires_grad or torch.compiler.is_compiling():
        return loss
    parameters = [p for p in parameters if p.requires_grad]
    return with_gradients(loss.detach(), parameters, torch.autograd.grad(loss, parameters))
