"""Saves the form of a run's prompts with the model, so that later commands ask the model in the same form."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.command.processes import print_status

if TYPE_CHECKING:
    from datasets import Dataset

NAME = "prompt_form.json"
# The forms, and their descriptions in the summary and in the model card
IN_WORDS = {
    "chat": "messages, through the chat template",
    "alpaca": "prompt_template: alpaca, without a chat template",
    "text": "texts as they are, without a chat template",
    "tokens": "token ids as they are",
}


def prompt_form(prompt_template: str, rows: "Dataset") -> str:
    """Return the form of `rows`, a key of `IN_WORDS`. `prompt_template` has been applied to them."""
    first = rows[0]
    if any(isinstance(first.get(name), list) for name in ("messages", "prompt", "completion", "chosen")):
        return "chat"
    if prompt_template == "alpaca":
        return "alpaca"
    return "tokens" if "input_ids" in first else "text"


def warn_unused_template(reader: Any, form: str, rows: "Dataset") -> None:
    """Print that text prompts bypass the chat template of `reader` (a tokenizer or processor), if it has one."""
    if form == "text" and "prompt" in rows.column_names and getattr(reader, "chat_template", None):
        answers = "completion"
        if "chosen" in rows.column_names:
            answers = "chosen and rejected"
        print_status(
            "the prompts are texts, so the model learns them without its chat template, and `liger-trainer chat` will "
            f"not use it either. To train a chat, write prompt and {answers} as messages of role and content."
        )


def write_prompt_form(folder: str | Path, form: str, system_prompt: str | None = None) -> None:
    """Write the form, and the system prompt of all rows, into the folder of a model or a checkpoint."""
    saved = {"prompt_form": form} | ({} if system_prompt is None else {"system_prompt": system_prompt})
    Path(folder, NAME).write_text(json.dumps(saved) + "\n", encoding="utf-8")


def read_prompt_form(folder: str | Path) -> str | None:
    """Return the form that was saved in `folder`; None without one, as for a Hub model."""
    form = _read(folder).get("prompt_form")
    return form if form in IN_WORDS else None


def read_system_prompt(folder: str | Path) -> str | None:
    """Return the system prompt of all rows that was saved in `folder`, or None."""
    prompt = _read(folder).get("system_prompt")
    return prompt if isinstance(prompt, str) else None


def _read(folder: str | Path) -> dict[str, Any]:
    try:
        saved = json.loads(Path(folder, NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return saved if isinstance(saved, dict) else {}
