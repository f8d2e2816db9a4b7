"""Packs rows with images, which TRL does not: a group has as many rows as fit into `max_length` tokens.

The processor decides how many tokens an image takes, so each row goes through the collate function once before
training. The rows of a group are the rows of one batch, each with its own positions and images. The model skips their
padding, so a group costs about `max_length` tokens.
"""

import bisect
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.utils.data import DataLoader, Dataset

from liger_trainer.head.module import base_model_of
from liger_trainer.patching.core.report import LigerReport
from liger_trainer.varlen.decide import bound_backbone


class PackedArguments(Protocol):
    """The trainer arguments that packing rows with images reads."""

    max_length: int | None
    packing_strategy: str
    dataloader_num_workers: int


class PackingTrainer(Protocol):
    """The trainer attributes that packing rows with images reads. It writes `train_dataset` and `data_collator`."""

    args: PackedArguments
    model: nn.Module
    liger_report: LigerReport | None
    train_dataset: Any
    data_collator: Callable[[list], Any]


class PackedRows(Dataset):
    """A dataset of groups of rows. Each group has as many rows as fit.

    Args:
        rows (`datasets.Dataset`): The rows.
        lengths (`list[int]`): Number of tokens of each row, including image tokens.
        room (`int`): Number of tokens of a group.
    """

    def __init__(self, rows: Any, lengths: list[int], room: int):
        self.rows, self.groups = rows, best_fit(lengths, room)
        self.column_names = rows.column_names

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> list[dict[str, Any]]:
        return [self.rows[row] for row in self.groups[index]]


def best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Group the indices of `lengths` by best-fit decreasing, so that each group sums to at most `room`."""
    left: list[tuple[int, int]] = []  # (free room, group), in rising order
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        at = bisect.bisect_left(left, (lengths[row], -1))
        if at == len(left):
            groups.append([])
            free, group = max(room, lengths[row]), len(groups) - 1
        else:
            free, group = left.pop(at)
        groups[group].append(row)
        bisect.insort(left, (free - lengths[row], group))
    return sorted(map(sorted, groups))


def without_limit(collate: Any) -> Any:
    """Return TRL's collate function for images without its `max_length`; any other function unchanged."""
    limited = is_dataclass(collate) and not isinstance(collate, type) and hasattr(collate, "max_length")
    return replace(collate, max_length=None) if limited else collate  # type: ignore[type-var]


def pack_images(trainer: PackingTrainer) -> None:
    """Group the training rows of `trainer`, an SFT trainer on rows with images.

    Raises:
        ValueError: `max_length` is None or a row is longer, `packing_strategy` splits rows, rows are streamed, or the
            model computes padding.
    """
    args = trainer.args
    rows = trainer.train_dataset
    collate = trainer.data_collator
    if args.max_length is None:
        raise ValueError(
            "packing is True, but max_length is None. Set it to the number of tokens of a group of packed rows."
        )
    if args.packing_strategy == "wrapped":
        raise ValueError(
            "packing_strategy is 'wrapped', which splits rows, but rows with images can only be packed whole. Set it "
            "to 'bfd'."
        )
    if not hasattr(rows, "__len__"):
        raise ValueError(
            "packing is True, but the rows have images and are streamed. Load them, or set packing to False."
        )
    bound = bound_backbone(base_model_of(trainer.model))
    if bound is None or bound.proven.sees_both_ways:
        report = trainer.liger_report["varlen_attention"] if trainer.liger_report else None
        why = "use_liger or varlen_attention is switched off"
        if bound is not None:
            why = "tokens of an image see each other"
        elif report is not None and report.enabled:
            reasons = {*report.unsuited.values(), *report.skipped.values()}
            why = "; ".join(sorted(reasons)) or "it has no text decoder"
        raise ValueError(
            f"packing is True for rows with images, but {type(base_model_of(trainer.model)).__name__} computes "
            f"padding: {why}. Set packing to False."
        )
    one_by_one = DataLoader(
        rows,
        1,
        collate_fn=partial(_length, without_limit(collate)),
        num_workers=args.dataloader_num_workers,  # type: ignore[arg-type]
    )
    lengths = list(one_by_one)
    longer = sum(length > args.max_length for length in lengths)
    if longer:
        raise ValueError(
            f"max_length is {args.max_length}, but {longer} of {len(lengths)} rows have more tokens with their images, "
            f"so they would be cut. Set max_length to {max(lengths)}, or leave these rows out."
        )
    trainer.train_dataset = PackedRows(rows, lengths, args.max_length)
    trainer.data_collator = partial(_collate, collate)


def _length(collate: Callable[[list], Any], rows: list) -> int:
    return int(collate(rows)["attention_mask"].sum())


def _collate(collate: Callable[[list], Any], rows: list) -> Any:
    """Collate groups of rows in training, and single rows in evaluation."""
    return collate([row for group in rows for row in group] if isinstance(rows[0], list) else rows)
