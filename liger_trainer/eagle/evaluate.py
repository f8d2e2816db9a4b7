"""Measures a drafter on the greedy text of its own model.

With y the greedy text, step k at the place before y[i] is right if its first choice is y[i + k]. The acceptance length
is the number of tokens that one forward pass of a decoder yields. One pass of the model over the text and K steps of
the drafter are enough to compute it: as long as a decoder accepts the guesses, it gives the drafter the same tokens as
the text. `medusa.evaluate.simulate_decoding` walks the text as a decoder would. `decode.py` is the real decoder, and a
test compares the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from liger_trainer.data.answers import answer
from liger_trainer.eagle.drafter import EagleDrafter
from liger_trainer.eagle.target import decoder_layers, default_layers, embedding_of
from liger_trainer.head.flat_rows import FlatRows, flat_rows
from liger_trainer.medusa.evaluate import simulate_decoding
from liger_trainer.varlen.taps import tapped


@dataclass(frozen=True)
class EagleReport:
    """The result of `evaluate`. Its `str()` is a table.

    Attributes:
        accuracy: For each step, the share of positions with a right first choice, given the right earlier tokens.
        accepted: For each step, the share of its guesses that were accepted when all guesses before it were right.
        tokens_per_pass: Tokens per forward pass, not counting the pass over the prompt and its token; 1 without a
            drafter.
    """

    draft_vocab_size: int
    rows: int
    tokens: int
    accuracy: list[float]
    accepted: list[float | None]
    tokens_per_pass: float

    def __str__(self) -> str:
        lines = [
            f"EAGLE-3: {len(self.accuracy)} steps, {self.draft_vocab_size} tokens to guess from, on {self.tokens} "
            f"tokens of greedy text after {self.rows} prompts",
            "  step   accuracy   accepted after those before it",
        ]
        for k, (right, accepted) in enumerate(zip(self.accuracy, self.accepted, strict=True), 1):
            lines.append(f"  {k:<6} {right:.3f}      {'-' if accepted is None else f'{accepted:.3f}'}")
        return "\n".join([*lines, f"  tokens per forward pass  {self.tokens_per_pass:.3f}  (1 without a drafter)"])


@torch.no_grad()
def evaluate(
    model: PreTrainedModel,
    drafter: EagleDrafter,
    prompts: Sequence[list[int]],
    ends: set[int],
    *,
    steps: int = 7,
    max_new_tokens: int = 128,
    batch_size: int = 16,
) -> EagleReport:
    """Return accuracy and acceptance length of `drafter` on the greedy text of `model`.

    Args:
        model (`PreTrainedModel`): Its training mode is restored afterwards.
        drafter (`EagleDrafter`): On the device of the LM head and in its dtype, attached to the model or not.
        prompts, ends: Token ids of each prompt; tokens that end a text, as `end_tokens` gives them.
        steps (`int`): Number of tokens to guess for each pass.
        max_new_tokens, batch_size (`int`): Length at which a greedy text is cut; prompts answered at once.

    Raises:
        ValueError: No text has two tokens, so there is nothing to guess.
    """
    training = model.training
    model.eval()
    try:
        texts = []
        for first in range(0, len(prompts), batch_size):
            texts += answer(model, prompts[first : first + batch_size], ends, max_new_tokens)
        pairs = [(prompt, text) for prompt, text in zip(prompts, texts, strict=True) if len(text) > 1]
        rows = [right_guesses(model, drafter, prompt, text, steps) for prompt, text in pairs]
    finally:
        model.train(training)
    if not rows:
        raise ValueError(
            f"The model ends all {len(prompts)} texts after one token, so there is nothing to guess. Use other prompts."
        )
    tokens_per_pass, accepted = simulate_decoding(rows)
    accuracy = []
    for right in torch.cat(rows, dim=1):
        accuracy.append(float((right == 1).sum() / (right >= 0).sum().clamp(min=1)))
    return EagleReport(len(drafter.d2t), len(prompts), sum(map(len, texts)), accuracy, accepted, tokens_per_pass)


def right_guesses(
    model: PreTrainedModel, drafter: EagleDrafter, prompt: list[int], text: list[int], steps: int
) -> torch.Tensor:
    """Compute which guesses of each step are right, in one forward pass over prompt and text.

    Returns:
        `torch.Tensor`: (steps, n - 1) int64 on the CPU, for a text of n tokens. Row k, column i is 1 if step k + 1
        guesses `text[i + k + 1]` at the position before `text[i]`, 0 if not, and -1 if the text has ended.
    """
    ids = torch.tensor([prompt + text], device=model.device)
    states, _ = read_target(model, drafter, ids)
    outputs = drafter(states, embedding_of(model), one_row(ids), steps)
    wanted = ids[0, len(prompt) :]
    right = torch.full((steps, len(text) - 1), -1)
    for k, x in enumerate(outputs[: len(text) - 1]):
        guesses = drafter.target_ids[drafter.lm_head(x[len(prompt) - 1 : -2 - k]).argmax(-1)]
        right[k, : len(guesses)] = (guesses == wanted[k + 1 :]).cpu()
    return right


def read_target(model: PreTrainedModel, drafter: EagleDrafter, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states (n, 3 H) that the drafter reads, and the greedy next tokens (n,), of ids (1, n)."""
    layers = decoder_layers(model)
    numbers = drafter.config.layers or default_layers(len(layers))
    with tapped(layers, numbers) as tapped_states:
        logits = model(input_ids=ids, use_cache=False).logits
    return torch.cat([x[0] for x in tapped_states], -1), logits[0].argmax(-1)


def one_row(ids: torch.Tensor) -> FlatRows:
    """Return the row `ids` (1, n) as `FlatRows`."""
    return flat_rows({"input_ids": ids, "labels": ids})
