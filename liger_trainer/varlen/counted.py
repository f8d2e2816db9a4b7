"""What a plan needs to know of a batch, counted on the host before the batch is copied to the device.

A plan that counts on the device waits until the device has done everything that was launched before, the optimizer's
step for example, and the device then waits for the host. So the dataloaders of our trainers hand out a `CountedBatch`
in place of a plain `dict` (`counting`). When accelerate moves it to the device, it counts, and it comes out as a plain
`dict` again. What was counted is an attribute of the device's `attention_mask` or `position_ids`, where `plan.py` looks
for it. Wherever a plan finds none, or finds that the tensors are no longer those that were counted, it counts on the
device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device

_ATTRIBUTE = "_liger_counted"


class Counts(NamedTuple):
    """Of the rows of a batch, by the device's tensors where it says so.

    Attributes:
        offsets (`torch.Tensor`): int32 (rows + 1,), on the device: where each row begins among the real tokens.
        tokens, longest (`int`): Real tokens of all rows, and of the longest.
        where (`torch.Tensor`, *optional*): int64 (tokens,), on the device: where in the flattened batch each real token
            is. None for a packed row.
        reaches_end (`bool`): Whether there is a real token in the last column.
        apart (`bool`): Whether a row has padding between its tokens.
        missed (`bool`): Whether a label is predicted from padding.
    """

    offsets: torch.Tensor
    tokens: int
    longest: int
    where: torch.Tensor | None = None
    reaches_end: bool = True
    apart: bool = False
    missed: bool = False


class _Note:
    """`Counts` on a tensor of the device, with the versions and the labels that they hold for."""

    def __init__(self, counts: Counts, counted: torch.Tensor, labels: torch.Tensor | None):
        self.counts, self.version, self.labels = counts, counted._version, labels
        self.version_of_labels = None if labels is None else labels._version

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """None in a pickle or a copy, which stores the attributes of a tensor too."""
        return type(None), ()


def counts_of(counted: torch.Tensor, labels: torch.Tensor | None = None) -> Counts | None:
    """What was counted of an `attention_mask` or of `position_ids`; None where that is unknown or no longer true.

    Args:
        labels (`torch.Tensor`, *optional*): (B, S), those of the call. They have to be the ones that were counted with.
    """
    note = getattr(counted, _ATTRIBUTE, None)
    if note is None or note.version != counted._version:
        return None
    if labels is not None and (labels is not note.labels or labels._version != note.version_of_labels):
        return None
    return note.counts


class CountedBatch(dict):
    """A batch on the host. Moved to a device, it is a plain `dict` whose rows have been counted."""

    def to(self, device: Any, non_blocking: bool = False) -> dict[str, Any]:
        moved = {name: _moved(x, device, non_blocking) for name, x in self.items()}
        mask: Any = self.get("attention_mask")
        positions: Any = self.get("position_ids")
        labels: Any = self.get("labels")
        if _is_counted(mask):
            of_labels = labels if _is_counted(labels) and labels.shape == mask.shape else None
            counts = _padded(mask, of_labels, moved["attention_mask"].device)
            _note(moved["attention_mask"], counts, None if of_labels is None else moved["labels"])
        elif mask is None and _is_counted(positions) and positions.shape[0] == 1:
            _note(moved["position_ids"], _packed(positions[0], moved["position_ids"].device), None)
        return moved


def _note(counted: torch.Tensor, counts: Counts, labels: torch.Tensor | None) -> None:
    setattr(counted, _ATTRIBUTE, _Note(counts, counted, labels))


def _is_counted(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.ndim == 2 and x.numel() > 0


def _moved(x: Any, device: Any, non_blocking: bool) -> Any:
    """As accelerate moves it, but without waiting for a copy from pinned memory, which whatever follows waits for."""
    pinned = isinstance(x, torch.Tensor) and x.is_pinned()
    return send_to_device(x, device, non_blocking=non_blocking or pinned)


def _sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _padded(mask: torch.Tensor, labels: torch.Tensor | None, device: torch.device) -> Counts:
    real = mask != 0
    lengths, (batch, width) = real.sum(1), mask.shape
    first, after = real.byte().argmax(1), width - real.flip(1).byte().argmax(1)
    apart = bool(((first + lengths != after) & (lengths > 0)).any())
    missed = labels is not None and bool(((labels[:, 1:] != -100) & ~real[:, :-1]).any())
    offsets = torch.zeros(batch + 1, dtype=torch.int32)
    offsets[1:] = lengths.cumsum(0)
    index = real.flatten().nonzero()[:, 0]
    return Counts(
        _sent(offsets, device), len(index), int(lengths.max()), _sent(index, device), bool(real[:, -1].any()), apart,
        missed,
    )  # fmt: skip


def _packed(positions: torch.Tensor, device: torch.device) -> Counts:
    starts = (positions.diff() != 1).nonzero()[:, 0] + 1
    offsets = torch.cat((starts.new_zeros(1), starts, starts.new_full((1,), len(positions))))
    return Counts(_sent(offsets.int(), device), len(positions), int(offsets.diff().max()))


class _Counting:
    """`collate` of a dataloader, with a plain `dict` made a `CountedBatch`. Workers get it pickled."""

    def __init__(self, collate: Callable[[Any], Any]):
        self.collate = collate

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        return CountedBatch(batch) if type(batch) is dict else batch


def counting(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function for a dataloader in place of `collate`, whose batches are counted on their way to the device."""
    return collate if isinstance(collate, _Counting) else _Counting(collate)
