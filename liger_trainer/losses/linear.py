"""Any loss of per-token log-probabilities on top of an LM head, without its logits."""

from collections.abc import Callable

import torch

from liger_triton import linear_logprobs


def linear_loss(
    hidden: torch.Tensor,  # (..., H)
    weight: torch.Tensor,  # (V, H)
    target: torch.Tensor,  # (...)
    loss_fn: Callable,
    bias: torch.Tensor | None = None,  # (V,)
    *,
    outputs: tuple[str, ...] = ("log_probs",),
    **options,
):
    """`loss_fn(log_probs)` with log_probs = log_softmax(hidden @ weight.T + bias)[target], and exact gradients.

    The logits of a few rows at a time are all that exists. With any `loss_fn` the backward pass computes them again,
    where they are more than one chunk: four matrix products of the head's size, or two where `weight` is frozen. Where
    `loss_fn` weighs all tokens alike (a sum, a mean), `uniform_grad=True` makes it three.

    Args:
        hidden (`torch.Tensor`): Input of the head (..., H); bf16, fp16 or fp32.
        weight, bias (`torch.Tensor`): The head's, (V, H) and (V,).
        target (`torch.Tensor`): The token to score in each row (...), int64; -100 where none is. For the next token:
            `hidden[:, :-1]` and `labels[:, 1:]`.
        loss_fn (`Callable`): Gets one tensor of the shape of `target` for each name in `outputs`, in that order; fp32,
            zero where the target is -100. Returns the loss, or a tuple that begins with it.
        outputs (`tuple`, *optional*, defaults to `("log_probs",)`): Names of `liger_triton.LogProbs`. `log_probs` and
            `entropy` are differentiable.
        options: Further arguments of `liger_triton.linear_logprobs`: `temperature`, `softcap`, `logit_scale`,
            `label_smoothing`, `ignore_index`, `lora`, `lora_input`, `uniform_grad`, `accumulate`, `chunk_rows`.

    Returns:
        What `loss_fn` returned.

    Raises:
        ValueError: The loss does not depend on what `loss_fn` was given, so that nothing would be trained, or
            `linear_logprobs` refuses an argument.
    """
    scores = linear_logprobs(hidden, weight, target, bias, outputs=outputs, **options)
    scores = [getattr(scores, name) for name in outputs]
    result = loss_fn(*scores)
    loss = result[0] if isinstance(result, tuple) else result
    if not isinstance(loss, torch.Tensor) or (any(s.requires_grad for s in scores) and not loss.requires_grad):
        raise ValueError(
            f"loss_fn returned {loss!r}, through which no gradient reaches {' and '.join(outputs)}. Return a tensor "
            "computed from its arguments, without .item(), .detach() or torch.no_grad()."
        )
    return result
