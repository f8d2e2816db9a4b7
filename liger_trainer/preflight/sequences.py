"""Reads the first rows of a trainer as token ids, and which of them count in the loss."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from datasets import Dataset
from torch import nn
from transformers import DataCollatorForLanguageModeling

from liger_trainer.head.module import base_model_of

MOST_ROWS = 2000  # read in about a second, even if rows are long

# Columns of prepared rows: tokens with labels, and prompts with answers
_LABELLED = (("input_ids", "labels"), ("chosen_input_ids", "chosen_labels"))
_PROMPTED = (("prompt_ids", "chosen_ids"), ("prompt_ids", "completion_ids"))


class Sequence(NamedTuple):
    """A row, or one of several in a packed row.

    Attributes:
        ids (`list[int]`): Its tokens.
        learned (`list[bool]`): Whether each token counts in the loss. The first one never does.
    """

    ids: list[int]
    learned: list[bool]

    @property
    def has_prompt(self) -> bool:
        """Return whether the first learned token comes after tokens that are not learned."""
        return any(self.learned) and self.learned.index(True) > 1

    @property
    def last_learned(self) -> int | None:
        """The position of the last learned token, or None."""
        return None if not any(self.learned) else len(self.ids) - 1 - self.learned[::-1].index(True)


class TrainerWithRows(Protocol):
    """The trainer attributes that its rows are read from."""

    model: nn.Module
    train_dataset: Any
    data_collator: Callable[..., Any]


def read_sequences(trainer: TrainerWithRows, most: int = MOST_ROWS) -> list[Sequence]:
    """Return the sequences in the first rows that `trainer` will train on.

    Only a `datasets.Dataset` without a user's transform, or a list, is read, because its rows can be read twice. The
    result is empty for other datasets, for trainers that generate their rows, such as GRPO, and for models with labels
    that are not the next tokens of `input_ids`.
    """
    if not _predicts_next_tokens(base_model_of(trainer.model)):
        return []
    sequences: list[Sequence] = []
    for row in _first_rows(trainer.train_dataset, most):
        sequences.extend(_sequences_of(row, trainer.data_collator))
    return sequences


def _predicts_next_tokens(model: Any) -> bool:
    """Return whether the labels of `model` are the next tokens of its input.

    An encoder-decoder model's labels are another text, of another length. A classifier's labels are not tokens.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    can_generate = getattr(model, "can_generate", None)  # a user's module may not have this method
    return can_generate is None or bool(can_generate())


def _first_rows(dataset: Any, most: int) -> Iterator[Mapping[str, Any]]:
    known = {name for names in (*_LABELLED, *_PROMPTED) for name in names} | {"seq_lengths", "label"}
    if isinstance(dataset, Dataset):
        if dataset.format["type"] == "custom":
            return
        columns = [name for name in dataset.column_names if name in known]
        rows = dataset.with_format(None).select(range(min(most, len(dataset)))).select_columns(columns)
        yield from rows if columns else ()
    elif isinstance(dataset, list):
        yield from (row for row in itertools.islice(dataset, most) if isinstance(row, Mapping))


def _sequences_of(row: Mapping[str, Any], collator: Any) -> list[Sequence]:
    if _is_language_modeling(collator) and _is_tokens(row.get("input_ids")):
        return [_as_collated(row["input_ids"], collator)]
    for tokens, labels in _LABELLED:
        if _is_tokens(row.get(tokens)) and _is_tokens(row.get(labels)):
            if len(row[tokens]) != len(row[labels]):  # a user's collator makes labels of them
                return []
            learned = [label != -100 for label in row[labels]]
            return _split(list(row[tokens]), learned, row.get("seq_lengths"))
    for prompt, answer in _PROMPTED:
        if _is_tokens(row.get(prompt)) and _is_tokens(row.get(answer)) and row.get("label", True):
            learned = [False] * len(row[prompt]) + [True] * len(row[answer])
            return _split([*row[prompt], *row[answer]], learned, None)
    return []


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], int)


def _is_language_modeling(collator: Any) -> bool:
    """Return whether transformers' collator makes the labels: it copies the tokens and masks padding."""
    return type(collator) is DataCollatorForLanguageModeling and not collator.mlm


def _as_collated(ids: list[int], collator: Any) -> Sequence:
    padding = collator.tokenizer.pad_token_id
    return Sequence(ids, [number > 0 and token != padding for number, token in enumerate(ids)])


def _split(ids: list[int], learned: list[bool], lengths: list[int] | None) -> list[Sequence]:
    sequences = []
    start = 0
    for length in lengths or [len(ids)]:
        part = slice(start, start + length)
        sequences.append(Sequence(ids[part], [False, *learned[part][1:]]))
        start += length
    return sequences
