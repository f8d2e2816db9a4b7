"""The targets of speculative heads: labels shifted by k + 1, within one document."""

from typing import Any

import torch


def token_positions(inputs: dict[str, Any]) -> torch.Tensor:
    """Return the position (B, S) of each token in its document, int64.

    It follows from the first of these that the batch has: `position_ids`, `seq_idx`, `cu_seq_lens_q`, `attention_mask`
    (B, S). Without any of them, each row is one document.
    """
    shape, device = inputs["labels"].shape, inputs["labels"].device
    given = inputs.get("position_ids")
    if given is not None:
        return (given[0] if given.ndim == 3 else given).expand(shape)  # multimodal rotary embeddings have (3, B, S)
    places = torch.arange(shape[1], device=device).expand(shape)
    seq_idx, borders, mask = (inputs.get(name) for name in ("seq_idx", "cu_seq_lens_q", "attention_mask"))
    if seq_idx is not None or borders is not None:
        starts = torch.zeros(shape, dtype=torch.bool, device=device)
        if seq_idx is not None:
            starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
        elif borders is not None:
            starts.view(-1)[borders[:-1].long()] = True
        return places - torch.where(starts, places, 0).cummax(1).values
    if mask is not None and mask.ndim == 2:
        return mask.long().cumsum(1) - 1
    return places


def head_targets(inputs: dict[str, Any], num_heads: int) -> torch.Tensor:
    """Return class ids (K + 1, B, S), int64, -100 where there is nothing to guess.

    Index 0 is for the LM head: `labels` (B, S) shifted by one, as in the stock trainers. Index k = 1..K has at t the
    label of token t + k + 1, if its position is k + 1 places further in the same document. The token at t may belong to
    a prompt, where decoding starts, but may not be padding.
    """
    labels, positions = inputs["labels"], token_positions(inputs)
    targets = labels.new_full((num_heads + 1, *labels.shape), -100)
    targets[0, :, :-1] = labels[:, 1:]
    mask = inputs.get("attention_mask")
    real = mask.bool() if mask is not None and mask.ndim == 2 else torch.ones_like(labels, dtype=torch.bool)
    for k in range(1, num_heads + 1):
        ahead = k + 1
        if ahead < labels.shape[1]:
            same = (positions[:, ahead:] == positions[:, :-ahead] + ahead) & real[:, :-ahead]
            targets[k, :, :-ahead] = torch.where(same, labels[:, ahead:], -100)
    return targets
