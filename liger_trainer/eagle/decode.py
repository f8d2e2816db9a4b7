"""Decodes with a drafter as simply as possible, for reference: no cache, one text at a time, a chain of guesses.

Each pass of the model reads the text so far and the guesses after it, and gives the model's own token in place of each
guess. Guesses are accepted up to the first wrong one, which is replaced by the model's token. So the text is the
model's greedy text. A server does the same with caches, for many texts at once.
"""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from liger_trainer.eagle.drafter import EagleDrafter
from liger_trainer.eagle.evaluate import read_target
from liger_trainer.eagle.target import embedding_of
from liger_trainer.head.flat_rows import one_row
from liger_trainer.head.frozen import in_dtype_of


class Decoded(NamedTuple):
    """A text, and the number of forward passes after the first, which reads the prompt and gives the first token."""

    text: list[int]
    passes: int

    @property
    def tokens_per_pass(self) -> float:
        """The acceptance length: 1 without a drafter."""
        return (len(self.text) - 1) / self.passes


@torch.no_grad()
def decode(
    model: PreTrainedModel, drafter: EagleDrafter, prompt: list[int], ends: set[int], steps: int, max_new_tokens: int
) -> Decoded:
    """Return the greedy answer of `model` to `prompt`, with its end token if it was reached.

    Args:
        model (`PreTrainedModel`): In eval mode.
        drafter (`EagleDrafter`): On the device of the model.
        prompt (`list[int]`): At least one token.
        ends (`set[int]`): Tokens that end an answer.
        steps (`int`): Tokens to guess for each pass.
        max_new_tokens (`int`): The length at which the answer is cut.
    """
    tokens = torch.tensor([prompt], device=model.device)
    states, choices = read_target(model, drafter, tokens)
    tokens = torch.cat([tokens, choices[None, -1:]], 1)
    passes = 0
    while not _is_over(tokens, len(prompt), ends, max_new_tokens):
        drafted = guesses(model, drafter, states, tokens, steps)
        states, choices = read_target(model, drafter, torch.cat([tokens, drafted[None]], 1))
        passes += 1
        # The model's own tokens in place of each guess, and after the last one.
        model_tokens = choices[tokens.shape[1] - 1 :]
        num_accepted = int((drafted == model_tokens[:-1]).long().cumprod(0).sum())
        states = states[: tokens.shape[1] + num_accepted]
        tokens = torch.cat([tokens, model_tokens[None, : num_accepted + 1]], 1)
    text = tokens[0, len(prompt) :].tolist()[:max_new_tokens]
    stop = next((i for i, token in enumerate(text, 1) if token in ends), None)
    return Decoded(text[:stop], passes)


def guesses(
    model: PreTrainedModel, drafter: EagleDrafter, states: torch.Tensor, tokens: torch.Tensor, steps: int
) -> torch.Tensor:
    """Return the drafter's guesses (steps,) for the tokens after `tokens` (1, n), made one after the other.

    `states` (n - 1, 3 H) are the target's hidden states of all tokens but the last, which it has not read yet.
    """
    known = tokens.shape[1]
    # The rows after the last known state make room for the guesses. Attention is causal, so no earlier row sees them.
    padded = torch.cat([states, states.new_zeros(steps, states.shape[1])])
    row = torch.cat([tokens[0], tokens.new_zeros(steps - 1)])
    embedding = embedding_of(model)
    for k in range(1, steps + 1):
        with in_dtype_of(embedding, drafter):
            output = drafter(padded, embedding, one_row(row[None]), k)[-1]
            guess = drafter.target_ids[drafter.lm_head(output[known - 2]).argmax()]
        if k < steps:
            row[known + k - 1] = guess
    return torch.cat([row[known:], guess[None]])


def _is_over(tokens: torch.Tensor, prompt: int, ends: set[int], max_new_tokens: int) -> bool:
    text = tokens[0, prompt:].tolist()
    return len(text) >= max_new_tokens or not ends.isdisjoint(text)
