"""Measures Medusa heads on the greedy text of their own model, by one teacher-forced pass over it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from liger_trainer.head.acceptance import Acceptance, measure_acceptance
from liger_trainer.head.module import innermost, output_head
from liger_trainer.medusa.heads import MedusaHeads


@dataclass(frozen=True)
class MedusaReport(Acceptance):
    """The result of `evaluate`, and the config of the heads. Its `str()` is a table."""

    heads: dict

    def __str__(self) -> str:
        kind = "tied" if self.heads["medusa_tied"] else "untied"
        title = (
            f"Medusa: {self.heads['medusa_num_heads']} {kind} heads of {self.heads['medusa_num_layers']} block(s), on "
            f"{self.tokens} tokens of greedy text after {self.rows} prompts"
        )
        return self.table(title, "head", "heads")


def evaluate(
    model: PreTrainedModel,
    heads: MedusaHeads,
    prompts: Sequence[list[int]],
    ends: set[int],
    *,
    max_new_tokens: int = 128,
    batch_size: int = 16,
    progress: Callable[[str], None] | None = None,
) -> MedusaReport:
    """Return accuracy and acceptance length of `heads` on the greedy text of `model`.

    Args:
        model (`PreTrainedModel`): Its training mode is restored afterwards.
        heads (`MedusaHeads`): On the device of the LM head and in its dtype, attached to the model or not.
        prompts, ends, max_new_tokens, batch_size, progress: As in `measure_acceptance`.

    Raises:
        ValueError: No text has two tokens, so there is nothing to guess.
    """
    guesses = partial(right_guesses, model, heads)
    found = measure_acceptance(
        model, guesses, prompts, ends, max_new_tokens=max_new_tokens, batch_size=batch_size, progress=progress
    )
    return MedusaReport(**vars(found), heads=heads.config.to_dict())


def right_guesses(model: PreTrainedModel, heads: MedusaHeads, prompt: list[int], text: list[int]) -> torch.Tensor:
    """Compute which guesses of each head are right, in one forward pass over prompt and text.

    Returns:
        `torch.Tensor`: (K, n - 1) int64 on the CPU, for a text of n tokens. Row k, column i is 1 if head k + 1 guesses
        `text[i + k + 1]` at the position before `text[i]`, 0 if not, and -1 if the text has ended.
    """
    head, target = innermost(output_head(model)), torch.tensor(text, device=model.device)
    inputs: list[torch.Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        model(input_ids=torch.tensor([prompt + text], device=model.device), use_cache=False)
    finally:
        hook.remove()
    hidden = inputs[0][0, len(prompt) - 1 : -2]  # (n - 1, H): the last two positions have nothing to guess in the text
    right = torch.full((len(heads), len(text) - 1), -1)
    for k, medusa_head in enumerate(heads):
        wanted = target[k + 1 :]
        logits = (medusa_head.lm_head or head)(
            medusa_head(hidden[: len(wanted)])
        )  # (n - 1 - k, V), of one head at a time
        right[k, : len(wanted)] = (logits.argmax(-1) == wanted).cpu()
    return right
