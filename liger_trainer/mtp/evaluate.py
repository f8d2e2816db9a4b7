"""Measures the MTP head of a model on the model's own greedy text.

A server asks the head for one token or a few beyond the model's own. With y the greedy text, the head reads the model's
hidden state before y[i] and the token y[i]. Guess 1 is right if its first choice is y[i + 1]. For the next guess it
reads its own output and y[i + 1], and so on (`rollout.py`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from liger_trainer.head.acceptance import Acceptance, measure_acceptance
from liger_trainer.head.module import innermost, output_head
from liger_trainer.mtp.rollout import roll_out


class MTPReport(Acceptance):
    """The result of `evaluate`. Its `str()` is a table."""

    def __str__(self) -> str:
        count = "one guess" if len(self.accuracy) == 1 else f"{len(self.accuracy)} guesses"
        title = f"MTP head: {count}, on {self.tokens} tokens of greedy text after {self.rows} prompts"
        return self.table(title, "guess", "the head")


def evaluate(
    model: PreTrainedModel,
    predictor: nn.Module,
    prompts: Sequence[list[int]],
    ends: set[int],
    *,
    steps: int = 1,
    max_new_tokens: int = 128,
    batch_size: int = 16,
    progress: Callable[[str], None] | None = None,
) -> MTPReport:
    """Return accuracy and acceptance length of `predictor` on the greedy text of `model`.

    Args:
        model (`PreTrainedModel`): Its mode is put back afterwards.
        predictor (`nn.Module`): The head, as `load_predictor` returns it.
        steps (`int`): Tokens that are guessed for a pass.
        prompts, ends, max_new_tokens, batch_size, progress: As in `measure_acceptance`.

    Raises:
        ValueError: No text has two tokens, so that there is nothing to guess; or as in `roll_out`.
    """
    guesses = partial(right_guesses, model, predictor, steps=steps)
    found = measure_acceptance(
        model, guesses, prompts, ends, max_new_tokens=max_new_tokens, batch_size=batch_size, progress=progress
    )
    return MTPReport(**vars(found))


@torch.no_grad()
def right_guesses(
    model: PreTrainedModel, predictor: nn.Module, prompt: list[int], text: list[int], steps: int = 1
) -> torch.Tensor:
    """Return which guesses are right, from one forward pass of the model over prompt and text.

    Returns:
        `torch.Tensor`: (steps, n - 1) int64 on the CPU, for a text of n tokens. Row k, column i is 1 if guess k + 1 at
        the place before `text[i]` is `text[i + k + 1]`, 0 if not, and -1 if the text has ended.
    """
    head: Any = innermost(output_head(model))
    ids = torch.tensor(prompt + text, device=model.device)
    inputs: list[torch.Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        model(input_ids=ids[None], use_cache=False)
    finally:
        hook.remove()
    embedding: Any = model.get_input_embeddings()
    outputs = roll_out(predictor, inputs[0][0], embedding.weight, ids, len(prompt) - 1, steps)
    wanted = ids[len(prompt) :]
    right = torch.full((steps, len(text) - 1), -1)
    for k, x in enumerate(outputs[: len(text) - 1]):
        choices = head(x[: len(text) - 1 - k].to(head.weight.dtype)).argmax(-1)
        right[k, : len(choices)] = (choices == wanted[k + 1 :]).cpu()
    return right
