"""Shows the first rows as the trainer sees them, with the learned tokens marked: `liger-trainer train --preview`.

The trainer has prepared the rows and its collator makes the masks, so nothing is tokenized here.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from liger_trainer.command.recipe.read import Recipe
from liger_trainer.command.rows.counts import CountedTrainer, count_rows
from liger_trainer.errors import RecipeError

if TYPE_CHECKING:
    from datasets import Dataset

_LEGEND = "What the loss counts stands between « and », and the rest is context."
_LEGEND_OF_SCORES = "The model scores each whole text at its last token, and the loss compares the two scores."


class ShownTrainer(CountedTrainer, Protocol):
    """The trainer attributes that a preview reads. It writes none. ORPO's trainer also has `learns_prompts`."""

    data_collator: Callable[[list], dict[str, torch.Tensor]]
    processing_class: Any  # a tokenizer or a processor of images

    def _remove_unused_columns(self, dataset: Any, description: str) -> Any:
        """Return `dataset` without the columns that the model does not take."""


@contextlib.contextmanager
def in_temporary_folder(recipe: Recipe) -> Iterator[None]:
    """Context manager: `recipe` runs from step 0, in a temporary folder that is deleted afterwards."""
    if not {"completion", "chosen"} & {name for needed in recipe.entry.columns for name in needed}:
        raise RecipeError(f"--preview has nothing to show, since {recipe.entry.trainer} generates its completions.")
    recipe.training.resume_from_checkpoint = None
    with tempfile.TemporaryDirectory() as folder:
        recipe.training.output_dir = folder
        yield


def show_rows(trainer: ShownTrainer, rows_shown: "Dataset", total: int) -> str | None:
    """Return the preview of `rows_shown`, the first of `total` rows. None on all processes but the main one."""
    if not trainer.is_world_process_zero():
        return None
    counts, rows = count_rows(trainer, rows_shown, "train"), trainer.train_dataset
    lines = [f"Preview of {len(rows_shown)} of {total} rows: {counts}.", _LEGEND]
    if getattr(trainer, "learns_prompts", False):
        lines[1] += " The likelihood term of ORPO counts the prompt of chosen as well."
    lines += [f"Columns of the rows: {', '.join(rows_shown.column_names)}.", ""]
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    collated = trainer._remove_unused_columns(rows, "training")  # as its dataloader does
    for i in range(len(rows)):
        for name, ids, learned in _sequences(rows[i], trainer.data_collator([collated[i]])):
            title = f"{'Sequence' if 'seq_lengths' in rows.column_names else 'Row'} {i}{name}: {len(ids)} tokens"
            if learned is None:
                lines[1] = _LEGEND_OF_SCORES
                lines += [title, tokenizer.decode(ids.tolist()), ""]
                continue
            learned[:1] = False  # nothing predicts the first token
            lines += [f"{title}, {int(learned.sum())} of them learned", marked(tokenizer, ids, learned), ""]
    return "\n".join(lines)


def _sequences(row: dict, batch: dict) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Yield the sequences of a batch of one row: a name, token ids, and which of them count in the loss.

    The last is None for a reward model, which learns to score the whole text.
    """
    if "chosen_input_ids" in batch:  # ORPO and CPO
        for name in ("chosen", "rejected"):
            mask = batch[f"{name}_attention_mask"][0].bool()
            yield f", {name}", batch[f"{name}_input_ids"][0][mask], batch[f"{name}_labels"][0][mask] != -100
    elif "completion_mask" in batch:  # DPO has two sequences, KTO one
        names = ["chosen", "rejected"] if "chosen_ids" in row else [f"label {str(bool(row['label'])).lower()}"]
        for k, name in enumerate(names):
            mask = batch["attention_mask"][k].bool()
            yield f", {name}", batch["input_ids"][k][mask], batch["completion_mask"][k][mask].bool()
    elif "labels" not in batch:  # a reward model's
        for k, name in enumerate(("chosen", "rejected")):
            yield f", {name}", batch["input_ids"][k][batch["attention_mask"][k].bool()], None
    else:
        ids = batch["input_ids"][0]
        mask = batch["attention_mask"][0].bool() if "attention_mask" in batch else torch.ones_like(ids).bool()
        yield "", ids[mask], batch["labels"][0][mask] != -100


def marked(tokenizer, ids: torch.Tensor, learned: torch.Tensor) -> str:
    """Return the text of `ids` with special tokens, and « » around the tokens that are `learned`."""
    text, start = "", 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and learned[end] == learned[start]:
            continue
        part = _text(tokenizer, ids, start, end)
        text += f"«{part}»" if learned[start] else part
        start = end
    return text


def _text(tokenizer, ids: torch.Tensor, start: int, end: int) -> str:
    """Return the text of `ids[start:end]` in its context. Decoded alone, it may lose a space."""
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    before, whole = (tokenizer.decode(ids[:stop].tolist(), **options) for stop in (start, end))
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(ids[start:end].tolist(), **options)  # the mask begins in the middle of a character
