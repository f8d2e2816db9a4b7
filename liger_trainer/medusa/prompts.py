"""Prompts, and the text with which a model answers them.

A prompt is plain text, or a list of messages (`{"role", "content"}`) for models with a chat template.
"""

from collections.abc import Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from liger_trainer.data.formats import alpaca_history, alpaca_row, sharegpt_messages

Prompt = str | list[dict[str, str]]
_COLUMNS = "prompt; messages; conversations; instruction (and input)"


def prompt_of(row: dict, chat: bool, index: int = 0) -> Prompt:
    """Return the prompt of a row: its `prompt`, or its `messages` or `conversations` up to the first answer.

    The `instruction` and `input` of an Alpaca row become one message with `chat`, after its `system` and `history`, and
    Alpaca's template without.

    Raises:
        ValueError: The row has no such column, nothing before the first answer, or what goes into a template with it.
    """
    lost = [name for name in ("tools", "chat_template_kwargs") if row.get(name) not in (None, "", "[]", [], {})]
    if lost and not isinstance(row.get("prompt"), str):
        raise ValueError(
            f"Row {index} of the prompts has {lost[0]}, which heads are trained with and not measured with. Remove it "
            "to measure without."
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


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Return the token ids of a prompt. Messages go through the chat template, with the header of an answer.

    transformers raises a ValueError where there is no chat template.
    """
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids that end an answer, from the model's generation config and the tokenizer."""
    own = getattr(model.generation_config, "eos_token_id", None)
    ends = [own] if isinstance(own, int) else list(own or ())
    return {end for end in (*ends, tokenizer.eos_token_id) if end is not None}


@torch.no_grad()
def answer(
    model: PreTrainedModel, prompts: Sequence[list[int]], ends: set[int], max_new_tokens: int
) -> list[list[int]]:
    """Return the new tokens that `model.generate` answers, with the end token where it was reached.

    The model's own generation config, such as a repetition penalty, is left out. So each token is the argmax of the
    logits, which is what a decoder with heads verifies.

    Args:
        model (`PreTrainedModel`): In eval mode.
        prompts: Token ids, one list per prompt, none of them empty.
        ends (`set[int]`): Tokens that end an answer.
        max_new_tokens (`int`): Length at which an answer is cut.
    """
    width = max(map(len, prompts))
    pad = min(ends, default=0)
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, eos_token_id=sorted(ends) or None, pad_token_id=pad, use_cache=True
    )
    own, model.generation_config = model.generation_config, config
    try:
        new = model.generate(input_ids=ids, attention_mask=mask)[:, width:].tolist()
    finally:
        model.generation_config = own
    stops = [next((i for i, token in enumerate(tokens, 1) if token in ends), None) for tokens in new]
    return [tokens[:stop] for tokens, stop in zip(new, stops, strict=True)]
