"""The rows that a benchmark trains on, and the tokens of a batch.

full    Token ids joined and cut, so that every row fills its place in the batch: no padding.
padded  The rows of a file as they are, each cut to `length` and padded on the right to the longest of its batch.
packed  The rows of a file, packed by TRL's `pack_dataset` ("bfd") into rows of at most `length` tokens. A batch is one
        row of tokens with `position_ids` that restart, as TRL's collator makes it under `packing=True` and
        transformers' `DataCollatorWithFlattening` makes it for a Trainer.

All tokens have labels, which is TRL's default for language modelling: prompts are not masked. Pairs for DPO are full or
padded.
"""

import itertools

import numpy as np
import preferences
import torch

KINDS = ("full", "padded", "packed")


def rows_of(path, vocab, length, count):
    """`count` rows of exactly `length` tokens; random ids without a file."""
    if path is None:
        ids = np.random.default_rng(0).integers(0, vocab, count * length)
    elif path.endswith(".npz"):
        ids = np.load(path)["ids"].astype(np.int64)
    else:
        ids = np.concatenate(_column(path))
    ids = np.resize(ids, count * length) % vocab  # too few ids are repeated
    return [_labelled(row) for row in ids.reshape(count, length)]


def collate(rows):
    return {
        "input_ids": torch.tensor([row["input_ids"] for row in rows]),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def real_rows(path, vocab, length):
    """The rows of a file, cut to `length`.

    Args:
        path (`str`): An .npz with the flat array `ids` and `offsets` (rows + 1), or a .json/.jsonl file that `datasets`
            reads, with a column `input_ids`.
    """
    if not path.endswith(".npz"):
        return [_labelled(np.asarray(ids[:length]) % vocab) for ids in _column(path)]
    arrays = np.load(path)
    if "offsets" not in arrays:
        raise ValueError(f"{path} has {', '.join(arrays)}; real rows need `ids` and `offsets` (rows + 1).")
    ids = np.split(arrays["ids"].astype(np.int64) % vocab, arrays["offsets"][1:-1])
    return [_labelled(row[:length]) for row in ids]


def packed_rows(rows, length):
    """`rows` packed to at most `length` tokens, with columns `input_ids`, `labels` and `seq_lengths`.

    They are shuffled, because packing starts with the longest rows.
    """
    from datasets import Dataset
    from trl import pack_dataset

    return list(pack_dataset(Dataset.from_list(rows), length, "bfd").shuffle(seed=0))


def sft_rows(run, vocab, tokenizer):
    """The rows of all steps of `run`, and the collator of a Trainer for them; TRL's trainers have their own."""
    from transformers import DataCollatorForSeq2Seq

    if run.rows == "full":
        return rows_of(run.data, vocab, run.length, run.batch * run.steps * run.processes), collate
    rows = real_rows(run.data, vocab, run.length)
    if run.rows == "packed":
        return taken(run, packed_rows(rows, run.length)), flatten
    return taken(run, rows), DataCollatorForSeq2Seq(tokenizer)


def pairs_of(run, vocab):
    """The pairs of all steps of `run`."""
    if run.rows == "full":
        return preferences.pairs(run.data, vocab, run.length, run.batch * run.steps * run.processes, run.prompt)
    return taken(run, preferences.real_pairs(run.data, vocab, run.length))


def taken(run, rows):
    """Real rows for all steps.

    The timed steps repeat rows that were trained on before, since each new length may compile a kernel or make the
    allocator ask for memory. Too few rows are repeated.
    """
    batch = run.batch * run.processes
    timed = batch * (run.steps - run.skip)
    return [rows[k % timed % len(rows)] for k in range(batch * run.steps)]


def flatten(rows):
    """A batch of packed rows for a Trainer, as `DataCollatorWithFlattening` makes it from the original rows."""
    from transformers import DataCollatorWithFlattening

    parts = []
    for row in rows:
        for start, end in itertools.pairwise(itertools.accumulate(row["seq_lengths"], initial=0)):
            parts.append({name: row[name][start:end] for name in ("input_ids", "labels")})
    return DataCollatorWithFlattening()(parts)


def tokens_of(batch):
    """For a trainer's batch: real tokens, the sum over rows of their squares, and positions with padding.

    This does not wait for the device: the first two may be tensors there.
    """
    if "chosen_attention_mask" in batch:  # of CPO and ORPO, which pad both answers to the longer
        masks = [batch[f"{name}_attention_mask"] for name in ("chosen", "rejected")]
        lengths = torch.cat([mask.sum(1) for mask in masks])
        return lengths.sum(), lengths.square().sum(), len(lengths) * max(mask.shape[1] for mask in masks)
    if "completion_ids" in batch:  # of a trainer that generates; prompts are padded on the left
        lengths = batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)
        positions = batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]
        return lengths.sum(), lengths.square().sum(), len(lengths) * positions
    ids, mask, positions = (batch.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if positions is not None:  # a row of n tokens has positions 0 to n - 1
        return ids.numel(), 2 * positions.sum() + ids.numel(), ids.numel()
    lengths = torch.full((len(ids),), ids.shape[1]) if mask is None else mask.sum(1)
    return lengths.sum(), lengths.square().sum(), ids.numel()


def _column(path):
    from datasets import load_dataset

    return load_dataset("json", data_files=path, split="train")["input_ids"]


def _labelled(ids):
    return {"input_ids": ids.tolist(), "labels": ids.tolist()}
