"""Measures the MTP head of a model on the model's own greedy text.

A server asks the head for one token beyond the model's own. With y the greedy text, the head reads the model's hidden
state before y[i] and the token y[i]. It is right if its first choice is y[i + 1].
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from liger_trainer.head.acceptance import Acceptance, measure_acceptance
from liger_trainer.head.flat_rows import one_row
from liger_trainer.head.frozen import in_dtype_of
from liger_trainer.head.module import innermost, output_head
from liger_trainer.mtp.predictor import predict


class MTPReport(Acceptance):
    """The result of `evaluate`. Its `str()` is a table."""

    def __str__(self) -> str:
        title = f"MTP head: one guess, on {self.tokens} tokens of greedy text after {self.rows} prompts"
        return self.table(title, "guess", "the head")


def evaluate(
    model: PreTrainedModel,
    predictor: nn.Module,
    prompts: Sequence[list[int]],
    ends: set[int],
    *,
    max_new_tokens: int = 128,
    batch_size: int = 16,
    progress: Callable[[str], None] | None = None,
) -> MTPReport:
    """Return accuracy and acceptance length of `predictor` on the greedy text of `model`.

    Args:
        model (`PreTrainedModel`): Its mode is put back afterwards.
        predictor (`nn.Module`): The head, as `load_predictor` returns it.
        prompts, ends, max_new_tokens, batch_size, progress: As in `measure_acceptance`.

    Raises:
        ValueError: No text has two tokens, so that there is nothing to guess.
    """
    guesses = partial(right_guesses, model, predictor)
    found = measure_acceptance(
        model, guesses, prompts, ends, max_new_tokens=max_new_tokens, batch_size=batch_size, progress=progress
    )
    return MTPReport(**vars(found))


def right_guesses(model: PreTrainedModel, predictor: nn.Module, prompt: list[int], text: list[int]) -> torch.Tensor:
    """Return whether the head guesses the right token, in one forward pass over prompt and text.

    Returns:
        `torch.Tensor`: (1, n - 1) int64 on the CPU, for a text of n tokens. Column i is 1 if the head guesses
        `text[i + 1]` from the state before `text[i]`, and 0 if not.
    """
    head: Any = innermost(output_head(model))
    ids = torch.tensor([prompt + text], device=model.device)
    inputs: list[torch.Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        hook.remove()
    embedding: Any = model.get_input_embeddings()
    with in_dtype_of(head.weight, predictor):
        guessed = predict(predictor, inputs[0][0], embedding.weight, one_row(ids)).to(head.weight.dtype)
    choices = head(guessed[len(prompt) - 1 : -2]).argmax(-1)
    return (choices == ids[0, len(prompt) + 1 :]).long().cpu().unsqueeze(0)
