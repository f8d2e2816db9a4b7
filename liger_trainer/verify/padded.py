"""Batches with more padding than their collator gave them."""

from typing import Any

import torch
import torch.nn.functional as F


def padding_around(batch: dict[str, Any], pad: int) -> dict[str, Any]:
    """`batch` with seven more columns on the left and three on the right, none of which counts.

    Nor does the first token of a row, which nothing but padding would predict.
    """
    found = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.ndim == 2:
            is_labels = name.endswith("labels")
            fill = -100 if is_labels else pad if name.endswith("input_ids") else 0
            value = F.pad(value, (7, 3), value=fill)
            if is_labels:
                value[:, 7] = -100
        found[name] = value
    return found


def more_padding(batch: dict[str, Any], pad: int) -> dict[str, Any]:
    """`batch` with seven more columns, none of which counts."""
    found = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.ndim == 2:
            fill = -100 if name.endswith("labels") else pad if name.endswith("input_ids") else 0
            value = F.pad(value, (0, 7), value=fill)
        found[name] = value
    return found
