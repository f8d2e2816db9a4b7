"""The two losses of Medusa heads: cross-entropy with the labels, and divergence from the model's own distribution.

`LigerMedusaTrainer` calls them inside the call of the LM head, through `DeferredLogits.fused`.
"""

from typing import Any

import torch
from torch import nn

from liger_trainer.medusa.heads import MedusaHeads
from liger_triton import HeadsLoss, linear_heads_cross_entropy, linear_heads_kl
from liger_triton.known_gradients import with_gradients


def hard_loss(
    heads: MedusaHeads,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    row_weight: torch.Tensor,
    logit_scale: float,
    softcap: float | None,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    """Cross-entropy with the labels, summed over the rows of every head.

    Args:
        heads (`MedusaHeads`): The K heads of the model.
        hidden, weight (`torch.Tensor`): The input (B, S, H) and the weight (V, H) of the LM head.
        target (`torch.Tensor`): Class ids, int64, -100 where there is nothing to guess: (K, B, S) or, if the model is
            trained too, (K + 1, B, S), of which the first are those of the LM head.
        row_weight (`torch.Tensor`): What a row of each head counts in the loss: fp32, (K,) or (K + 1,).
        logit_scale, softcap (`float`): What the model does to its logits.

    Returns:
        `tuple`: The loss (), which has a gradient, and for each head, in the order of `target`: the sum of its losses
        without `row_weight`, the number of its targets that were its first choice, and the number of its targets.
    """
    tied, joint = heads.config.tied, len(target) > heads.config.num_heads
    options: dict[str, Any] = {"softcap": softcap, "logit_scale": logit_scale}

    def score(blocks: list[torch.Tensor], weights: list[torch.Tensor]) -> HeadsLoss:
        rows = [hidden.flatten(0, 1)] * joint + [x.flatten(0, 1).to(hidden.dtype) for x in blocks]
        own = weight if tied else [weight] * joint + [w[: len(weight)] for w in weights]
        return linear_heads_cross_entropy(rows, own, target.flatten(1), row_weight=row_weight, **options)

    def score_alone(k: int, x: torch.Tensor, projection: torch.Tensor | None) -> HeadsLoss:
        own = weight if projection is None else [projection[: len(weight)]]
        rows, of_head = x.flatten(0, 1).to(hidden.dtype).unsqueeze(0), slice(k, k + 1)
        found = linear_heads_cross_entropy(
            rows, own, target[of_head].flatten(1), row_weight=row_weight[of_head], **options
        )
        return found._replace(loss=_settled(found.loss, list(heads[k].parameters())))

    # On a frozen model the heads have nothing in common. Each is scored alone, with its backward pass, so that memory
    # does not grow with their number. ZeRO-3 does not allow that: parameters are whole only while the backward pass of
    # their own module runs.
    if joint or any(hasattr(p, "ds_id") for p in heads.parameters()):
        return tuple(heads(hidden, score))
    loss, *sums = zip(*heads.one_by_one(hidden, score_alone), strict=True)
    return torch.stack(loss).sum(), *(torch.cat(s) for s in sums)


def soft_loss(
    heads: MedusaHeads,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    row_weight: torch.Tensor,
    logit_scale: float,
    softcap: float | None,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    """Kullback-Leibler divergence from the model's own distribution, at the places that have a label.

    The arguments and the result are those of `hard_loss`. The LM head, if it is trained, has cross-entropy of weight 1.
    """
    options: dict[str, Any] = {"softcap": softcap, "logit_scale": logit_scale}

    def score(blocks: list[torch.Tensor], weights: list[torch.Tensor]) -> HeadsLoss:
        rows = [x.flatten(0, 1).to(hidden.dtype) for x in blocks]
        own = weight if heads.config.tied else [w[: len(weight)] for w in weights]
        labels = target[-len(rows) :].flatten(1)
        return linear_heads_kl(
            rows, own, hidden.detach().flatten(0, 1), weight.detach(), labels != -100,
            row_weight=row_weight[-len(rows) :], target=labels, **options,
        )  # fmt: skip

    soft = tuple(heads(hidden, score))
    if len(target) == heads.config.num_heads:
        return soft
    lm = linear_heads_cross_entropy([hidden.flatten(0, 1)], weight, target[:1].flatten(1), **options)
    return (lm.loss + soft[0], *(torch.cat(both) for both in zip(lm[1:], soft[1:], strict=True)))


def _settled(loss: torch.Tensor, parameters: list[nn.Parameter]) -> torch.Tensor:
    """`loss` after its backward pass, of which only the gradients of `parameters` are kept."""
    if not loss.requires_grad or torch.compiler.is_compiling():
        return loss
    parameters = [p for p in parameters if p.requires_grad]
    return with_gradients(loss.detach(), parameters, torch.autograd.grad(loss, parameters))
