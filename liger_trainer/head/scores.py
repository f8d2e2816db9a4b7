"""Scores labels for the trainers: with the fused kernels from stand-ins for logits, with PyTorch from real logits."""

from contextlib import nullcontext
from typing import Any, TypeAlias

import torch

from liger_trainer.head.deferred import DeferredLogits, is_deferred, materialize
from liger_trainer.head.module import LoRA
from liger_trainer.head.outputs import TOKEN_OUTPUTS
from liger_triton import linear_logprobs, linear_token_ranks, token_ranks
from liger_triton.linear_head import targets_on_host
from liger_triton.reference import logprobs

Logits: TypeAlias = torch.Tensor | DeferredLogits


def token_scores(
    logits: Logits,
    target: torch.Tensor,
    outputs: tuple[str, ...],
    *,
    temperature: float,
    label_smoothing: float,
    uniform_grad: bool,
    in_fp32: bool,
    on_host: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Compute the fields `outputs` of `FusedLMOutput`, one value per token.

    Args:
        logits (`torch.Tensor` or `DeferredLogits`): (..., V).
        target (`torch.Tensor`): int64 (...): the labels, -100 for positions without one.
        outputs (`tuple[str, ...]`): Names from `TOKEN_OUTPUTS`.
        temperature (`float`): Divides the logits.
        label_smoothing (`float`): Smoothing of the labels.
        uniform_grad (`bool`): Whether the upstream gradients of all labels are promised to be equal.
        in_fp32 (`bool`): Whether a stand-in's head projects in fp32.
        on_host (`torch.Tensor`, *optional*): The labels on the CPU, if known, so that the host need not wait.

    Returns:
        `dict`: The values by name, each (...), fp32. None for names that are not in `outputs`.
    """
    if is_deferred(logits):
        with nullcontext() if on_host is None else targets_on_host(on_host):
            scores = logits.fused(
                linear_logprobs,
                target,
                in_fp32,
                outputs=outputs,
                temperature=temperature,
                label_smoothing=label_smoothing,
                uniform_grad=uniform_grad,
            )
        return dict(zip(TOKEN_OUTPUTS, scores, strict=True))
    # A 16-bit model has 16-bit logits. The kernels compute in fp32, and so does this.
    scaled = materialize(logits).float() / temperature
    return logprobs(scaled, target.to(scaled.device), outputs, label_smoothing)


def predictions(logits: Logits, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute `FusedLMOutput.predictions` from logits and the labels that they predict."""
    if is_deferred(logits):
        ranked = logits.fused(linear_token_ranks, target)
    else:
        ranked = token_ranks(materialize(logits), target.to(logits.device))
    predicted = dict(zip(("token_ids", "log_probs", "ranks"), ranked, strict=True))
    predicted["labels"] = target.to(predicted["token_ids"].device)
    return predicted


@torch.no_grad()
def vocab_mean(logits: Logits, temperature: float) -> torch.Tensor:
    """Return the mean over the vocabulary of each row of logits (B, S, V), divided by `temperature`: (B, S), fp32."""
    if not is_deferred(logits):
        return materialize(logits).float().mean(-1) / temperature
    no_target = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return logits.fused(_mean_of_rows, no_target) / temperature


def _mean_of_rows(
    hidden: torch.Tensor,
    *,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    lora: LoRA | None,
    lora_input: torch.Tensor | None,
    logit_scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Return the mean of each row of logits. Without a softcap it is the product with the mean of the weight's rows."""
    if softcap is not None:
        scores = linear_logprobs(
            hidden,
            weight,
            target,
            bias,
            lora=lora,
            lora_input=lora_input,
            logit_scale=logit_scale,
            softcap=softcap,
            outputs=("mean_logits",),
        )
        return scores.mean_logits
    with torch.autocast(hidden.device.type, enabled=False):
        mean = _times(hidden, weight.mean(0, dtype=torch.float32))
        if bias is not None:
            mean = mean + bias.mean(dtype=torch.float32)
        if lora is not None:
            lora_a, lora_b, scaling = lora
            rows = scaling * (lora_b.mean(0, dtype=torch.float32) @ lora_a.float())
            mean = mean + _times(hidden if lora_input is None else lora_input, rows)
    return logit_scale * mean


def _times(x: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """Multiply x (..., H) with a vector (H,) in fp32: (...)."""
    # In pieces, because an fp32 copy of all hidden states would take twice the memory of 16-bit ones.
    products = [piece.float() @ vector for piece in x.flatten(0, -2).split(4096)]
    return torch.cat(products).view(x.shape[:-1])
