"""Argmax, log-probability and rank of tokens for evaluation, without the logits of all rows at once.

Plain PyTorch in chunks of rows, for any device: it runs when metrics are computed, outside of training.
"""

import torch

from ._head_inputs import check_chunking, check_options, check_target, check_target_of_twin, compute_dtype
from .reference import head_logits, transformed, wide_dtype
from .results import TokenRanks

_CHUNK_BYTES = 256 * 2**20  # of fp32 logits


@torch.no_grad()
def token_ranks(logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100) -> TokenRanks:
    """Return `TokenRanks` for logits (..., V) of any float dtype and targets (...), integers in [0, V) or
    `ignore_index`.

    Raises:
        IndexError: A target is neither.
    """
    check_target("logits", logits, target)
    check_target_of_twin(target, ignore_index, logits.shape[-1], logits)
    kept = target != ignore_index
    return TokenRanks(*(_scattered(x, kept) for x in _of_rows(logits[kept].to(wide_dtype(logits.dtype)), target[kept])))


@torch.no_grad()
def linear_token_ranks(
    hidden: torch.Tensor,  # (..., H)
    weight: torch.Tensor,  # (V, H)
    target: torch.Tensor,  # (...)
    bias: torch.Tensor | None = None,  # (V,)
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,  # A (r, H), B (V, r), scaling
    lora_input: torch.Tensor | None = None,  # (..., H)
    chunk_rows: int | None = None,
) -> TokenRanks:
    """Return `token_ranks` of the logits that `linear_logprobs` uses, at temperature 1.

    The product is rounded to the dtype of `hidden` as the model's own head rounds it, so the argmax agrees with the
    model's logits. It has no gradients.

    Args:
        hidden, weight, target, bias, softcap, logit_scale, ignore_index, lora, lora_input: As in `linear_logprobs`.
        chunk_rows (`int`, *optional*): Rows of logits alive at once. Unset: as many as fit 256 MiB in fp32.

    Returns:
        `TokenRanks`.

    Raises:
        ValueError: Dtypes or devices disagree, or an option is out of its range.
        IndexError: A target is outside [0, V).
    """
    check_options("hidden", hidden, target, "none", 0.0, softcap, logit_scale, 0.0)
    compute_dtype(hidden, ("weight", weight), ("bias", bias))
    check_chunking("fp32", chunk_rows)
    check_target_of_twin(target, ignore_index, weight.shape[0], hidden)
    kept = target != ignore_index
    x, y = hidden[kept], target[kept]
    source = x if lora_input is None else lora_input[kept]
    step = chunk_rows or max(1, _CHUNK_BYTES // (4 * weight.shape[0]))
    chunks = []
    for start in range(0, max(1, len(x)), step):
        rows = slice(start, start + step)
        logits = head_logits(x[rows], weight, bias, lora, source[rows])
        chunks.append(_of_rows(transformed(logits, softcap, logit_scale), y[rows]))
    return TokenRanks(*(_scattered(torch.cat(results), kept) for results in zip(*chunks, strict=True)))


def _of_rows(logits, target):
    """Return argmax, log-probability and rank for fp32 or float64 logits (N, V) and targets (N,)."""
    own = logits.gather(-1, target.long().unsqueeze(-1))
    log_probs = own.squeeze(-1) - torch.logsumexp(logits, -1)
    return logits.argmax(-1), log_probs, (logits > own).sum(-1)


def _scattered(rows, kept):
    out = rows.new_full(kept.shape, -100)
    out[kept] = rows
    return out
