"""Measures speculative heads on the greedy text of their own model.

With y the greedy text, guess k at the position before y[i] is right if it is y[i + k]. The acceptance length is the
number of tokens that a decoder gets from one forward pass. No decoding is needed to measure it: after one pass of the
model over the finished text, `simulate_decoding` walks the text as a decoder would. If at i the first a guesses are
right and the next one is not, the decoder goes on at i + a + 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from liger_trainer.data.answers import answer


@dataclass(frozen=True)
class Acceptance:
    """How often heads guess right on greedy text.

    Attributes:
        rows, tokens (`int`): Prompts, and tokens of the texts after them.
        accuracy (`list[float]`): For each guess, the fraction of positions where it is right, given the right tokens
            before it.
        accepted (`list`): For each guess, the fraction that was accepted of the times that all guesses before it were
            right. None: that never happened.
        tokens_per_pass (`float`): Tokens per forward pass, without the pass over the prompt and the token from it. It
            is 1 without heads.
    """

    rows: int
    tokens: int
    accuracy: list[float]
    accepted: list[float | None]
    tokens_per_pass: float

    def table(self, title: str, guess: str, without: str) -> str:
        """Return lines for the terminal: a title, a line for each guess, and the tokens per pass.

        `guess` heads the column of guesses, and `without` says what a decoder with 1 token per pass lacks.
        """
        lines = [title, f"  {guess}   accuracy   accepted after those before it"]
        for k, (right, accepted) in enumerate(zip(self.accuracy, self.accepted, strict=True), 1):
            shown = "-" if accepted is None else f"{accepted:.3f}"
            lines.append(f"  {k:<6} {right:.3f}      {shown}")
        lines.append(f"  tokens per forward pass  {self.tokens_per_pass:.3f}  (1 without {without})")
        return "\n".join(lines)


@torch.no_grad()
def measure_acceptance(
    model: PreTrainedModel,
    right_guesses: Callable[[list[int], list[int]], torch.Tensor],
    prompts: Sequence[list[int]],
    ends: set[int],
    *,
    max_new_tokens: int = 128,
    batch_size: int = 16,
    progress: Callable[[str], None] | None = None,
) -> Acceptance:
    """Let `model` answer the prompts greedily, and return how often its heads guess right.

    Args:
        model (`PreTrainedModel`): Its mode is put back afterwards.
        right_guesses (`Callable`): Gets a prompt and the text after it, of n tokens, and returns (K, n - 1) int64 on
            the CPU: row k, column i is 1 if guess k + 1 at the position before `text[i]` is `text[i + k + 1]`, 0 if
            not, and -1 if the text has ended.
        prompts, ends: Token ids of each prompt; tokens that end a text, as `end_tokens` gives them.
        max_new_tokens, batch_size (`int`): Length at which a greedy text is cut; prompts answered at once.
        progress (`Callable`, *optional*): Called with a line of text after each token and each text.

    Raises:
        ValueError: No text has two tokens, so that there is nothing to guess.
    """
    training = model.training
    model.eval()
    try:
        texts: list[list[int]] = []
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            on_token = None
            if progress is not None:
                line = f"answers to prompts {first + 1} to {first + len(batch)} of {len(prompts)}"
                on_token = partial(_tell_tokens, progress, line, max_new_tokens)
            texts += answer(model, batch, ends, max_new_tokens, on_token)
        rows = []
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
            if len(text) > 1:
                rows.append(right_guesses(prompt, text))
            if progress is not None:
                progress(f"guesses for text {number} of {len(texts)}")
    finally:
        model.train(training)
    if not rows:
        raise ValueError(f"The model ends all {len(prompts)} texts after one token: there is nothing to guess.")
    tokens_per_pass, accepted = simulate_decoding(rows)
    accuracy = []
    for right in torch.cat(rows, dim=1):
        accuracy.append(float((right == 1).sum() / (right >= 0).sum().clamp(min=1)))
    return Acceptance(len(prompts), sum(map(len, texts)), accuracy, accepted, tokens_per_pass)


def _tell_tokens(progress: Callable[[str], None], line: str, most: int, tokens: int) -> None:
    progress(f"{line}: {tokens} of at most {most} tokens")


def simulate_decoding(rows: list[torch.Tensor]) -> tuple[float, list[float | None]]:
    """Return the tokens per forward pass, and how often each guess was accepted where it was reached; None: never.

    `rows` has the result of `right_guesses` for each text.
    """
    guesses = rows[0].shape[0]
    reached = [0] * guesses
    accepted = [0] * guesses
    passes = 0
    tokens = 0
    for text in rows:
        columns = text.T.tolist()
        tokens += len(columns)  # the first token of a text comes from the pass over the prompt
        at = 0
        while at < len(columns):
            guessed = columns[at]
            passes += 1
            at += 1  # each pass yields the model's own token
            for k, right in enumerate(guessed):
                if right < 0:  # past the end of the text
                    break
                reached[k] += 1
                if not right:
                    break
                accepted[k] += 1
                at += 1
    shares = [a / r if r else None for a, r in zip(accepted, reached, strict=True)]
    return tokens / passes, shares
