"""Counts the rows that a trainer uses, drops and cuts, and the rows without anything to learn.

TRL has prepared the rows before they are counted here. SFT's rows are already cut, so a row exactly as long as
`max_length` counts as cut.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow.compute as pc
from torch import nn

from liger_trainer._logging import logger
from liger_trainer.errors import RecipeError, short
from liger_trainer.trainers.packed_images import PackedRows

if TYPE_CHECKING:
    from datasets import Dataset

_BATCH = 10_000  # rows
_TOKEN_COLUMNS = (
    "input_ids",
    "labels",
    "prompt_ids",
    "completion_ids",
    "chosen_ids",
    "rejected_ids",
    "chosen_input_ids",
    "rejected_input_ids",
)


class CountedTrainer(Protocol):
    """The trainer attributes that counting rows reads. It writes none.

    `args` is of the trainer's own class, which need not have `max_length` or `packing_strategy`.
    """

    args: Any
    model: nn.Module
    train_dataset: Any  # TRL's, with the columns of the trainer's kind, or `PackedRows`
    eval_dataset: Any

    def is_world_process_zero(self) -> bool:
        """Return whether this is the main process of the run."""


@dataclass(frozen=True)
class RowCounts:
    """Numbers of rows. `str()` gives the text that the log and the summary show."""

    total: int
    used: int
    max_length: int | None = None
    full: int = 0  # used rows as long as max_length; most of them were cut
    empty: int = 0  # used rows without a token that counts in the loss
    # For messages: the share of tokens that count in the loss.
    learned: float | None = field(default=None, compare=False)

    def __str__(self) -> str:
        dropped = self.total - self.used
        within = "" if self.max_length is None else f" within max_length {self.max_length}"
        parts = (
            (self.full, f"cut to max_length {self.max_length}, or as long"),
            (dropped, f"dropped, with nothing to learn{within}"),
            (self.empty, "with nothing to learn"),
        )
        parts_text = [f"{self.used} used of {self.total}", *(f"{count} {what}" for count, what in parts if count)]
        return "; ".join(parts_text + ([] if self.learned is None else [f"{self.learned:.0%} of the tokens learned"]))


def report_row_counts(trainer: CountedTrainer, train_rows: "Dataset", eval_rows: "Dataset | None") -> RowCounts:
    """Count the training rows, and log the counts if some are cut or dropped. RecipeError if nothing can be learned."""
    import trl

    counts = _checked_counts(trainer, train_rows, "train")
    if "label" in train_rows.column_names and isinstance(trainer, trl.SFTTrainer) and trainer.is_world_process_zero():
        logger.warning(
            f"The rows have a column label, which {type(trainer).__name__} does not read: it learns bad answers and "
            "good ones alike. To learn the difference, set trainer: kto."
        )
    if {"label", "completion_ids"} <= set(trainer.train_dataset.column_names):
        if len({bool(label) for label in trainer.train_dataset["label"]}) == 1:
            raise RecipeError("label is the same in all rows. KTO needs rows with true and rows with false.")
    if eval_rows is not None and trainer.eval_dataset is not None:
        _checked_counts(trainer, eval_rows, "eval")
    return counts


def check_token_ids(trainer: CountedTrainer, name: str) -> None:
    """RecipeError if the rows have a token id outside the model's vocabulary, which would fail in a training step."""
    size = getattr(trainer.model.get_input_embeddings(), "num_embeddings", None)
    rows = getattr(trainer, f"{name}_dataset")
    if size is None:
        return
    for column in (column for column in _TOKEN_COLUMNS if column in rows.column_names):
        tokens = _lists(rows, column)[0]
        outside = tokens[((tokens < 0) | (tokens >= size)) & ((tokens != -100) | (column != "labels"))]
        if len(outside):
            raise RecipeError(
                f"{column} of the {name} rows has the token {outside[0]}, but the model has only {size} tokens."
            )


def count_rows(trainer: CountedTrainer, loaded_rows: "Dataset", name: str) -> RowCounts:
    """Count the rows of `trainer.train_dataset` (name `"train"`) or `trainer.eval_dataset` (`"eval"`)."""
    rows = getattr(trainer, f"{name}_dataset")
    if isinstance(rows, PackedRows):
        return RowCounts(len(loaded_rows), len(loaded_rows), max_length_of(trainer))
    columns = set(rows.column_names)
    total = len(loaded_rows)
    limit = max_length_of(trainer)
    most = np.inf if limit is None else limit
    if {"prompt_ids", "chosen_ids", "rejected_ids"} <= columns:  # DPO
        prompt, chosen, rejected = (_lists(rows, f"{part}_ids")[1] for part in ("prompt", "chosen", "rejected"))
        return RowCounts(total, len(rows), limit, int((prompt + np.maximum(chosen, rejected) >= most).sum()))
    if {"prompt_ids", "completion_ids"} <= columns:  # KTO, where TRL makes two rows of each pair
        total *= 2 if "chosen" in loaded_rows.column_names else 1
        prompt, completion = (_lists(rows, column)[1] for column in ("prompt_ids", "completion_ids"))
        length = np.minimum(prompt + completion, most)
        return RowCounts(
            total, len(rows), limit, int((length == most).sum()), int((length <= np.maximum(prompt, 1)).sum())
        )
    if {"chosen_labels", "rejected_labels"} <= columns:  # ORPO and CPO
        longest = np.maximum(*(_lists(rows, f"{side}_input_ids")[1] for side in ("chosen", "rejected")))
        return RowCounts(total, len(rows), limit, int((longest >= most).sum()))
    if "input_ids" not in columns:
        return RowCounts(total, len(rows))
    tokens, lengths = _lists(rows, "labels" if "labels" in columns else "input_ids")
    used = len(rows)
    if "seq_lengths" in columns:  # packed
        lengths, used = _lists(rows, "seq_lengths")[0], total
    learns, learned = _has_loss(tokens, lengths), None
    if len(tokens) and any(isinstance(loaded_rows[0].get(name), list) for name in ("messages", "completion")):
        learned = float(_counts_in_loss(tokens, lengths).mean())
    if "seq_lengths" in columns and trainer.args.packing_strategy != "bfd":  # rows are split, so none counts as cut
        return RowCounts(total, used, limit, empty=0 if learns.any() else used, learned=learned)
    return RowCounts(total, used, limit, int((lengths >= most).sum()), int((~learns).sum()), learned=learned)


def max_length_of(trainer: CountedTrainer) -> int | None:
    """Return the `max_length` that the trainer uses. ORPO and CPO have one even if the recipe sets none."""
    return getattr(trainer, "max_length", None) or getattr(trainer.args, "max_length", None)


def _checked_counts(trainer: CountedTrainer, loaded_rows: "Dataset", name: str) -> RowCounts:
    rows = getattr(trainer, f"{name}_dataset")
    if "chosen_labels" in rows.column_names:
        # ORPO and CPO keep a row if its prompt alone fills max_length, and then divide by 0 tokens
        answers = [_has_loss(*_lists(rows, f"{side}_labels"), first=0) for side in ("chosen", "rejected")]
        empty_rows = (~(answers[0] & answers[1])).nonzero()[0]
        if len(empty_rows):
            raise RecipeError(
                f"The prompt alone fills max_length {max_length_of(trainer)} in {len(empty_rows)} {name} rows, so the "
                "loss would be NaN. Raise max_length, or leave these rows out; the first is row "
                f"{int(empty_rows[0]) + 1}."
            )
    counts = count_rows(trainer, loaded_rows, name)
    if counts.empty == counts.used:  # both are 0 where all rows were dropped
        within = "" if counts.max_length is None else f" within max_length {counts.max_length}"
        raise RecipeError(
            f"Nothing can be learned from the {counts.total} {name} rows: no token after the first counts in the "
            f"loss{within}. Raise max_length, or look at the rows with --preview. The first row is "
            f"{short(loaded_rows[0])}."
        )
    if counts != RowCounts(counts.total, counts.total, counts.max_length) and trainer.is_world_process_zero():
        logger.warning(f"{name} rows: {counts}")
    return counts


def _has_loss(labels: np.ndarray, lengths: np.ndarray, first: int = 1) -> np.ndarray:
    """Return, for each sequence, whether any token counts in the loss."""
    starts = np.cumsum(lengths) - lengths
    total = np.concatenate([[0], np.cumsum(_counts_in_loss(labels, lengths, first))])
    return total[starts + lengths] > total[starts]


def _counts_in_loss(labels: np.ndarray, lengths: np.ndarray, first: int = 1) -> np.ndarray:
    """Return, for each token, whether it counts in the loss. The first one does not: nothing predicts it."""
    starts = np.cumsum(lengths) - lengths
    return (labels != -100) & (np.arange(len(labels)) - np.repeat(starts, lengths) >= first)


def _lists(rows: "Dataset", column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return all values of a column of lists, concatenated, and the length of each list."""
    values, lengths = [np.zeros(0, int)], [np.zeros(0, int)]
    for table in rows.select_columns([column]).with_format("arrow").iter(_BATCH):
        values.append(pc.list_flatten(table.column(0)).to_numpy())
        lengths.append(pc.fill_null(pc.list_value_length(table.column(0)), 0).to_numpy())
    return np.concatenate(values), np.concatenate(lengths)
