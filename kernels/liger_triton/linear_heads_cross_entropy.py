"""Cross-entropy of K heads over one vocabulary (Medusa, multi-token prediction), without the logits of all rows.

`_linear_head.py` describes how it is computed, in what precision and memory, and `_row_pass.py` has the formulas.
"""

from collections.abc import Sequence

import torch

from . import reference
from ._dispatch import takes_twin
from ._head_inputs import (
    check_heads,
    check_options,
    check_per_row,
    check_target_of_twin,
    compute_dtype,
    prepare,
    spread,
)
from ._linear_head import run_head
from ._row_pass import IS_TOP1, LOSS, N_STATS, RowSpec
from .known_gradients import with_gradients
from .results import HeadsLoss


def _head(x, weight, target, share, rows, accumulate, chunk_rows, may_keep_logits=False):
    """(loss (), statistics) of the rows of x with one weight. `may_keep_logits` promises that no other head waits for
    its backward pass meanwhile."""
    prepared = prepare(x, weight, target, None, None, None, accumulate, chunk_rows)
    loss, _, stats = run_head(*prepared, share, rows, True, accumulate, chunk_rows, may_keep_logits)
    return loss.sum(), stats


def _head_and_gradients(x, weight, *options):
    """`_head`, with its backward pass done at once, which frees its logits or the fp32 sum of the weight's gradient."""
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in (x, weight)]
    loss, stats = _head(*leaves, *options, may_keep_logits=True)
    grads = torch.autograd.grad(loss, [t for t in leaves if t.requires_grad])
    return with_gradients(loss.detach(), [t for t in (x, weight) if t.requires_grad], grads), stats


def linear_heads_cross_entropy(
    hidden: torch.Tensor | Sequence[torch.Tensor],  # (K, T, H), or K of (T, H)
    weight: torch.Tensor | Sequence[torch.Tensor],  # (V, H), or K of (V, H)
    target: torch.Tensor,  # (K, T)
    *,
    row_weight: torch.Tensor | None = None,  # (K,) or (K, T)
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    accumulate: str = "fp32",
    chunk_rows: int | None = None,
) -> HeadsLoss:
    """Sum over heads k and rows t of row_weight[k, t] * F.cross_entropy(z[k, t], target[k, t]), in nats and in fp32,
    with z[k] = softcap * tanh(logit_scale * l / softcap) and l = hidden[k] @ weight[k].T. The logits of one chunk of
    rows are all that ever exists, whatever K.

    The gradients are computed with the loss. Any upstream gradient is honoured. A frozen weight costs neither its
    product nor its memory. Tied heads are one call on K * T rows. Inside torch.autocast everything is cast as F.linear
    would cast it.

    Rounding. The gradient of a tied weight is summed in fp32 over all heads and chunks and rounded once, after the
    multiplication by the upstream gradient. The gradients of untied bf16 weights are summed in fp32 too, but each is
    rounded as soon as its head is done, so that K sums of V * H * 4 bytes never exist together. An upstream gradient
    that is not a power of two then rounds it a second time (two roundings of at most 2**-9 each, where a tensor of bf16
    cannot do with less than one). fp16 weights keep their fp32 sums until the backward pass, since a sum that is not
    yet multiplied by the upstream gradient may overflow. So do bf16 weights under torch.compile.

    Args:
        hidden (`torch.Tensor` or `list`): The rows that meet the weight, of each head: (K, T, H) or K tensors (T, H);
            bf16, fp16 or fp32 (float64: the PyTorch twin, with all logits). A list is copied into one tensor for a tied
            weight; for untied ones nothing is copied.
        weight (`torch.Tensor` or `list`): (V, H), tied, or K tensors (V, H), untied; dtype and device of `hidden` (the
            dtype may differ under autocast).
        target (`torch.Tensor`): Class ids (K, T), integers in [0, V) or `ignore_index`. The caller shifts those of each
            head: head k of Medusa, counted from 1, predicts the token k + 1 places ahead.
        row_weight (`torch.Tensor`, *optional*): fp32, (K,) or (K, T), without gradient; the factor of each row's loss.
            Unset: 1. Nothing is divided by a number of rows.
        ignore_index (`int`, *optional*, defaults to -100): Rows with this target are dropped before the product.
        softcap (`float`, *optional*): Unset: z = logit_scale * l.
        logit_scale (`float`, *optional*, defaults to 1.0): Multiplies the logits.
        accumulate (`str`, *optional*, defaults to `"fp32"`): Where the weight's gradient is summed over the chunks.
            `"lean"` sums it in its own dtype, which for bf16 halves that memory and rounds once per chunk.
        chunk_rows (`int`, *optional*): Rows of logits alive at once. Unset: as in `linear_cross_entropy`.

    Returns:
        `HeadsLoss`. All rows ignored: 0 with zero gradients.

    Raises:
        ValueError: Shapes, dtypes or devices disagree, or an option is out of its range.
        IndexError: A target is outside [0, V). (While a CUDA graph is captured, loss and gradient of the row become NaN
            instead.)
    """
    heads, rows, tied = check_heads(hidden, weight)
    check_per_row("target", target, heads, rows, hidden[0])
    check_options("hidden", hidden[0], target, "sum", 0.0, softcap, logit_scale, 0.0)
    counted = target != ignore_index
    share = spread(row_weight, counted, hidden[0])
    weights = [weight] if tied else weight
    if takes_twin(*hidden, *weights, target, share):
        compute_dtype(hidden[0], *(("weight", w) for w in weights))
        check_target_of_twin(target, ignore_index, weights[0].shape[0], hidden[0])
        return reference.linear_heads_cross_entropy(
            hidden, weight, target.long(), row_weight=share, ignore_index=ignore_index, softcap=softcap,
            logit_scale=logit_scale,
        )  # fmt: skip
    spec = RowSpec(ignore_index, float(logit_scale), float(softcap or 0.0), extras=1 << IS_TOP1)
    if tied:
        x = hidden if isinstance(hidden, torch.Tensor) else torch.stack(tuple(hidden))
        flat = None if share is None else share.view(-1)
        loss, stats = _head(x, weight, target, flat, spec, accumulate, chunk_rows, may_keep_logits=True)
        stats = stats.view(N_STATS, heads, rows)
    else:
        losses, per_head = [], []
        for k in range(heads):
            early = (
                weight[k].requires_grad and weight[k].dtype == torch.bfloat16 and accumulate == "fp32"
                and torch.is_grad_enabled() and not torch.compiler.is_compiling()
            )  # fmt: skip
            run = _head_and_gradients if early else _head
            own = None if share is None else share[k]
            one, stats = run(hidden[k], weight[k], target[k], own, spec, accumulate, chunk_rows)
            losses.append(one)
            per_head.append(stats)
        loss, stats = torch.stack(losses).sum(), torch.stack(per_head, 1)
    return HeadsLoss(loss, stats[LOSS].sum(1), (stats[IS_TOP1] > 0).sum(1), counted.sum(1))
