"""Encodes prompts as tokens, and generates a model's answers to them.

A prompt is plain text, or a list of messages (`{"role", "content"}`) for models with a chat template.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

Prompt = str | list[dict[str, str]]


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Return the token ids of a prompt. Messages go through the chat template, with the header of an answer.

    transformers raises a ValueError without a chat template.
    """
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids that end an answer, from the model's generation config and the tokenizer."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    ends = [eos] if isinstance(eos, int) else list(eos or ())
    return {end for end in (*ends, tokenizer.eos_token_id) if end is not None}


class _TokenCounter(StoppingCriteria):
    """Calls a function after each token, and stops nothing."""

    def __init__(self, width: int, on_token: Callable[[int], None]) -> None:
        self.width = width
        self.on_token = on_token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        self.on_token(input_ids.shape[1] - self.width)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@torch.no_grad()
def answer(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    ends: set[int],
    max_new_tokens: int,
    on_token: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """Return the tokens of the greedy answers, each with its end token if it was reached.

    The model's own generation config, such as a repetition penalty, is not used. So each token is the argmax of the
    logits, as in a decoder that verifies speculative heads.

    Args:
        model (`PreTrainedModel`): In eval mode.
        prompts: Token ids, one list per prompt, none of them empty.
        ends (`set[int]`): Tokens that end an answer.
        max_new_tokens (`int`): Length at which an answer is cut.
        on_token (`Callable`, *optional*): Called after each token with the length of the answers.
    """
    width = max(map(len, prompts))
    pad = min(ends, default=0)
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, eos_token_id=sorted(ends) or None, pad_token_id=pad, use_cache=True
    )
    more: dict[str, Any] = {}
    if on_token is not None:
        more["stopping_criteria"] = StoppingCriteriaList([_TokenCounter(width, on_token)])
    model_config, model.generation_config = model.generation_config, config
    try:
        new = model.generate(input_ids=ids, attention_mask=mask, **more)[:, width:].tolist()
    finally:
        model.generation_config = model_config
    return [_until_end(tokens, ends) for tokens in new]


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    """Return the tokens up to the first one in `ends`, or all."""
    for number, token in enumerate(tokens, 1):
        if token in ends:
            return tokens[:number]
    return tokens
