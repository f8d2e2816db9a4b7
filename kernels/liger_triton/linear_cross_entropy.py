"""Cross-entropy of the logits of an LM head, which never exist as a whole.

`_linear_head.py` describes how it is computed, in what precision and memory, and `_row_pass.py` has the formulas.
"""

import torch

from . import reference
from ._dispatch import takes_twin
from ._head_inputs import check_device, check_options, check_target_of_twin, prepare, weight_dtypes
from ._linear_head import run_head
from ._row_pass import RowSpec


def linear_cross_entropy(
    hidden: torch.Tensor,  # (..., H)
    weight: torch.Tensor,  # (V, H)
    target: torch.Tensor,  # (...)
    bias: torch.Tensor | None = None,  # (V,)
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    token_weights: torch.Tensor | None = None,  # (...)
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,  # A (r, H), B (V, r), scaling
    lora_input: torch.Tensor | None = None,  # (..., H)
    accumulate: str = "fp32",
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """F.cross_entropy(z.float(), target, ...) of z = softcap * tanh(logit_scale * l / softcap), in nats and in fp32,
    with l = F.linear(hidden, weight, bias) + scaling * lora_input @ A.T @ B.T. The logits of all rows never exist.

    For `"mean"` and `"sum"` the gradients are computed with the loss. Any upstream gradient is honoured. A frozen
    weight costs neither its product nor its memory. Inside torch.autocast everything is cast as F.linear would cast it,
    and the gradient of an fp32 weight stays in fp32.

    Args:
        hidden (`torch.Tensor`): (..., H); bf16, fp16 or fp32 (float64: the PyTorch twin, with all logits). A slice
            such as `hidden[:, :-1]` is copied; to avoid that, pass all of it and a target whose last position is
            `ignore_index`.
        weight (`torch.Tensor`): (V, H), dtype and device of `hidden` (the dtype may differ under autocast).
        target (`torch.Tensor`): Class ids (...), integers in [0, V) or `ignore_index`.
        bias (`torch.Tensor`, *optional*): (V,).
        ignore_index (`int`, *optional*, defaults to -100): Rows with this target are dropped before the product.
        reduction (`str`, *optional*, defaults to `"mean"`): `"mean"` over the rows not ignored, `"sum"` or `"none"`.
        label_smoothing (`float`, *optional*, defaults to 0.0): As in F.cross_entropy, in [0, 1].
        softcap (`float`, *optional*): Unset: z = logit_scale * l.
        logit_scale (`float`, *optional*, defaults to 1.0): Multiplies the logits.
        z_loss (`float`, *optional*, defaults to 0.0): Adds z_loss * logsumexp(z)**2 to each row.
        token_weights (`torch.Tensor`, *optional*): fp32, of the shape of `target`, without gradient; the factor of each
            row. `"mean"` then divides by the sum of the weights of the rows that are not ignored, as F.cross_entropy
            does with class weights.
        lora (`tuple`, *optional*): (A, B, scaling) of a LoRA on the head. A and B may have another dtype than `hidden`.
        lora_input (`torch.Tensor`, *optional*): Input of the LoRA, if dropout made it differ from `hidden`.
        accumulate (`str`, *optional*, defaults to `"fp32"`): Where the weight's gradient is summed over the chunks.
            `"lean"` sums it in its own dtype, which for bf16 halves its memory and rounds once per chunk instead of
            once.
        chunk_rows (`int`, *optional*): Rows of logits alive at once. Unset: all rows, if their logits take no more
            memory than the fp32 sum of the weight's gradient, which one chunk does not need. Otherwise at most 4096
            rows, whose logits take no more than that sum, or 640 MiB if that is more. On a CPU: 64 MiB.

    Returns:
        `torch.Tensor`, fp32 (float64 for float64): () or, for `"none"`, the shape of `target`. Nothing to average
        over (all rows ignored, or weights that sum to 0): 0 with zero gradients, where PyTorch's mean is NaN.

    Raises:
        ValueError: Shapes, dtypes or devices disagree, or an option is out of its range.
        IndexError: A target is outside [0, V). (While a CUDA graph is captured, loss and gradient of the row become NaN
            instead.)
    """
    head, y, dtype = prepare(hidden, weight, target, bias, lora, lora_input, accumulate, chunk_rows)
    check_options("hidden", hidden, target, reduction, label_smoothing, softcap, logit_scale, z_loss)
    row_weight = None
    if token_weights is not None:
        allowed = weight_dtypes(hidden)
        if token_weights.shape != target.shape or token_weights.dtype not in allowed or token_weights.requires_grad:
            raise ValueError(
                f"token_weights is {tuple(token_weights.shape)} {token_weights.dtype}, requires_grad="
                f"{token_weights.requires_grad}; expected {tuple(target.shape)} torch.float32 without gradient. "
                "Convert them (.float(), .detach()); to differentiate in them, multiply the rows of reduction='none'."
            )
        check_device("token_weights", token_weights, "hidden", hidden)
    if takes_twin(*head, target, token_weights):
        check_target_of_twin(y, ignore_index, weight.shape[0], hidden)
        return reference.linear_cross_entropy(
            hidden, weight, target.long(), bias, ignore_index=ignore_index, reduction=reduction,
            label_smoothing=label_smoothing, softcap=softcap, logit_scale=logit_scale, z_loss=z_loss,
            token_weights=token_weights, lora=lora, lora_input=lora_input,
        )  # fmt: skip
    if token_weights is not None:
        row_weight = torch.where(y != ignore_index, token_weights.reshape(-1), 0.0)
    divisor = None  # it is launched before the head, which waits for the device
    if reduction == "mean" and row_weight is None:
        divisor = (y != ignore_index).sum().clamp(min=1)
    elif reduction == "mean":
        divisor = row_weight.sum()
        divisor = torch.where(divisor == 0, torch.inf, divisor)
    rows = RowSpec(ignore_index, float(logit_scale), float(softcap or 0.0), float(label_smoothing), float(z_loss))
    loss, _, _ = run_head(head, y, dtype, row_weight, rows, reduction != "none", accumulate, chunk_rows)
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() if divisor is None else loss.sum() / divisor
