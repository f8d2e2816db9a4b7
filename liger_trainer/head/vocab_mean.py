"""The mean of each row of logits, which TRL logs, computed without building the logits."""

import torch

from liger_trainer.head.deferred import DeferredLogits
from liger_trainer.head.module import LoRA
from liger_triton import linear_logprobs


@torch.no_grad()
def vocab_mean(logits: torch.Tensor | DeferredLogits, temperature: float) -> torch.Tensor:
    """The mean over the vocabulary of each row of logits (B, S, V), divided by `temperature`: (B, S), fp32."""
    if not isinstance(logits, DeferredLogits) or logits.is_materialized:
        return (logits.materialize() if isinstance(logits, DeferredLogits) else logits).float().mean(-1) / temperature
    rows = logits.hidden.shape[:-1]
    return logits.fused(_mean_of_rows, torch.zeros(rows, dtype=torch.long, device=logits.hidden.device)) / temperature


def _mean_of_rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    lora: LoRA | None = None,
    lora_input: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """The mean over the vocabulary of each row of logits.

    Without a softcap the head is linear, so the mean is the product of x with the mean of the weight's rows.
    """
    if softcap is not None:
        return linear_logprobs(
            hidden,
            weight,
            target,
            bias,
            logit_scale=logit_scale,
            softcap=softcap,
            lora=lora,
            lora_input=lora_input,
            outputs=("mean_logits",),
        ).mean_logits
    with torch.autocast(hidden.device.type, enabled=False):

        def times(x: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
            # In pieces, because an fp32 copy of all hidden states would be as large as they are, or twice as large.
            return torch.cat([piece.float() @ vector for piece in x.flatten(0, -2).split(4096)]).view(x.shape[:-1])

        mean = times(hidden, weight.mean(0, dtype=torch.float32))
        if bias is not None:
            mean = mean + bias.mean(dtype=torch.float32)
        if lora is not None:
            lora_a, lora_b, scaling = lora
            inputs = hidden if lora_input is None else lora_input
            mean = mean + times(inputs, scaling * (lora_b.mean(0, dtype=torch.float32) @ lora_a.float()))
        return logit_scale * mean
