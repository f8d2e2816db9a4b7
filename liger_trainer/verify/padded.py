"""Adds padding to the batches of a collator."""

from typing import Any

import torch
import torch.nn.functional as F


def padding_around(batch: dict[str, Any], pad: int) -> dict[str, Any]:
    """Return `batch` with seven columns of padding on the left and three on the right.

    The first token of a row gets no label either, because only padding precedes it.
    """
    padded = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.ndim == 2:
            value = F.pad(value, (7, 3), value=_fill_value(name, pad))
            if name.endswith("labels"):
                value[:, 7] = -100
        padded[name] = value
    return padded


def more_padding(batch: dict[str, Any], pad: int) -> dict[str, Any]:
    """Return `batch` with seven columns of padding on the right."""
    padded = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.ndim == 2:
            value = F.pad(value, (0, 7), value=_fill_value(name, pad))
        padded[name] = value
    return padded


def _fill_value(name: str, pad: int) -> int:
    if name.endswith("labels"):
        return -100
    if name.endswith("input_ids"):
        return pad
    return 0  # attention_mask and the like
