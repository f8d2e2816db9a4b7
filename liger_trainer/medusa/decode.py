"""Greedy decoding with Medusa heads: propose a chain of tokens, verify it in one forward pass, keep what is right.

A pass reads the last token and the K guesses for those after it. Its logits say what the model itself would have
written after each. The guesses are kept up to the first wrong one, and the model's own token follows them. That makes 1
to K + 1 tokens per pass, and the text of plain greedy decoding (Leviathan et al. 2023, arXiv:2211.17192).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from liger_trainer.head.find import base_model_of, output_head
from liger_trainer.head.module import innermost
from liger_trainer.medusa.heads import MedusaHeads


@dataclass(frozen=True)
class Decoded:
    """The new tokens, with the end token, and the forward passes after the one over the prompt.

    The pass over the prompt gives the first token, so `passes` gave `len(tokens) - 1` tokens.
    """

    tokens: list[int]
    passes: int


@torch.no_grad()
def greedy_decode(
    model: PreTrainedModel, heads: MedusaHeads | None, prompt: list[int], ends: set[int], max_new_tokens: int
) -> Decoded:
    """The greedy text of `model` after one `prompt`, decoded with the proposals of the heads or without.

    Args:
        model (`PreTrainedModel`): A decoder in eval mode. ValueError if it keeps a running state, as state-space and
            linear-attention layers do, from which wrong guesses cannot be removed.
        heads (`MedusaHeads` or `None`): With None, every pass gives one token.
        prompt (`list[int]`): Token ids, not empty.
        ends (`set[int]`): Tokens that end the text.
        max_new_tokens (`int`): Length at which the text is cut, 1 or more.
    """
    if getattr(base_model_of(model), "_is_stateful", False):
        raise ValueError(
            f"{type(base_model_of(model)).__name__} keeps a running state, from which wrong guesses cannot be removed. "
            "Decode it without heads."
        )
    head = innermost(output_head(model))
    # Without a config, layers with a sliding window keep all keys too, so they can be cut. The masks do the rest.
    cache = DynamicCache()
    inputs, drafted, passes = torch.tensor([prompt], device=model.device), 0, 0
    tokens: list[int] = []
    with head_input(model) as seen:
        while True:
            chosen = model(input_ids=inputs, past_key_values=cache, use_cache=True).logits[0].argmax(-1)
            last = inputs.shape[1] - 1 - drafted  # row of the last token that is certain, after which come the guesses
            both = torch.cat((inputs[0, last + 1 :], chosen[last:])).tolist()  # waits for the device once per pass
            guesses, written = both[:drafted], both[drafted:]
            right = next((i for i, guess in enumerate(guesses) if guess != written[i]), drafted)
            for token in written[: right + 1]:
                tokens.append(token)
                if token in ends or len(tokens) == max_new_tokens:
                    return Decoded(tokens, passes)
            if right < drafted:
                cache.crop(right - drafted)  # a negative number is how many tokens to cut off the end
            passes += 1
            row = slice(last + right, last + right + 1)
            inputs = chosen[None, row]
            if heads is not None:
                proposed = heads.logits(seen[0][0, row], head).argmax(-1)  # (K, 1)
                inputs, drafted = torch.cat((inputs, proposed.T), dim=1), len(heads)


@contextmanager
def head_input(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Within the block, the list's one element is the input (B, S, H) of the last call of the LM head."""
    seen: list[torch.Tensor] = []

    def note(module: nn.Module, args: tuple) -> None:
        seen[:] = args[:1]

    handle = innermost(output_head(model)).register_forward_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()
