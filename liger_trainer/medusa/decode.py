"""Greedy decoding with Medusa heads: propose a chain of tokens, verify it in one forward pass, keep what is right.

A pass reads the last token and the K guesses for those after it. Its logits say what the model itself would have
written after each, so the guesses are kept up to the first wrong one, and the model's own token follows them: 1 to
K + 1 tokens a pass, and the text of plain greedy decoding (Leviathan et al. 2023, arXiv:2211.17192).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from liger_trainer.head.find import base_model_of, output_head
from liger_trainer.head.module import innermost
from liger_trainer.medusa.heads import MedusaHeads


@dataclass(frozen=True)
class Decoded:
    """`tokens`: the new ones, the end token included. `passes`: forward passes after the one over the prompt, which
    gives the first token, so that `len(tokens) - 1` tokens came from them."""

    tokens: list[int]
    passes: int


@torch.no_grad()
def greedy_decode(model, heads: MedusaHeads | None, prompt: list[int], ends: set[int], max_new_tokens: int) -> Decoded:
    """Greedy text of `model` after `prompt`, one row, with the heads' proposals or without.

    Args:
        model (`PreTrainedModel`): A decoder whose cache can be cut, in eval mode.
        heads (`MedusaHeads` or `None`): None: a token a pass.
        prompt (`list[int]`): Token ids, not empty.
        ends (`set[int]`): Tokens that end the text.
        max_new_tokens (`int`): Where it is cut; 1 or more.

    Raises:
        ValueError: The model keeps a state that cannot be taken back (state-space and linear-attention layers).
    """
    if getattr(base_model_of(model), "_is_stateful", False):
        raise ValueError(
            f"{type(base_model_of(model)).__name__} keeps a running state, from which wrong guesses cannot be removed. "
            "Decode it without heads."
        )
    head = innermost(output_head(model))
    # Without a config every layer keeps all keys, sliding windows too: they can be cut, and the masks do the rest.
    cache = DynamicCache()
    inputs, drafted, tokens, passes = torch.tensor([prompt], device=model.device), 0, [], 0
    with head_input(model) as seen:
        while True:
            chosen = model(input_ids=inputs, past_key_values=cache, use_cache=True).logits[0].argmax(-1)
            last = inputs.shape[1] - 1 - drafted  # row of the last token that is certain; guesses follow it
            both = torch.cat((inputs[0, last + 1 :], chosen[last:])).tolist()  # one wait for the device a pass
            guesses, written = both[:drafted], both[drafted:]
            right = next((i for i, guess in enumerate(guesses) if guess != written[i]), drafted)
            for token in written[: right + 1]:
                tokens.append(token)
                if token in ends or len(tokens) == max_new_tokens:
                    return Decoded(tokens, passes)
            if right < drafted:
                cache.crop(right - drafted)  # negative: so many tokens off the end
            passes += 1
            row = slice(last + right, last + right + 1)
            inputs = chosen[None, row]
            if heads is not None:
                proposed = heads.logits(seen[0][0, row], head).argmax(-1)  # (K, 1)
                inputs, drafted = torch.cat((inputs, proposed.T), dim=1), len(heads)


@contextmanager
def head_input(model) -> Iterator[list[torch.Tensor]]:
    """Within the block, every call of the LM head replaces the list's one element by its input (B, S, H)."""
    seen = []

    def note(module, args):
        seen[:] = args[:1]

    handle = innermost(output_head(model)).register_forward_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()
