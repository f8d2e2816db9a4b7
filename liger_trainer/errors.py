"""The errors that the command shows in one line, and how it writes values in such a line."""

import re
from typing import Any


class RecipeError(ValueError):
    """The user can fix the recipe, or a file that it names. The message says which key and how."""


class RunError(RuntimeError):
    """A run ended for a reason outside the recipe, such as a full disk. The message says what is left of the run."""


class RewardError(RunError):
    """A reward function of the recipe raised, or returned something else than rewards. The message names it."""


def without_tokens(text: str) -> str:
    """Return `text` without Hub tokens, because printed text often ends up in shared logs."""
    return re.sub(r"\bhf_\w{8,}", "hf_***", text)


def refusal(error: Exception, *keys: str, **written: Any) -> str | None:
    """Return a library's complaint about input in one line, or None for an error that may be a bug.

    Libraries raise ValueError, OSError, ImportError and errors of their own for bad input. Any other error, such as a
    TypeError, is about input only if it names a word that the user has written: one of `keys`, or a word of a value in
    `written`. Libraries do not know the names of the fields in `written`, so the line starts with the field.
    """
    from jinja2 import TemplateError
    from safetensors import SafetensorError

    text, word = " ".join(str(error).split()), r"[A-Za-z_]\w+"
    named = set(re.findall(word, text))
    fields = [
        f"{field}: "
        for field, value in written.items()
        if value is not None and named & set(re.findall(word, str(value)))
    ]
    about_input = isinstance(error, (ValueError, OSError, ImportError, TemplateError, SafetensorError))
    return "".join(fields) + text if about_input or fields or named & {*keys} else None


def short(value: Any) -> str:
    """Return the `repr` of a value, cut to 100 characters so that it fits into a line."""
    text = repr(without_nulls(value))
    return text if len(text) <= 100 else f"{text[:97]}..."


def without_nulls(value: Any) -> Any:
    """Return `value` without the empty fields that Arrow adds to a row because other rows have them."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value
