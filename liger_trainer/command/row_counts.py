"""What a trainer has made of its rows: how many it uses and drops, fill `max_length`, or have nothing to learn.

TRL prepares the rows, and its datasets are counted here afterwards. Rows of SFT are cut by then, so a row that is just
as long as `max_length` counts as one that was cut.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow.compute as pc

from liger_trainer._logging import logger
from liger_trainer.errors import RecipeError, short

_BATCH = 10_000  # rows
_TOKENISED = (
    "input_ids", "prompt_ids", "completion_ids", "chosen_ids", "rejected_ids", "chosen_input_ids", "rejected_input_ids",
)  # fmt: skip


@dataclass(frozen=True)
class RowCounts:
    """Numbers of rows. `str()` gives the text that the log and the summary show."""

    given: int
    used: int
    max_length: int | None = None
    full: int = 0  # used rows as long as max_length, most of which were cut
    empty: int = 0  # used rows in which no token counts in the loss
    equal: int = 0  # used rows in which chosen and rejected are the same tokens
    blank: int = 0  # given rows whose completion is an empty text, so that only the end token can be learned
    learned: float | None = field(default=None, compare=False)  # of messages: the share of their tokens in the loss

    def __str__(self) -> str:
        dropped = self.given - self.used
        within = "" if self.max_length is None else f" within max_length {self.max_length}"
        parts = (
            (self.full, f"cut to max_length {self.max_length}, or as long"),
            (dropped, f"dropped, with nothing to learn{within}"),
            (self.empty, "with nothing to learn"),
            (self.equal, "with equal chosen and rejected"),
            (self.blank, "with nothing to learn but the end token"),
        )
        said = [f"{self.used} used of {self.given}", *(f"{count} {what}" for count, what in parts if count)]
        return "; ".join(said + ([] if self.learned is None else [f"{self.learned:.0%} of the tokens learned"]))


def account_for_rows(trainer: Any, train_rows: Any, eval_rows: Any) -> RowCounts:
    """Count what the trainer has made of its rows, and log it if there is more to say than how many there are.

    Args:
        trainer (`transformers.Trainer`): A trainer before it trains.
        train_rows (`datasets.Dataset`): The rows that it was given to train on.
        eval_rows (`datasets.Dataset`, *optional*): The rows that it was given to evaluate on.

    Returns:
        `RowCounts`: The counts of the training rows.

    Raises:
        RecipeError: No row has anything to learn, or all rows of KTO have the same label.
    """
    import trl

    counts = _checked_counts(trainer, train_rows, "train")
    if "label" in train_rows.column_names and isinstance(trainer, trl.SFTTrainer) and trainer.is_world_process_zero():
        logger.warning(
            f"The rows have a column label, which {type(trainer).__name__} does not read, so it learns bad answers "
            "as well as good ones. To learn the difference between them, set trainer: kto."
        )
    if {"label", "completion_ids"} <= set(trainer.train_dataset.column_names):
        check_labels(trainer.train_dataset["label"])
    if eval_rows is not None and trainer.eval_dataset is not None:
        _checked_counts(trainer, eval_rows, "eval")
    return counts


def check_labels(labels: Any) -> None:
    """RecipeError if the labels for KTO are all true or all false."""
    found = {bool(label) for label in labels}
    if len(found) == 1:
        (only,) = found
        raise RecipeError(
            f"label is {str(only).lower()} in {_every(len(labels), 'rows')}, and KTO learns from the difference "
            f"between true and false ones. Add rows with label: {str(not only).lower()}."
        )


def check_token_ids(trainer: Any, given_rows: Any, name: str) -> None:
    """RecipeError if the rows have a token id that the model does not have; with it, a training step would fail."""
    size = getattr(trainer.model.get_input_embeddings(), "num_embeddings", None)
    if size is None:
        return
    expected = f"expected token ids of the model, from 0 to {size - 1}"
    for column in ("input_ids", "labels"):
        if column in given_rows.column_names and (found := _first_outside(given_rows, column, size)) is not None:
            index, token = found
            raise RecipeError(
                f"Row {index} of the {name} rows has {token} in {column}; {expected}. Tokenise the rows with the "
                "tokenizer of this model."
            )
    prepared = getattr(trainer, f"{name}_dataset")
    for column in _TOKENISED:
        if column in prepared.column_names and (found := _first_outside(prepared, column, size)) is not None:
            raise RecipeError(
                f"The tokenizer turns a text of the {name} rows into the token {found[1]}; {expected}. Use the "
                "tokenizer that belongs to the model, or give the model more embeddings with resize_token_embeddings."
            )


def _first_outside(rows: Any, column: str, size: int) -> tuple[int, int] | None:
    """The first row with a token id outside [0, size), and that id. In labels, -100 is none."""
    tokens, lengths = _lists(rows, column)
    outside = ((tokens < 0) | (tokens >= size)) & ((tokens != -100) | (column != "labels"))
    if not outside.any():
        return None
    place = int(outside.argmax())
    return int(np.searchsorted(np.cumsum(lengths), place, side="right")), int(tokens[place])


def count_rows(trainer: Any, given_rows: Any, name: str) -> RowCounts:
    """The counts of `trainer.train_dataset` (name `"train"`) or `trainer.eval_dataset` (`"eval"`)."""
    blank = 0
    if getattr(given_rows.features.get("completion"), "dtype", None) == "string":
        # In messages, the chat template adds more to an empty answer than the end token
        texts = given_rows.select_columns(["completion"]).with_format("arrow")[:].column(0)
        blank = pc.sum(pc.equal(texts, "")).as_py() or 0
    return replace(_count_prepared(trainer, given_rows, name), blank=blank)


def _count_prepared(trainer: Any, given_rows: Any, name: str) -> RowCounts:
    rows = getattr(trainer, f"{name}_dataset")
    columns, given, limit = set(rows.column_names), len(given_rows), max_length_of(trainer)
    most = np.inf if limit is None else limit
    if {"prompt_ids", "chosen_ids", "rejected_ids"} <= columns:  # DPO
        prompt = _lists(rows, "prompt_ids")[1]
        answers = {side: _split(*_lists(rows, f"{side}_ids")) for side in ("chosen", "rejected")}
        longest = prompt + [max(map(len, pair)) for pair in zip(*answers.values(), strict=True)]
        equal = 0
        for before, good, bad in zip(prompt, *answers.values(), strict=True):
            if limit is not None and trainer.args.truncation_mode == "keep_start":
                good, bad = good[: limit - before], bad[: limit - before]
            elif limit is not None:
                good, bad = good[-limit:], bad[-limit:]
            equal += np.array_equal(good, bad)
        return RowCounts(given, len(rows), limit, int((longest >= most).sum()), equal=equal)
    if {"prompt_ids", "completion_ids"} <= columns:  # KTO, where TRL makes two rows of each pair
        given *= 2 if "chosen" in given_rows.column_names else 1
        prompt, completion = (_lists(rows, column)[1] for column in ("prompt_ids", "completion_ids"))
        length = np.minimum(prompt + completion, most)
        return RowCounts(
            given, len(rows), limit, int((length == most).sum()), int((length <= np.maximum(prompt, 1)).sum())
        )
    if {"chosen_labels", "rejected_labels"} <= columns:  # ORPO and CPO
        pairs = [_lists(rows, f"{side}_input_ids") for side in ("chosen", "rejected")]
        longest = np.maximum(*(lengths for _, lengths in pairs))
        equal = sum(np.array_equal(*pair) for pair in zip(*(_split(*pair) for pair in pairs), strict=True))
        return RowCounts(given, len(rows), limit, int((longest >= most).sum()), equal=equal)
    if "input_ids" not in columns:
        return RowCounts(given, len(rows))
    tokens, lengths = _lists(rows, "labels" if "labels" in columns else "input_ids")
    used = len(rows)
    if "seq_lengths" in columns:  # packed
        lengths, used = _lists(rows, "seq_lengths")[0], given
    learns, learned = _learns(tokens, lengths), None
    if given and any(isinstance(given_rows[0].get(name), list) for name in ("messages", "completion")):
        learned = float(_counted(tokens, lengths).mean())
    if "seq_lengths" in columns and trainer.args.packing_strategy != "bfd":  # the rest of a row is in another one
        return RowCounts(given, used, limit, empty=0 if learns.any() else used, learned=learned)
    return RowCounts(given, used, limit, int((lengths >= most).sum()), int((~learns).sum()), learned=learned)


def max_length_of(trainer: Any) -> int | None:
    """The `max_length` that the trainer uses; ORPO and CPO have one even if the recipe sets none."""
    return getattr(trainer, "max_length", None) or getattr(trainer.args, "max_length", None)


def _checked_counts(trainer: Any, given_rows: Any, name: str) -> RowCounts:
    rows, of_all = getattr(trainer, f"{name}_dataset"), "rows" if name == "train" else f"{name} rows"
    if "chosen_labels" in rows.column_names:
        # ORPO and CPO keep a row whose prompt alone fills max_length, and divide by 0 tokens
        answers = [_learns(*_lists(rows, f"{side}_labels"), first=0) for side in ("chosen", "rejected")]
        if count := int((~(answers[0] & answers[1])).sum()):
            raise RecipeError(
                f"max_length is {max_length_of(trainer)}, and the prompt alone fills it in {count} of {len(rows)} "
                f"{of_all}, whose loss would be NaN. Set a larger max_length, or remove these rows."
            )
    counts = count_rows(trainer, given_rows, name)
    within = "" if counts.max_length is None else f" within max_length {counts.max_length}"
    if counts.empty == counts.used:  # both are 0 where all rows were dropped
        raise RecipeError(
            f"Nothing can be learned from {_every(counts.given, of_all)}: no token after the first one counts in the "
            f"loss{within}. The first row is {short(given_rows[0])}. Set a larger max_length, fill in the text to "
            "learn, or check masks and labels."
        )
    if counts.blank == counts.given:
        raise RecipeError(
            f"completion is empty in {_every(counts.given, of_all)}: there is nothing to learn but the end "
            "token. Fill in the text to learn (output, in Alpaca rows)."
        )
    if counts.equal == counts.used:
        raise RecipeError(
            f"chosen and rejected are equal in {_every(counts.used, of_all)}{within}, so nothing is preferred. Choose "
            "pairs that differ, or set a larger max_length."
        )
    if counts != RowCounts(counts.given, counts.given, counts.max_length) and trainer.is_world_process_zero():
        logger.warning(f"{name} rows: {counts}")
    return counts


def _every(count: int, of_all: str) -> str:
    return f"the only {of_all.removesuffix('s')}" if count == 1 else f"all {count} {of_all}"


def _learns(labels: np.ndarray, lengths: np.ndarray, first: int = 1) -> np.ndarray:
    """For each sequence, whether a token counts in the loss."""
    starts = np.cumsum(lengths) - lengths
    total = np.concatenate([[0], np.cumsum(_counted(labels, lengths, first))])
    return total[starts + lengths] > total[starts]


def _counted(labels: np.ndarray, lengths: np.ndarray, first: int = 1) -> np.ndarray:
    """For each token, whether it counts in the loss. The first one does not: no token before it predicts it."""
    starts = np.cumsum(lengths) - lengths
    return (labels != -100) & (np.arange(len(labels)) - np.repeat(starts, lengths) >= first)


def _lists(rows: Any, column: str) -> tuple[np.ndarray, np.ndarray]:
    """All values in a column of lists, one after another, and each list's length."""
    values, lengths = [np.zeros(0, int)], [np.zeros(0, int)]
    for table in rows.select_columns([column]).with_format("arrow").iter(_BATCH):
        values.append(pc.list_flatten(table.column(0)).to_numpy())
        lengths.append(pc.fill_null(pc.list_value_length(table.column(0)), 0).to_numpy())
    return np.concatenate(values), np.concatenate(lengths)


def _split(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1])
