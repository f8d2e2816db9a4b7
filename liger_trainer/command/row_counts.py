"""What a trainer has made of its rows: how many it uses, cuts and drops, and how many have nothing to learn.

TRL prepares the rows, and they are counted here afterwards. `SFTTrainer` and its subclasses cut rows while they prepare
them, so their preparation runs in two steps, the first one without `max_length`.
"""

import copy
import sys
from dataclasses import dataclass, replace

import numpy as np
import pyarrow.compute as pc

from liger_trainer._logging import logger
from liger_trainer.errors import RecipeError, short

UNCUT = "tokens_before_max_length"  # a column that is added to the prepared rows
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
    cut: int = 0  # used rows that were cut to max_length
    empty: int = 0  # used rows in which no token counts in the loss
    equal: int = 0  # used rows in which chosen and rejected are the same tokens
    blank: int = 0  # given rows whose completion is an empty text, so that only the end token can be learned

    @property
    def dropped(self) -> int:
        return self.given - self.used

    @property
    def remarkable(self) -> bool:
        """Whether the log should mention the counts."""
        return bool(self.dropped or self.cut or self.empty or self.equal or self.blank)

    def __str__(self) -> str:
        parts = [f"{self.used} used of {self.given}"]
        if self.cut:
            parts.append(f"{self.cut} cut to max_length {self.max_length}")
        if self.dropped:
            within = "" if self.max_length is None else f" within max_length {self.max_length}"
            parts.append(f"{self.dropped} dropped, with nothing to learn{within}")
        if self.empty:
            parts.append(f"{self.empty} {'has' if self.empty == 1 else 'have'} nothing to learn")
        if self.equal:
            parts.append(f"{self.equal} {'has' if self.equal == 1 else 'have'} equal chosen and rejected")
        if self.blank:
            parts.append(f"{self.blank} {'has' if self.blank == 1 else 'have'} nothing to learn but the end token")
        return "; ".join(parts)


class KeepsUncutRows:
    """Has TRL's SFT prepare rows in two steps: tokenise and label them, then cut, drop, pack and shuffle them."""

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        uncut = copy.copy(args)
        uncut.max_length, uncut.shuffle_dataset = None, False
        rows = super()._prepare_dataset(dataset, processing_class, uncut, False, formatting_func, dataset_name)
        if not packing:  # packing joins rows, so a column of single rows would be lost
            rows = rows.add_column(UNCUT, _lengths(rows, "input_ids"))
        self.__dict__.setdefault("uncut_rows", {})[dataset_name] = rows
        return super()._prepare_dataset(rows, processing_class, args, packing, None, dataset_name)


def account_for_rows(trainer, train_rows, eval_rows) -> RowCounts:
    """Count what the trainer has made of its rows, and log it if some are cut, are dropped or have nothing to learn.

    Args:
        trainer (`transformers.Trainer`): A trainer before it trains, one of SFT with `KeepsUncutRows`.
        train_rows (`datasets.Dataset`): The rows that it was given to train on.
        eval_rows (`datasets.Dataset`, *optional*): The rows that it was given to evaluate on.

    Returns:
        `RowCounts`: The counts of the training rows.

    Raises:
        RecipeError: No row has anything to learn, or all rows of KTO have the same label.
    """
    counts = _checked_counts(trainer, train_rows, "train")
    if "label" in train_rows.column_names and hasattr(trainer, "uncut_rows") and trainer.is_world_process_zero():
        logger.warning(
            f"The rows have a column label, which {type(trainer).__name__} does not read, so it learns bad answers "
            "as well as good ones. To learn the difference between them, set trainer: kto."
        )
    if "label" in trainer.train_dataset.column_names and "completion_ids" in trainer.train_dataset.column_names:
        check_labels(trainer.train_dataset["label"])
    if eval_rows is not None and trainer.eval_dataset is not None:
        _checked_counts(trainer, eval_rows, "eval")
    return counts


def check_token_ids(trainer, given_rows, name: str) -> None:
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


def _first_outside(rows, column: str, size: int) -> tuple[int, int] | None:
    """The first row with a token id outside [0, size), and that id; None if there is none.

    In labels, -100 is allowed, since it leaves a token out of the loss.
    """
    start = 0
    for ((tokens, lengths),) in _lists(rows, column):
        outside = ((tokens < 0) | (tokens >= size)) & ((tokens != -100) | (column != "labels"))
        if outside.any():
            place = int(outside.argmax())
            return start + int(np.searchsorted(np.cumsum(lengths), place, side="right")), int(tokens[place])
        start += len(lengths)
    return None


def count_rows(trainer, given_rows, name: str) -> RowCounts:
    """The counts of `trainer.train_dataset` (name `"train"`) or `trainer.eval_dataset` (`"eval"`)."""
    return replace(_count_prepared(trainer, given_rows, name), blank=_count_blank(given_rows))


def _count_blank(given_rows) -> int:
    if getattr(given_rows.features.get("completion"), "dtype", None) != "string":
        return 0  # for messages, the chat template adds more to an empty answer than the end token
    batches = given_rows.select_columns(["completion"]).with_format("arrow").iter(_BATCH)
    return sum(pc.sum(pc.equal(table.column(0), "")).as_py() or 0 for table in batches)


def _count_prepared(trainer, given_rows, name: str) -> RowCounts:
    rows = getattr(trainer, f"{name}_dataset")
    columns, given = set(rows.column_names), len(given_rows)
    limit = max_length_of(trainer)
    if {"prompt_ids", "chosen_ids", "rejected_ids"} <= columns:
        cut, equal = _count_pairs(rows, limit, trainer.args.truncation_mode)
        return RowCounts(given, len(rows), limit, cut, equal=equal)
    if {"prompt_ids", "completion_ids"} <= columns:
        if "chosen" in given_rows.column_names:  # TRL makes two rows of each pair
            given *= 2
        prompt, completion = (_lengths(rows, column) for column in ("prompt_ids", "completion_ids"))
        length = prompt + completion
        kept = length if limit is None else np.minimum(length, limit)
        return RowCounts(
            given, len(rows), limit, int((length > kept).sum()), int((kept <= np.maximum(prompt, 1)).sum())
        )
    if {"chosen_labels", "rejected_labels"} <= columns:
        equal = _count_equal(rows, "chosen_input_ids", "rejected_input_ids")
        return RowCounts(given, len(rows), limit, _count_cut_by_row(trainer, rows), equal=equal)
    if "input_ids" not in columns:
        return RowCounts(given, len(rows))
    packing = trainer.args.packing
    if name == "eval" and trainer.args.eval_packing is not None:
        packing = trainer.args.eval_packing
    if packing:
        rows = trainer.uncut_rows[name]
        limit = limit if trainer.args.packing_strategy == "bfd" else None  # bfd_split continues a row in another
        lengths = _lengths(rows, "input_ids")
        cut = 0 if limit is None else int((lengths > limit).sum())
        return RowCounts(given, given, limit, cut, int((~_has_labels(rows, limit)).sum()))
    cut = 0
    if UNCUT in columns:
        cut = int((np.asarray(rows.with_format("numpy")[UNCUT]) > _lengths(rows, "input_ids")).sum())
    return RowCounts(given, len(rows), limit, cut, int((~_has_labels(rows)).sum()))


def max_length_of(trainer) -> int | None:
    """The `max_length` that the trainer uses; ORPO and CPO have one even if the recipe sets none."""
    return getattr(trainer, "max_length", None) or getattr(trainer.args, "max_length", None)


def _checked_counts(trainer, given_rows, name: str) -> RowCounts:
    rows = getattr(trainer, f"{name}_dataset")
    of_all = "rows" if name == "train" else f"{name} rows"
    if "chosen_labels" in rows.column_names:
        _check_prompts_leave_room(trainer, rows, of_all)
    counts = count_rows(trainer, given_rows, name)
    if counts.empty == counts.used:  # both are 0 where all rows were dropped
        uncut = getattr(trainer, "uncut_rows", {}).get(name)
        if counts.max_length is not None and (uncut is None or _has_labels(uncut).any()):
            raise RecipeError(
                f"max_length is {counts.max_length}, which cuts off the part to learn of "
                f"{_every(counts.given, of_all)}. Set a larger max_length."
            )
        raise RecipeError(
            f"Nothing can be learned from the data: none of the {counts.given} {name} rows has a token to learn, "
            "because no token after the first one counts in the loss. The first row is "
            f"{short(given_rows[0])}. Fill in the text to learn, or check masks and labels."
        )
    if counts.blank == counts.given:
        raise RecipeError(
            f"completion is empty in {_every(counts.given, of_all)}: there is nothing to learn but the end "
            "token. Fill in the text to learn (output, in Alpaca rows)."
        )
    if counts.equal == counts.used:
        within = f", once they are cut to max_length {counts.max_length}" if counts.cut else ""
        mend = "Set a larger max_length" if counts.cut else "Choose pairs that differ"
        raise RecipeError(
            f"chosen and rejected are equal in {_every(counts.used, of_all)}{within}, so nothing is preferred. {mend}."
        )
    if counts.remarkable and trainer.is_world_process_zero():
        logger.warning(f"{name} rows: {counts}")
    return counts


def _every(count: int, of_all: str) -> str:
    return f"the only {of_all.removesuffix('s')}" if count == 1 else f"all {count} {of_all}"


def check_labels(labels) -> None:
    """RecipeError if the labels for KTO are all true or all false."""
    found = {bool(label) for label in labels}
    if len(found) == 1:
        (only,) = found
        raise RecipeError(
            f"label is {str(only).lower()} in {_every(len(labels), 'rows')}, and KTO learns from the difference "
            f"between true and false ones. Add rows with label: {str(not only).lower()}."
        )


def _check_prompts_leave_room(trainer, rows, of_all: str) -> None:
    """RecipeError if `max_length` leaves nothing of an answer. ORPO and CPO keep such a row, and divide by 0 tokens."""
    nothing = [~_has_labels(rows, column=f"{answer}_labels", first_counts=True) for answer in ("chosen", "rejected")]
    if count := int((nothing[0] | nothing[1]).sum()):
        raise RecipeError(
            f"max_length is {max_length_of(trainer)}, and the prompt alone fills it in {count} of {len(rows)} "
            f"{of_all}, whose loss would be NaN. Set a larger max_length, or remove these rows."
        )


def _count_pairs(rows, limit: int | None, mode: str) -> tuple[int, int]:
    """The number of DPO's pairs that are cut, and the number in which chosen and rejected are equal afterwards."""
    cut = equal = 0
    for prompt, chosen, rejected in _lists(rows, "prompt_ids", "chosen_ids", "rejected_ids"):
        longest = prompt[1] + np.maximum(chosen[1], rejected[1])
        if limit is not None:
            cut += int((longest > limit).sum())
        for before, good, bad in zip(prompt[1], _split(chosen), _split(rejected), strict=True):
            if limit is not None and mode == "keep_start":
                good, bad = good[: limit - before], bad[: limit - before]
            elif limit is not None:
                good, bad = good[-limit:], bad[-limit:]
            equal += np.array_equal(good, bad)
    return cut, int(equal)


def _count_equal(rows, first: str, second: str) -> int:
    return sum(
        np.array_equal(one, other)
        for both in _lists(rows, first, second)
        for one, other in zip(*map(_split, both), strict=True)
    )


def _count_cut_by_row(trainer, rows) -> int:
    """How many rows of ORPO or CPO are cut, for which rows that fill `max_length` are tokenised again without it."""
    sides = ("chosen_input_ids", "rejected_input_ids")
    longest = np.maximum(*(_lengths(rows, side) for side in sides))
    cut = 0
    for index in np.flatnonzero(longest >= trainer.max_length):
        row = rows[int(index)]
        whole = uncut_pair(trainer, row)
        cut += any(len(whole[side]) > len(row[side]) for side in sides)
    return cut


def uncut_pair(trainer, row: dict) -> dict:
    """A row of ORPO or CPO as the trainer tokenises it without `max_length`."""
    limit, trainer.max_length = trainer.max_length, sys.maxsize
    try:
        return trainer.tokenize_row(row)
    finally:
        trainer.max_length = limit


def _has_labels(rows, limit: int | None = None, column: str | None = None, first_counts: bool = False) -> np.ndarray:
    """For each row, whether a token counts in the loss. The first one does not, unless `first_counts`.

    That is because no token before it predicts it.
    """
    column = column or ("labels" if "labels" in rows.column_names else "input_ids")
    found = [np.zeros(0, bool)]
    for ((values, lengths),) in _lists(rows, column):
        starts = np.cumsum(lengths) - lengths
        place = np.arange(len(values)) - np.repeat(starts, lengths)
        counts = (values != -100) & (place >= (0 if first_counts else 1))
        if limit is not None:
            counts &= place < limit
        total = np.concatenate([[0], np.cumsum(counts)])
        found.append(total[starts + lengths] > total[starts])
    return np.concatenate(found)


def _lengths(rows, column: str) -> np.ndarray:
    return np.concatenate([np.zeros(0, int)] + [lengths for ((_, lengths),) in _lists(rows, column)])


def _lists(rows, *columns: str):
    """Batches of rows. For each column of lists, a batch has all values one after another, and each list's length."""
    for table in rows.select_columns(list(columns)).with_format("arrow").iter(_BATCH):
        batch = []
        for name in columns:
            lists = table.column(name)
            lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
            batch.append((pc.list_flatten(lists).to_numpy(), lengths))
        yield tuple(batch)


def _split(column: tuple[np.ndarray, np.ndarray]) -> list[np.ndarray]:
    """The lists of a column as `_lists` yields it."""
    values, lengths = column
    return np.split(values, np.cumsum(lengths)[:-1])
