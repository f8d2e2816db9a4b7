"""Brings the columns of rows to the names and the form that a trainer takes, by `columns` and `prompt_template`."""

import json
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from liger_trainer.command.processes import print_status
from liger_trainer.command.recipe.parser import nearest
from liger_trainer.command.recipe.trainers import TRAINERS
from liger_trainer.command.rows.checks import check_rows
from liger_trainer.command.rows.convert import convert_rows
from liger_trainer.command.rows.question_answer import QUESTION_ANSWER
from liger_trainer.command.rows.repeated_prompts import without_repeated_prompts
from liger_trainer.command.rows.system_prompts import place_system_prompts
from liger_trainer.data.formats import ALPACA_COLUMNS, alpaca_row, has_images, last_turn_row, sharegpt_row
from liger_trainer.errors import RecipeError, short

if TYPE_CHECKING:
    from datasets import Dataset

    from liger_trainer.command.recipe.read import Recipe

# Columns that trainers read in addition to the ones they need
_NAMES_OF_TRAINERS = {
    *QUESTION_ANSWER,
    *(name for entry in TRAINERS.values() for columns in entry.columns for name in columns),
}
# By these TRL decides what kind of row it has. It takes any one of them, and some trainers refuse rows of two kinds.
_KINDS_OF_ROWS = frozenset({"messages", "completion", "chosen", "rejected", "label"})
# SFT's columns of tokens. TRL reads them even where it makes tokens of texts.
_OF_TOKENS = ("input_ids", "labels", "completion_mask", "assistant_masks", "seq_lengths")
ALSO_READ = ("prompt", "image", "images", "tools", "chat_template_kwargs", "ref_chosen_logps", "ref_rejected_logps")


Columns = tuple[tuple[str, ...], ...]  # the sets of columns that a trainer takes; rows need all of one set


class _Template(NamedTuple):
    """A `prompt_template`: `convert(row, index)` returns the new columns of a row that has the columns `needed`.

    `replaced` are the columns to remove; None removes all. In that case `read` are the columns that `convert` reads.
    """

    convert: Callable[[dict, int], dict]
    needed: tuple[str, ...]
    replaced: tuple[str, ...] | None = None
    read: tuple[str, ...] = ()


_TEMPLATES = {
    "alpaca": _Template(alpaca_row, ("instruction", "output"), read=ALPACA_COLUMNS),
    "sharegpt": _Template(sharegpt_row, ("conversations",), ("conversations", "chosen", "rejected", "system")),
    "last_turn": _Template(last_turn_row, ("messages",), ("messages",)),
}


def columns_of(recipe: "Recipe") -> Columns:
    """Return the sets of columns that the recipe's trainer takes, with `dataset_text_field` in place of "text"."""
    text = getattr(recipe.training, "dataset_text_field", "text")
    found = []
    for needed in recipe.entry.columns:
        found.append(tuple(text if name == "text" else name for name in needed))
    return tuple(found)


def text_columns(columns: Columns, mapping: dict[str, str]) -> frozenset[str]:
    """Return the columns of the data that must be read as text if the file has no types, such as CSV."""
    read = {name for needed in columns for name in needed} | {"prompt", "tools", "system", "solution", "image"}
    read |= set(QUESTION_ANSWER)
    for template in _TEMPLATES.values():
        read |= {*template.needed, *template.read, *(template.replaced or ())}
    return frozenset(mapping.get(name, name) for name in read - {"label", "input_ids"})


def rename_columns(rows: "Dataset", mapping: dict[str, str]) -> "Dataset":
    """Return the rows with the columns renamed: the values of `mapping` become its keys."""
    missing = [name for name in mapping.values() if name not in rows.column_names]
    if missing:
        if set(mapping) <= set(rows.column_names) and set(missing) <= _NAMES_OF_TRAINERS:
            turned = ", ".join(f"{new}: {old}" for old, new in mapping.items())
            raise RecipeError(
                f"it has the columns {', '.join(rows.column_names)}, and columns maps them the wrong way round. The "
                f"trainer's name comes first: columns: {{{turned}}}."
            )
        near = nearest(missing[0], rows.column_names)
        raise RecipeError(f"it has the columns {', '.join(rows.column_names)}, and columns names {missing[0]!r}.{near}")
    replaced = [name for name in mapping if name in rows.column_names and name not in mapping.values()]
    return rows.remove_columns(replaced).rename_columns({old: new for new, old in mapping.items()}) if mapping else rows


def prepare_rows(
    rows: "Dataset", name: str, columns: Columns, mapped: set[str], system_prompt: str | None = None
) -> "Dataset":
    """Apply the template `name` to the rows, and remove columns that compete with those in `mapped`."""
    listed = ", ".join(rows.column_names)
    if name != "none":
        template = _TEMPLATES[name]
        if name == "sharegpt" and "conversations" not in rows.column_names and "messages" in rows.column_names:
            rows = rows.rename_column("messages", "conversations")
        if not set(template.needed) <= set(rows.column_names):
            needs = " and ".join(template.needed)
            missing = [column for column in template.needed if column not in rows.column_names]
            example = ", ".join(f"{column}: its name here" for column in missing)
            raise RecipeError(
                f"it has the columns {listed}; prompt_template: {name} needs {needs}. If the data has other names for "
                f"them, map them: columns: {{{example}}}."
            )
        if template.replaced is None:
            _report_unread_columns(rows, name, template)
        replaced = template.replaced or rows.column_names
        rows = convert_rows(rows, template.convert, replaced, f"Applying the template {name}")
    rows = _tokens_or_texts(rows, columns, mapped, has_template=name != "none")
    have = set(rows.column_names)
    fitting = [needed for needed in columns if set(needed) <= have]
    needed = next((needed for needed in fitting if mapped & set(needed)), fitting[0] if fitting else None)
    if needed is None:
        raise _no_columns(rows, listed, name, columns, mapped)
    if mapped & set(needed):
        competing = have & {column for other in columns for column in other} - {*needed, *mapped, "prompt"}
        rows = rows.remove_columns(sorted(competing))
    elif "completion" in needed and "input_ids" not in have:
        # Otherwise TRL would append the eos token to the text, which it does not train on, instead of the completion
        rows = rows.remove_columns([each[0] for each in fitting if len(each) == 1 and each[0] not in needed])
    rows = _without_other_kinds(_without_other_prompt(rows, needed), needed)
    if getattr(rows.features.get("tools"), "dtype", None) == "string":  # TRL parses it as JSON, and fails on ""
        rows = rows.map(_with_tools, with_indices=True, desc="Reading the tools")
    rows = place_system_prompts(without_repeated_prompts(rows, needed), needed, system_prompt)
    check_rows(rows, needed)
    return rows


def _no_columns(rows: "Dataset", listed: str, name: str, columns: Columns, mapped: set[str]) -> RecipeError:
    """Return the error for rows with none of the sets of `columns`. `listed` names those before the template `name`."""
    have = set(rows.column_names)
    needs = "; ".join(" and ".join(needed) for needed in columns)
    pairs_only = columns == (("chosen", "rejected"),)  # then last_turn would not help
    hints = "".join(
        f" Its rows look like {other}'s: set prompt_template: {other}."
        for other, template in _TEMPLATES.items()
        if name == "none" and set(template.needed) <= have and not (pairs_only and other == "last_turn")
    )
    if not hints and "messages" in have and pairs_only:
        hints = (
            " Such a trainer compares two answers: write them into chosen and rejected. To learn the answers of "
            "messages, set trainer: sft."
        )
    read = {*ALSO_READ, *(column for each in columns for column in each)}
    unknown = sorted(mapped - read)
    if name == "none" and unknown:
        near = nearest(unknown[0], sorted({*read, *QUESTION_ANSWER}))
        order = ", which the trainer does not read. Its name comes first: columns: {question: ..., answer: ...}."
        hints = f" columns sets {unknown[0]!r}{f'.{near}' if near else order}"
    elif name == "none" and not hints and not mapped:
        hints = (
            " If the data has other names for them, map them: columns: {question: ..., answer: ...} makes turns of "
            "a chat, columns: {prompt: ..., completion: ...} takes the texts as they are."
        )
    after_template = "" if name == "none" else f" (after prompt_template: {name}, {', '.join(rows.column_names)})"
    return RecipeError(f"it has the columns {listed}{after_template}; the trainer needs one of: {needs}.{hints}")


def _tokens_or_texts(rows: "Dataset", columns: Columns, mapped: set[str], has_template: bool) -> "Dataset":
    """Return rows with either tokens or texts, if the trainer takes both.

    TRL reads `input_ids` and ignores the text. Tokens are left out if the recipe has a template for the text, or maps
    its column.
    """
    if ("input_ids",) not in columns:
        return rows
    have = set(rows.column_names)
    texts = have & {name for needed in columns for name in needed} - {"input_ids"}
    tokens = [name for name in _OF_TOKENS if name in have]
    if not texts or not tokens:
        return rows
    if has_template or mapped & texts or "input_ids" not in have:
        listed = " and ".join(tokens)
        made_of = " and ".join(sorted(texts))
        print_status(f"{listed} {_is(tokens)} not read, because the rows are tokenized from {made_of}.")
        return rows.remove_columns(tokens)
    if "completion_mask" in have or has_images(rows):  # TRL also looks for a completion; it tokenizes images itself
        return rows
    listed = " and ".join(sorted(texts))
    mapping = ", ".join(f"{name}: {name}" for name in sorted(texts))
    print_status(
        f"input_ids is trained as it is, so {listed} {_is(texts)} not read. To train on {listed}, set columns: "
        f"{{{mapping}}}."
    )
    return rows.remove_columns(sorted(texts))


def _is(names: Collection[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _report_unread_columns(rows: "Dataset", name: str, template: _Template) -> None:
    """Print which columns a template does not read. RecipeError if one of them holds pictures."""
    unread = [column for column in rows.column_names if column not in template.read]
    if has_images(rows):
        pictures = " and ".join(sorted({"image", "images"}.intersection(unread)))
        raise RecipeError(
            f"it has pictures in {pictures}, which prompt_template: {name} does not read. Write the rows as "
            "messages of role and content, and unset prompt_template."
        )
    if unread:
        print_status(f"prompt_template: {name} does not read the columns {', '.join(unread)}, which are left out.")


def _with_tools(row: dict[str, Any], index: int) -> dict[str, str]:
    tools = (row["tools"] or "").strip() or "[]"
    try:
        json.loads(tools)
    except ValueError as error:
        raise RecipeError(
            f"Row {index} of the dataset has tools {short(tools)}, which is not JSON: {error}. Correct or remove it."
        ) from error
    return {"tools": tools}


def _without_other_prompt(rows: "Dataset", needed: tuple[str, ...]) -> "Dataset":
    """Return the rows without a column prompt that is there for another purpose, because TRL would use it.

    If the rows also have `messages` or `text`, TRL would require a completion. If `chosen` and `rejected` are whole
    conversations, a text in the column prompt repeats their beginning.
    """
    if "prompt" not in rows.column_names or "prompt" in needed:
        return rows
    if "chosen" not in needed:
        return rows.remove_columns("prompt")
    is_text = getattr(rows.features["prompt"], "dtype", None) in ("string", "large_string", "null")  # null: all empty
    first = rows[0]["chosen"]
    if not is_text or not isinstance(first, list) or len(first) <= 1:
        return rows
    pairs = rows.select_columns(["prompt", "chosen"])
    others = [index for index, row in enumerate(pairs) if not _has_turn(row["chosen"], row["prompt"])]
    if others:
        print_status(
            f"prompt is left out, because chosen and rejected begin with the user's turn. In {len(others)} of "
            f"{len(rows)} rows, first in row {others[0]}, it is another text. If the model should read it, write it "
            "into a turn of chosen and rejected."
        )
    return rows.remove_columns("prompt")


def _has_turn(messages: Any, text: str | None) -> bool:
    """Return whether `text` is empty or the content of one of the `messages`. `check_rows` refuses broken ones."""
    wanted = (text or "").strip()
    for turn in messages or ():
        content = (turn or {}).get("content")
        if isinstance(content, list):
            content = "".join(part.get("text") or "" for part in content if part)
        if isinstance(content, str) and content.strip() == wanted:
            return True
    return not wanted


def _without_other_kinds(rows: "Dataset", needed: tuple[str, ...]) -> "Dataset":
    """Return rows of pairs without columns of other kinds of rows.

    Other rows keep theirs: reward functions read them, and SFT warns of a column label.
    """
    if "chosen" not in needed:
        return rows
    return rows.remove_columns(sorted(_KINDS_OF_ROWS.intersection(rows.column_names) - set(needed)))
