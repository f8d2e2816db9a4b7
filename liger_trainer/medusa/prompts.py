"""Finds the prompt of a row in any form."""

from liger_trainer.data.answers import Prompt
from liger_trainer.data.formats import alpaca_history, alpaca_row, sharegpt_messages

_COLUMNS = "prompt; messages; conversations; instruction (and input)"


def prompt_of(row: dict, chat: bool, index: int = 0) -> Prompt:
    """Return the prompt of a row: its `prompt`, or its `messages` or `conversations` up to the first answer.

    With `chat`, the `instruction` and `input` of an Alpaca row become one message after its `system` and `history`.
    Otherwise Alpaca's template is applied.

    Raises:
        ValueError: The row has no such column, nothing before the first answer, or values for a chat template.
    """
    unread = [name for name in ("tools", "chat_template_kwargs") if row.get(name) not in (None, "", "[]", [], {})]
    if unread and not isinstance(row.get("prompt"), str):
        raise ValueError(
            f"Row {index} of the prompts has {unread[0]}, which the evaluation does not read. Remove it to measure "
            "without it."
        )
    if row.get("prompt"):
        return row["prompt"]
    if row.get("messages") or row.get("conversations"):
        turns = row.get("messages") or sharegpt_messages(row, index)
        answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        prompt = [{"role": t["role"], "content": t["content"]} for t in turns[: answers[0] if answers else None]]
        if not prompt:
            raise ValueError(f"Row {index} of the prompts starts with an answer; expected a turn of the user first.")
        return prompt
    if row.get("instruction"):
        if not chat:
            return alpaca_row({"output": "", **row}, index)["prompt"]
        messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        for instruction, output in alpaca_history(row.get("history"), index):
            messages.append({"role": "user", "content": instruction})
            messages.append({"role": "assistant", "content": output})
        question = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
        return [*messages, {"role": "user", "content": question}]
    raise ValueError(f"Row {index} of the prompts has {', '.join(row)}; expected one of: {_COLUMNS}.")
