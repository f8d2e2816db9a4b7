"""Rows of other formats as rows of TRL: Alpaca, ShareGPT, and conversations whose last turn is to be learned."""

from liger_trainer.errors import RecipeError, short

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
        RecipeError: One of the three is not a string, or `instruction` is empty.
    """
    for key in ("instruction", "input", "output"):
        value = row.get(key)
        missing = key == "input" and value is None
        if not missing and not isinstance(value, str) or (key == "instruction" and not value.strip()):
            raise RecipeError(
                f"Row {index} of the dataset has {key} {short(value)}; expected text. Mend or remove the row."
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
        raise RecipeError(f"Row {index} of the dataset has conversations {short(turns)}; expected a list of turns.")
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
        other_form = isinstance(turn, dict) and turn.get("role") is not None
        mend = "For role and content, name the column messages, and unset prompt_template." if other_form else (
            "Mend or remove the row."
        )  # fmt: skip
        raise RecipeError(
            f"Row {index} of the dataset has {where} {short(turn)}; expected from, one of {', '.join(_ROLES)}, and "
            f"value, a text. {mend}"
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
            f"Row {index} of the dataset has messages {short(messages)}; expected two or more turns of role and "
            "content, the last one of the assistant. Mend or remove the row."
        )
    return {"prompt": messages[:-1], "completion": messages[-1:]}
