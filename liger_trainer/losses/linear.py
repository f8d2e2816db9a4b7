"""Any loss of per-token log-probabilities on top of an LM head, without its logits."""

from collections.abc import Callable
from typing import Any

import torch

from liger_triton import linear_logprobs


def linear_loss(
    hidden: torch.Tensor,  # (..., H)
    weight: torch.Tensor,  # (V, H)
    target: torch.Tensor,  # (...)
    loss_fn: Callable[..., Any],
    bias: torch.Tensor | None = None,  # (V,)
    *,
    outputs: tuple[str, ...] = ("log_probs",),
    **options: Any,
) -> Any:
    """Compute `loss_fn(log_probs)` for log_probs = log_softmax(hidden @ weight.T + bias)[target], with exact gradients.

    Only the logits of one chunk of rows exist at any time. With more than one chunk, backward recomputes them: a step
    takes four matmuls of the head's size, or two if `weight` is frozen. If `loss_fn` weighs all tokens alike, as a sum
    or a mean does, `uniform_grad=True` saves one of the four.

    Args:
        hidden (`torch.Tensor`): Input of the head (..., H); bf16, fp16 or fp32.
        weight, bias (`torch.Tensor`): The parameters of the head, (V, H) and (V,).
        target (`torch.Tensor`): The token to score in each row (...), int64, or -100 to skip the row. To score the next
            token, pass `hidden[:, :-1]` and `labels[:, 1:]`.
        loss_fn (`Callable`): Takes one fp32 tensor for each name in `outputs`, in that order. Each has the shape of
            `target` and is zero where the target is -100. Returns the loss, or a tuple that begins with it.
        outputs (`tuple`, *optional*, defaults to `("log_probs",)`): Names of `liger_triton.LogProbs`. `log_probs` and
            `entropy` are differentiable.
        options: Further arguments of `liger_triton.linear_logprobs`, such as `temperature` and `softcap`.

    Returns:
        The result of `loss_fn`, unchanged.

    Raises:
        ValueError: The loss does not depend on the arguments of `loss_fn`, so nothing would be trained. Or
            `linear_logprobs` refuses an argument.
    """
    head_result = linear_logprobs(hidden, weight, target, bias, outputs=outputs, **options)
    scores: list[torch.Tensor] = [getattr(head_result, name) for name in outputs]
    result = loss_fn(*scores)
    loss = result[0] if isinstance(result, tuple) else result
    needs_grad = any(score.requires_grad for score in scores)
    if not isinstance(loss, torch.Tensor) or (needs_grad and not loss.requires_grad):
        raise ValueError(
            f"loss_fn returned {loss!r}: no gradient flows from it to {' and '.join(outputs)}. Return a tensor "
            "computed from its arguments, without .item(), .detach() or torch.no_grad()."
        )
    return result
