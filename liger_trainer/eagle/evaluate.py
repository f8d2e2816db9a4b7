"""Measures a drafter on the greedy text of its own model.

One pass of the model over the text and K steps of the drafter show what a decoder would accept: while guesses are
right, a decoder passes the drafter the tokens of the text. A test compares this with `speculative_decoding.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from liger_trainer.eagle.drafter import EagleDrafter
from liger_trainer.eagle.target import embedding_of, layers_to_read
from liger_trainer.head.acceptance import Acceptance, measure_acceptance
from liger_trainer.head.flat_rows import one_row
from liger_trainer.head.frozen import in_dtype_of
from liger_trainer.varlen.taps import tapped


@dataclass(frozen=True)
class EagleReport(Acceptance):
    """The result of `evaluate`, with the size of the draft vocabulary. Its `str()` is a table."""

    draft_vocab_size: int

    def __str__(self) -> str:
        title = (
            f"EAGLE-3: {len(self.accuracy)} steps, {self.draft_vocab_size} tokens to guess from, on {self.tokens} "
            f"tokens of greedy text after {self.rows} prompts"
        )
        return self.table(title, "step", "a drafter")


def evaluate(
    model: PreTrainedModel,
    drafter: EagleDrafter,
    prompts: Sequence[list[int]],
    ends: set[int],
    *,
    steps: int = 7,
    max_new_tokens: int = 128,
    batch_size: int = 16,
    progress: Callable[[str], None] | None = None,
) -> EagleReport:
    """Return accuracy and acceptance length of `drafter` on the greedy text of `model`.

    Args:
        model (`PreTrainedModel`): Its training mode is restored afterwards.
        drafter (`EagleDrafter`): On the device of the LM head, attached to the model or not.
        steps (`int`): Tokens that are guessed for a pass.
        prompts, ends, max_new_tokens, batch_size, progress: As in `measure_acceptance`.

    Raises:
        ValueError: No text has two tokens, so there is nothing to guess.
    """

    def guesses(prompt: list[int], text: list[int]) -> torch.Tensor:
        return right_guesses(model, drafter, prompt, text, steps)

    found = measure_acceptance(
        model, guesses, prompts, ends, max_new_tokens=max_new_tokens, batch_size=batch_size, progress=progress
    )
    return EagleReport(**vars(found), draft_vocab_size=len(drafter.d2t))


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
    embedding = embedding_of(model)
    wanted = ids[0, len(prompt) :]
    right = torch.full((steps, len(text) - 1), -1)
    with in_dtype_of(embedding, drafter):
        outputs = drafter(states, embedding, one_row(ids), steps)
        for k, x in enumerate(outputs[: len(text) - 1]):
            guesses = drafter.target_ids[drafter.lm_head(x[len(prompt) - 1 : -2 - k]).argmax(-1)]
            right[k, : len(guesses)] = (guesses == wanted[k + 1 :]).cpu()
    return right


def read_target(model: PreTrainedModel, drafter: EagleDrafter, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states (n, 3 H) that the drafter reads, and the greedy next tokens (n,), of ids (1, n).

    The states have the drafter's dtype, which is fp32 after a training under autocast.
    """
    with tapped(layers_to_read(model, drafter.config.layers)) as tapped_states:
        logits = model(input_ids=ids, use_cache=False).logits
    states = torch.cat([x[0] for x in tapped_states], -1)
    return states.to(drafter.fc.weight.dtype), logits[0].argmax(-1)
