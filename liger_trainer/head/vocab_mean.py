"""The mean of the logits of each row, which TRL logs, without the logits."""

import torch

from liger_trainer.head.deferred import DeferredLogits
from liger_triton import linear_logprobs


@torch.no_grad()
def vocab_mean(logits, temperature: float) -> torch.Tensor:
    """Mean over the vocabulary of each row of (deferred) logits (B, S, V), divided by `temperature`: (B, S), fp32."""
    if not isinstance(logits, DeferredLogits) or logits.is_materialized:
        return (logits.materialize() if isinstance(logits, DeferredLogits) else logits).float().mean(-1) / temperature
    rows = logits.hidden.shape[:-1]
    return logits.fused(_mean_of_rows, torch.zeros(rows, dtype=torch.long, device=logits.hidden.device)) / temperature


def _mean_of_rows(hidden, weight, target, bias=None, *, lora=None, lora_input=None, logit_scale=1.0, softcap=None):
    """Mean over the vocabulary of each row of logits. Without a softcap the head is linear: x . mean(W), no product."""
    if softcap is not None:
        options = {"lora": lora, "lora_input": lora_input, "logit_scale": logit_scale, "softcap": softcap}
        return linear_logprobs(hidden, weight, target, bias, outputs=("mean_logits",), **options).mean_logits
    with torch.autocast(hidden.device.type, enabled=False):

        def times(x, vector):  # in pieces: an fp32 copy of all hidden states would be as large as they are, or twice
            return torch.cat([piece.float() @ vector for piece in x.flatten(0, -2).split(4096)]).view(x.shape[:-1])

        mean = times(hidden, weight.mean(0, dtype=torch.float32))
        if bias is not None:
            mean = mean + bias.mean(dtype=torch.float32)
        if lora is not None:
            lora_a, lora_b, scaling = lora
            inputs = hidden if lora_input is None else lora_input
            mean = mean + times(inputs, scaling * (lora_b.mean(0, dtype=torch.float32) @ lora_a.float()))
        return logit_scale * mean
