"""`liger-trainer train RECIPE --preview`: the first rows as the trainer sees them, with what it learns marked.

The trainer has prepared the rows and its collator makes the masks, so nothing is tokenised here.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import torch

from liger_trainer.command.recipe import Recipe
from liger_trainer.command.row_counts import count_rows, max_length_of
from liger_trainer.errors import RecipeError

ROW = "row_of_preview"  # a column with the number that a prepared row had among the given ones
_LEGEND = "What the loss counts stands between « and », and the rest is context."


@contextlib.contextmanager
def without_a_trace(recipe: Recipe) -> Iterator[None]:
    """While this is open, `recipe` runs from its beginning, in a temporary folder that is deleted afterwards.

    Raises:
        RecipeError: The trainer has no completions before it trains, so there is nothing to preview.
    """
    if not {"completion", "chosen"} & {name for needed in recipe.entry.columns for name in needed}:
        raise RecipeError(
            f"--preview shows what is learned from each row, but {recipe.entry.trainer} generates its completions "
            "during training. Leave out --preview."
        )
    recipe.training.resume_from_checkpoint = None
    with tempfile.TemporaryDirectory() as folder:
        recipe.training.output_dir = folder
        yield


def first_rows(rows, count: int):
    """The first `count` rows, with their numbers in the column `ROW`."""
    rows = rows.select(range(min(count, len(rows))))
    return rows.add_column(ROW, list(range(len(rows))))


def show_rows(trainer, given, total: int) -> str | None:
    """The text of the preview: what the trainer has made of `given`, the first rows of `total`.

    Returns:
        `str` on the main process, None on the others.
    """
    if not trainer.is_world_process_zero():
        return None
    counts = count_rows(trainer, given, "train")
    columns = ", ".join(name for name in given.column_names if name != ROW)
    lines = [f"Preview of {len(given)} of {total} rows: {counts}.", _LEGEND, f"Columns of the rows: {columns}.", ""]
    if "ORPO" in type(trainer).__name__:
        lines[1] += " The likelihood term of ORPO counts the prompt of chosen as well."
    rows = trainer.train_dataset
    if ROW in rows.column_names:
        shown = sorted(range(len(rows)), key=lambda i: rows[i][ROW])
        titles = [f"Row {rows[i][ROW]}" for i in shown]
        within = "" if counts.max_length is None else f" within max_length {counts.max_length}"
        gone = sorted(set(range(len(given))) - {rows[i][ROW] for i in shown})
        dropped = [f"Row {number}: dropped, with nothing to learn{within}" for number in gone]
    else:
        shown, dropped = list(range(len(rows))), []
        titles = [f"Sequence {i}" for i in shown]
        lines[0] = (
            f"Preview of {len(given)} of {total} rows, {_number(len(given), 'row')} in "
            f"{_number(len(rows), 'sequence')}: {counts}."
        )
    collated = trainer._remove_unused_columns(rows, "training")  # as its dataloader does
    for i, title in zip(shown, titles, strict=True):
        for sequence in _sequences(rows[i], trainer.data_collator([collated[i]])):
            lines.append(_described(trainer, title, sequence))
    return "\n".join([*lines, *dropped])


class _Sequence(NamedTuple):
    """Token ids, which of them the loss counts, and the number of tokens of each text in it."""

    name: str
    ids: torch.Tensor
    learned: torch.Tensor
    lengths: list[int]


def _sequences(row: dict, batch: dict) -> Iterator[_Sequence]:
    """The sequences in a batch that was made of one row."""
    if "chosen_input_ids" in batch:  # ORPO and CPO
        for name in ("chosen", "rejected"):
            ids, mask = batch[f"{name}_input_ids"][0], batch[f"{name}_attention_mask"][0].bool()
            yield _Sequence(name, ids[mask], batch[f"{name}_labels"][0][mask] != -100, [int(mask.sum())])
    elif "completion_mask" in batch:  # DPO has two sequences, KTO one
        names = ["chosen", "rejected"] if "chosen_ids" in row else [f"label {str(bool(row['label'])).lower()}"]
        for k, name in enumerate(names):
            mask = batch["attention_mask"][k].bool()
            ids, learned = batch["input_ids"][k][mask], batch["completion_mask"][k][mask].bool()
            yield _Sequence(name, ids, learned, [len(ids)])
    else:
        ids, learned = batch["input_ids"][0], batch["labels"][0] != -100
        if "attention_mask" in batch:
            mask = batch["attention_mask"][0].bool()
            ids, learned = ids[mask], learned[mask]
        yield _Sequence("", ids, learned, row.get("seq_lengths") or [len(ids)])


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _described(trainer, title: str, sequence: _Sequence) -> str:
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    texts, count, start = [], 0, 0
    for length in sequence.lengths:
        ids, learned = (part[start : start + length] for part in (sequence.ids, sequence.learned))
        learned = learned.clone()
        learned[:1] = False  # the first token is predicted by none
        texts.append(marked(tokenizer, ids, learned))
        count, start = count + int(learned.sum()), start + length
    title = ", ".join(filter(None, (title, sequence.name)))
    head = f"{title}: {len(sequence.ids)} tokens, {count} of them learned"
    if len(texts) > 1:
        head += f"; {len(texts)} rows packed"
    elif len(sequence.ids) == max_length_of(trainer):
        head += f"; cut to max_length {len(sequence.ids)}, or as long"
    return "\n".join([head, *texts, ""])


def marked(tokenizer, ids: torch.Tensor, learned: torch.Tensor) -> str:
    """The text of `ids` with its special tokens, in which what is `learned` stands between « and »."""
    text, start = "", 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and learned[end] == learned[start]:
            continue
        part = _text(tokenizer, ids, start, end)
        text += f"«{part}»" if learned[start] else part
        start = end
    return text


def _text(tokenizer, ids: torch.Tensor, start: int, end: int) -> str:
    """The text of `ids[start:end]` as it reads after the tokens before it. Decoded alone, it may lose a space."""
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    before, whole = (tokenizer.decode(ids[:stop].tolist(), **options) for stop in (start, end))
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(ids[start:end].tolist(), **options)  # the mask begins in the middle of a character
