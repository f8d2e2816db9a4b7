"""The checks of arguments that the losses of several heads share.

`hidden` is one tensor (K, T, H) or K tensors (T, H). `weight` is one tensor (V, H) that all heads use, which are then
called tied, or K tensors (V, H), and the heads are untied.
"""

import torch

from ._head_checks import check_device, weight_dtypes


def check_heads(hidden, weight) -> tuple[int, int, bool]:
    """(K, T, tied). ValueError unless the shapes fit each other and all heads have one dtype and device."""
    listed = isinstance(hidden, list | tuple)
    if listed:
        if not hidden:
            raise ValueError("hidden is an empty list; expected the output (T, H) of each head, one or more.")
        first = hidden[0]
        for k, t in enumerate(hidden):
            if (t.shape, t.dtype, t.device) != (first.shape, first.dtype, first.device):
                raise ValueError(
                    f"hidden[{k}] is {tuple(t.shape)} {t.dtype} on {t.device}, hidden[0] {tuple(first.shape)} "
                    f"{first.dtype} on {first.device}; expected one shape, dtype and device for all heads."
                )
    else:
        first = hidden[0] if hidden.ndim == 3 and hidden.shape[0] else hidden.new_empty(0)
    if first.ndim != 2:
        shape = tuple(first.shape) if listed else tuple(hidden.shape)
        raise ValueError(
            f"hidden{'[0]' if listed else ''} is {shape}; expected hidden (K, T, H), or a list of K tensors (T, H). "
            "Flatten batch and sequence: x.flatten(-3, -2)."
        )
    heads, (rows, width) = len(hidden), first.shape
    tied = not isinstance(weight, list | tuple)
    if not tied and len(weight) != heads:
        raise ValueError(
            f"weight has {len(weight)} tensors, hidden {heads} heads; expected one weight for each head, or one tensor "
            "(V, H) for all."
        )
    for k, w in enumerate([weight] if tied else weight):
        name = "weight" if tied else f"weight[{k}]"
        if w.ndim != 2 or w.shape[1] != width:
            raise ValueError(f"{name} is {tuple(w.shape)}, a head's rows {tuple(first.shape)}; expected (V, {width}).")
        if not tied and w.shape != weight[0].shape:
            raise ValueError(
                f"{name} is {tuple(w.shape)}, weight[0] {tuple(weight[0].shape)}; the heads share one vocabulary."
            )
    return heads, rows, tied


def check_per_row(name, t, heads, rows, first) -> None:
    """ValueError unless t is (K, T) on the device of the heads."""
    if t.shape != (heads, rows):
        raise ValueError(f"{name} is {tuple(t.shape)}; expected ({heads}, {rows}): a row for each head.")
    check_device(name, t, "hidden", first)


def spread(row_weight, counted, first):
    """`row_weight`, (K,) or (K, T), as (K, T), with zeros for the rows that do not count. None stays None. `first` are
    the hidden states of one head."""
    if row_weight is None:
        return None
    heads, rows = counted.shape
    if row_weight.shape not in ((heads,), (heads, rows)) or row_weight.dtype not in weight_dtypes(first):
        raise ValueError(
            f"row_weight is {tuple(row_weight.shape)} {row_weight.dtype}; expected torch.float32, ({heads},) or "
            f"({heads}, {rows})."
        )
    if row_weight.requires_grad:
        raise ValueError("row_weight requires a gradient, and gets none here; pass row_weight.detach().")
    check_device("row_weight", row_weight, "hidden", counted)
    return torch.where(counted, row_weight if row_weight.ndim == 2 else row_weight.unsqueeze(1), 0.0)
