"""The rows of a recipe: from a file, a folder or the Hub, to what TRL's trainers take."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from liger_trainer.paths import find_beside
from liger_trainer.recipe import RecipeArguments, RecipeError

_FILE_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}

# The template of the Alpaca data (github.com/tatsu-lab/stanford_alpaca). The response starts on its own line, so that
# no token spans the end of the prompt.
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


def alpaca_row(row: dict, index: int = 0) -> dict[str, str]:
    """An Alpaca row as `{"prompt", "completion"}`; TRL adds the end-of-text token. `input` may be empty or missing.

    Raises:
        RecipeError: `instruction` or `output` is not a string, or `instruction` is empty.
    """
    for key in ("instruction", "output"):
        if not isinstance(row[key], str) or (key == "instruction" and not row[key].strip()):
            raise RecipeError(
                f"Row {index} of the dataset has {key} {row[key]!r}; expected text. Mend or remove the row."
            )
    template = _ALPACA_WITH_INPUT if row.get("input") else _ALPACA_WITHOUT_INPUT
    # Not str.format on the row's text: braces in it are text, and format leaves inserted values alone.
    prompt = template.format(instruction=row["instruction"], input=row.get("input") or "")
    return {"prompt": prompt, "completion": row["output"]}


_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def sharegpt_row(row: dict, index: int = 0) -> dict[str, list[dict[str, str]]]:
    """A ShareGPT row as messages of `role` and `content`.

    Args:
        row (`dict`): `conversations`, a list of turns `{"from", "value"}`; optionally `chosen` and `rejected`, one turn
            each, which answer them; optionally `system`, text that goes before the first turn.
        index (`int`): The row's number, for error messages.

    Returns:
        `dict`: `prompt`, `chosen` and `rejected`, or `messages` for a row without a preference.

    Raises:
        RecipeError: A turn is not of that form, is empty or out of place, or only one answer is there.
    """
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise RecipeError(f"Row {index} of the dataset has conversations {turns!r}; expected a list of turns.")
    messages = [sharegpt_message(turn, f"conversations[{i}]", index) for i, turn in enumerate(turns)]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    last, answers = messages[-1]["role"], {name: row.get(name) for name in ("chosen", "rejected")}
    if not any(answers.values()):
        if last != "assistant":
            raise RecipeError(
                f"Row {index} of the dataset ends with a turn of {last!r}, and there is nothing to learn from it. End "
                "it with a turn from 'gpt', or add chosen and rejected."
            )
        return {"messages": messages}
    if last != "user":
        raise RecipeError(
            f"Row {index} of the dataset has chosen and rejected answers to a turn of {last!r}; expected the last of "
            "the conversations to be from 'human'."
        )
    answers = {name: [sharegpt_message(turn, name, index)] for name, turn in answers.items()}
    for name, (message,) in answers.items():
        if message["role"] != "assistant":
            raise RecipeError(f"Row {index} of the dataset has {name} from {row[name]['from']!r}; expected 'gpt'.")
    return {"prompt": messages, **answers}


def sharegpt_message(turn, where: str, index: int) -> dict[str, str]:
    """A ShareGPT turn `{"from", "value"}` as `{"role", "content"}`; `where` and `index` are for the RecipeError."""
    if not isinstance(turn, dict) or turn.get("from") not in _ROLES or not isinstance(turn.get("value"), str):
        raise RecipeError(
            f"Row {index} of the dataset has {where} {turn!r}; expected from, one of {', '.join(_ROLES)}, and value, a "
            "text. Mend or remove the row."
        )
    if not turn["value"].strip():
        raise RecipeError(f"Row {index} of the dataset has an empty text in {where}. Mend or remove the row.")
    return {"role": _ROLES[turn["from"]], "content": turn["value"]}


def last_turn_row(row: dict, index: int = 0) -> dict[str, list[dict[str, str]]]:
    """A row of `messages` as `prompt`, all turns but the last, and `completion`, the last, which is the assistant's.

    Raises:
        RecipeError: `messages` is no list of two or more turns of `role` and `content`, or the assistant's is not last.
    """
    messages = row["messages"]
    well_formed = isinstance(messages, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("content"), str) and turn.get("role") for turn in messages
    )
    if not well_formed or len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise RecipeError(
            f"Row {index} of the dataset has messages {messages!r}; expected two or more turns of role and content, "
            "the last one of the assistant. Mend or remove the row."
        )
    return {"prompt": messages[:-1], "completion": messages[-1:]}


class _Template(NamedTuple):
    """A `prompt_template`: `convert(row, index)` turns columns, of which `optional` may be missing, into others.

    `replaced` are the columns that go; None: all of them.
    """

    convert: Callable[[dict, int], dict]
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    replaced: tuple[str, ...] | None = None


_TEMPLATES = {
    "alpaca": _Template(alpaca_row, ("instruction", "output"), ("input",)),
    "sharegpt": _Template(
        sharegpt_row, ("conversations",), ("chosen", "rejected", "system"),
        ("conversations", "chosen", "rejected", "system"),
    ),
    "last_turn": _Template(last_turn_row, ("messages",), ("label",), ("messages",)),
}  # fmt: skip


def load_rows(args: RecipeArguments, folder: Path, columns: tuple[tuple[str, ...], ...], seed: int):
    """The training rows and the evaluation rows (or None) of a recipe.

    Args:
        args (`RecipeArguments`): The recipe's own keys.
        folder (`Path`): The recipe's folder, where a relative `dataset_name` is looked up too.
        columns: Sets of columns; rows must have all of at least one set, once the template is applied.
        seed (`int`): Draws the rows held out by `eval_fraction`.

    Returns:
        `tuple[Dataset, Dataset | None]`.

    Raises:
        RecipeError: The data is missing, unreadable or empty, a split or column is missing, or a row is not text.
    """
    source = _source(args, folder)
    train = _prepare(_load(args, source, args.dataset_train_split), args, columns)
    if args.max_rows is not None:
        train = train.select(range(min(args.max_rows, len(train))))
    if args.dataset_eval_split is not None:
        return train, _prepare(_load(args, source, args.dataset_eval_split), args, columns)
    if args.eval_fraction is None:
        return train, None
    held_out = max(1, round(args.eval_fraction * len(train)))
    if held_out == len(train):
        raise RecipeError(
            f"eval_fraction is {args.eval_fraction}, which leaves none of the {len(train)} rows to train on."
        )
    parts = train.train_test_split(test_size=held_out, seed=seed)
    return parts["train"], parts["test"]


def _source(args: RecipeArguments, folder: Path) -> str:
    name = args.dataset_name
    if not name:
        raise RecipeError(
            "dataset_name is missing; set it to a .json, .jsonl, .parquet or .csv file, or to a Hub dataset."
        )
    if (path := find_beside(name, folder)) is not None:
        return str(path)
    if Path(name).suffix in _FILE_BUILDERS or name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise RecipeError(
            f"dataset_name is {name!r}, and there is no such file, neither from the working directory nor in {folder}."
        )
    return name


def _load(args: RecipeArguments, source: str, split: str):
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        if os.path.isfile(source):
            builder = _FILE_BUILDERS.get(Path(source).suffix)
            if builder is None:
                raise RecipeError(
                    f"dataset_name is {source!r}; a file is read by its ending, one of {', '.join(_FILE_BUILDERS)}."
                )
            rows = load_dataset(builder, data_files=source, split=split)
        else:
            rows = load_dataset(source, args.dataset_config, split=split)
    except RecipeError:
        raise
    except (OSError, ValueError, DatasetGenerationError) as error:
        # datasets puts what is wrong with a file into the cause, and only "an error occurred" into the message.
        reason = error.__cause__ or error
        raise RecipeError(f"dataset_name {source!r}, split {split!r}, cannot be loaded: {reason}") from error
    if len(rows) == 0:
        raise RecipeError(f"dataset_name {source!r}, split {split!r}, has no rows.")
    return rows


def _prepare(rows, args: RecipeArguments, columns: tuple[tuple[str, ...], ...]):
    """Apply the template, and check that the trainer can use the columns."""
    name, listed = args.prompt_template, ", ".join(rows.column_names)
    if name != "none":
        template = _TEMPLATES[name]
        if missing := [column for column in template.needed if column not in rows.column_names]:
            raise RecipeError(
                f"dataset_name {args.dataset_name!r} has the columns {listed}; prompt_template: {name} needs "
                f"{' and '.join(template.needed)} ({', '.join(template.optional)} optional), and "
                f"{' and '.join(missing)} is missing."
            )
        replaced = [column for column in rows.column_names if column in (template.replaced or rows.column_names)]
        rows = rows.map(
            template.convert, with_indices=True, remove_columns=replaced, desc=f"Applying the template {name}"
        )
    have = set(rows.column_names)
    if not any(set(needed) <= have for needed in columns):
        needs = "; ".join(" and ".join(needed) for needed in columns)
        hints = [
            f" Its rows look like those of {other!r}: set prompt_template: {other}."
            for other, template in _TEMPLATES.items()
            if name == "none" and set(template.needed) <= have
        ]
        made = "" if name == "none" else f", of which prompt_template: {name} makes {', '.join(rows.column_names)}"
        raise RecipeError(
            f"dataset_name {args.dataset_name!r} has the columns {listed}{made}; the trainer needs one of: {needs}."
            f"{''.join(hints)}"
        )
    return rows
