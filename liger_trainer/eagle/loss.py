"""Computes the loss of a drafter: the divergence from the target's distribution over the draft vocabulary.

`LigerEagleTrainer` calls `drafter_loss` inside the call of the LM head, through `DeferredLogits.fused`.
"""

from typing import Any

import torch

from liger_trainer.eagle.drafter import EagleDrafter
from liger_trainer.head.flat_rows import FlatRows
from liger_triton import HeadsLoss, linear_heads_kl

GATHER_BELOW = 0.95  # share of the tokens; above it, gathering costs more than it saves


def tokens_to_draft_from(valid: torch.Tensor) -> torch.Tensor | None:
    """Return the tokens (n,) with a target in at least one step, or None if nearly all tokens have one.

    `valid` is bool (K, T). The tokens of a prompt have no targets, and are half of all tokens in many chats. This
    synchronizes with the device.
    """
    drafted = valid.any(0).nonzero()[:, 0]
    return None if len(drafted) > GATHER_BELOW * valid.shape[1] else drafted


def drafter_loss(
    drafter: EagleDrafter,
    rows: FlatRows,
    states: torch.Tensor,
    embedding: torch.Tensor,
    recompute: bool,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    row_weight: torch.Tensor,
    logit_scale: float,
    softcap: float | None,
    **_: Any,
) -> HeadsLoss:
    """Compute the losses of all K steps, summed over their rows, with only a few rows of logits at a time.

    Row t of the target's hidden states predicts token t + 1. So step k at t learns from row t + k, like head k in
    `linear_heads_kl`.

    Args:
        drafter (`EagleDrafter`): Its parameters get gradients.
        rows (`FlatRows`): The real tokens of the batch.
        states (`torch.Tensor`): (T, 3 H), the hidden states that the drafter reads.
        embedding (`torch.Tensor`): (V, H).
        recompute (`bool`): Recompute each step in the backward pass.
        hidden, weight (`torch.Tensor`): The input (B, S, H) and the weight (V, H) of the LM head.
        target (`torch.Tensor`): (K, T) int64, ids of the target's vocabulary, -100 where there is nothing to guess.
        row_weight (`torch.Tensor`): (K,) fp32, the weight of each step.
        logit_scale, softcap (`float`): How the model scales and caps its logits. Both have to be off.

    Returns:
        `HeadsLoss`: The loss, and for each step its summed divergence, the number of targets that it ranked first, and
        the number of targets.

    Raises:
        ValueError: The model scales or caps its logits. No server does that for a drafter.
    """
    if logit_scale != 1.0 or softcap is not None:
        done = f"scales its logits by {logit_scale}" if softcap is None else f"caps its logits at {softcap}"
        raise ValueError(f"The model {done}, but servers do not do that for a drafter. Use another model.")
    valid = (target != -100) & drafter.t2d[target.clamp(min=0)]
    drafted = tokens_to_draft_from(valid)
    outputs = drafter(states, embedding, rows, len(target), recompute, drafted)
    if drafted is not None:
        outputs = [x.new_zeros(len(states), x.shape[1]).index_copy(0, drafted, x) for x in outputs]
    draft_ids = drafter.t2d.cumsum(0) - 1
    teacher = weight if drafter.config.has_all_tokens else weight[drafter.target_ids]
    return linear_heads_kl(
        [x.to(hidden.dtype) for x in outputs],
        drafter.lm_head.weight,
        rows.of(hidden),
        teacher,
        valid,
        row_weight=row_weight,
        target=draft_ids[target.clamp(min=0)].clamp(min=0),
    )
