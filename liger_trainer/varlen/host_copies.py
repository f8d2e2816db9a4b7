"""Keeps the host's copy of a batch that was moved to the device.

Reading a batch back from the device would wait for all work launched before, such as the optimizer's step, and then
leave the device idle. So the collate function of our trainers' dataloaders returns a `HostBatch` instead of a plain
`dict` (`remembering`). accelerate calls its `to`, which returns a plain `dict` of tensors that remember their values on
the host. `values_of` returns these values if they are known.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import BatchFeature

_ATTRIBUTE = "_liger_host_copy"
_REMEMBERED = (
    "attention_mask",
    "position_ids",
    "labels",
    "shift_labels",
    "input_ids",
    "seq_idx",
    "cu_seq_lens_q",
    "mm_token_type_ids",
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
    "completion_mask",
    "KL_input_ids",  # of KTO
    "KL_attention_mask",
    "KL_completion_mask",
    "chosen_input_ids",  # of ORPO and CPO
    "chosen_attention_mask",
    "chosen_labels",
    "rejected_input_ids",
    "rejected_attention_mask",
    "rejected_labels",
)


class _HostCopy:
    """The host values of a device tensor. They hold while the tensor has this version and `exposed` is empty.

    Copies and pickles of the tensor do not get them.
    """

    def __init__(self, values: torch.Tensor, version: int, exposed: Sequence[bool] = ()):
        self.values = values
        self.version = version
        self.exposed = exposed

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


def values_of(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the host's values of `tensors` if all are known, else `tensors` themselves."""
    known = []
    for x in tensors:
        values = _known(x)
        if values is None:
            return tensors
        known.append(values)
    return tuple(known)


def _known(x: torch.Tensor) -> torch.Tensor | None:
    copy = getattr(x, _ATTRIBUTE, None)
    return None if copy is None or copy.exposed or copy.version != x._version else copy.values


def real_tokens(batch: Any) -> int | None:
    """Count the tokens of a batch without padding, or return None if the host does not know the mask."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return None
    values = values_of(mask)[0]
    return int((values != 0).sum()) if values.device.type == "cpu" else None


def remember(x: torch.Tensor, values: torch.Tensor, exposed: Sequence[bool] = ()) -> None:
    """Let `values_of` return `values` for `x` until `x` is written to. The caller must not change `values` afterwards.

    They also become invalid once `exposed` has an element: code may then write to `x` without changing its version.
    Inference tensors have no version, so their values are not remembered.
    """
    if not x.is_inference():
        setattr(x, _ATTRIBUTE, _HostCopy(values, x._version, exposed))


def sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the host to `device` without waiting."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class HostBatch(dict):
    """A batch on the host. `to` returns a plain `dict` on a device, and `values_of` knows its values.

    `made_of` is the class to return instead of `dict`: image processors return a `BatchFeature`.
    """

    made_of: type = dict

    def to(self, device: Any, non_blocking: bool = False) -> Any:
        # accelerate drops `non_blocking` when it skips batches. Later work on the stream waits for the copy anyway.
        pinned = any(isinstance(x, torch.Tensor) and x.is_pinned() for x in self.values())
        moved = send_to_device(dict(self), device, non_blocking=non_blocking or pinned)
        for name in _REMEMBERED:
            x = self.get(name)
            if isinstance(x, torch.Tensor) and x.device.type == "cpu" and moved[name] is not x:
                # Cloned, because a collate function may write the next batch into the same memory.
                remember(moved[name], x.clone())
        return moved if self.made_of is dict else self.made_of(moved)


class _Remembering:
    """Wraps a collate function to return a `HostBatch` instead of a plain `dict` or `BatchFeature`.

    It has the class and the attributes of the function.
    """

    def __init__(self, collate: Callable[[Any], Any]):
        object.__setattr__(self, "_liger_collate", collate)

    def __call__(self, rows: Any) -> Any:
        batch = self._liger_collate(rows)
        if type(batch) not in (dict, BatchFeature):
            return batch
        found = HostBatch(batch)
        found.made_of = type(batch)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_liger_collate"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._liger_collate, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._liger_collate)

    def __reduce__(self) -> tuple[Callable, tuple[Any]]:
        return _Remembering, (self._liger_collate,)


def remembering(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a dataloader's `collate` so that its batches remember their values on the host."""
    return collate if isinstance(collate, _Remembering) else _Remembering(collate)
