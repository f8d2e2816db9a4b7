"""Decodes one text with a speculative head: a plain loop to measure with, the same for every kind of head.

A pass of the model reads the last token and K guesses of the tokens after it, and gives the model's own token in place
of each guess and one after the last. Guesses are accepted up to the first wrong one, which is replaced by the model's
token. So the text is the model's greedy text, and a pass yields one to K + 1 tokens of it.

A guesser makes the K guesses. It reads the model's hidden states of the tokens that are known to be right:

    EagleGuesser    the inputs of three layers                its own outputs are the states of later guesses
    MTPGuesser      the input of the LM head                  the same
    MedusaGuesser   the input of the LM head, last token      one head for each guess
    None            no guesses: plain greedy decoding by the same loop

The model keeps a KV cache, from which rejected guesses are removed. Where a layer is not full attention, as in a gated
delta net, what it has read cannot be taken back: there each pass reads the whole text again. The layer of a drafter or
an MTP head keeps a cache of its own, so it computes only new tokens and its guesses.

A server does the same for many texts at once, with fused kernels, and often with a tree of guesses in place of a chain.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from liger_trainer.eagle.drafter import EagleDrafter, rotated
from liger_trainer.eagle.target import embedding_of, layers_to_read
from liger_trainer.head.frozen import in_dtype_of
from liger_trainer.head.module import base_model_of, innermost, output_head
from liger_trainer.medusa.heads import MedusaHeads
from liger_trainer.mtp.predictor import joined
from liger_trainer.mtp.rollout import run_layer
from liger_trainer.varlen.taps import tapped


class Guesser(Protocol):
    """Guesses the next tokens of one text.

    Attributes:
        reads: Modules of the model. Their inputs, concatenated, are the hidden states that `guess` gets.
    """

    reads: Sequence[nn.Module]

    def start(self) -> None:
        """Forget the text before: the next call of `guess` is the first of a new one."""

    def guess(self, states: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Return the guesses (K,) int64 for the tokens after the last of `following`.

        Args:
            states (`torch.Tensor`): (m, S), the model's hidden states of the m tokens that are new since the last call.
            following (`torch.Tensor`): (m,) int64, the token after each of them. The model has not read the last yet.
        """


class Decoded(NamedTuple):
    """A text, and the number of forward passes after the first, which reads the prompt and gives the first token."""

    text: list[int]
    passes: int

    @property
    def tokens_per_pass(self) -> float:
        """The acceptance length: 1 without a guesser. Undefined (ZeroDivisionError) for a text of one token."""
        return (len(self.text) - 1) / self.passes


def decode(
    model: PreTrainedModel, guesser: Guesser | None, prompt: list[int], ends: set[int], max_new_tokens: int
) -> Decoded:
    """Return the greedy answer of `model` to `prompt`, and the passes it took. Arguments as in `decode_by_pass`."""
    first, *later = decode_by_pass(model, guesser, prompt, ends, max_new_tokens)
    return Decoded(sum(later, first), len(later))


@torch.no_grad()
def decode_by_pass(
    model: PreTrainedModel, guesser: Guesser | None, prompt: list[int], ends: set[int], max_new_tokens: int
) -> Iterator[list[int]]:
    """Yield the tokens that each forward pass gives, one token for the first, which reads the prompt.

    All of them are the greedy answer to `prompt`, with its end token if it was reached. A cached pass over several
    tokens rounds differently from one over a single token. In 16 bits, where logits tie more often, that can pick
    another of two tokens that are equally likely.

    Args:
        model (`PreTrainedModel`): In eval mode.
        guesser (`Guesser` or `None`): Made for `model`. None guesses nothing.
        prompt (`list[int]`): At least one token.
        ends (`set[int]`): Tokens that end an answer.
        max_new_tokens (`int`): The length at which the answer is cut, 1 or more.

    Raises:
        ValueError: The prompt is empty, or `max_new_tokens` is below 1.
    """
    if not prompt or max_new_tokens < 1:
        raise ValueError(
            f"The prompt has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}; expected 1 or more of both."
        )
    target = _Target(model, [] if guesser is None else guesser.reads)
    if guesser is not None:
        guesser.start()
    row = torch.tensor(prompt, device=model.device)
    states, choices = target.read(row)
    new = choices[-1:]
    following = torch.cat([row[1:], new])
    left = max_new_tokens
    while True:
        text, is_over = _cut(new.tolist(), ends, left)
        yield text
        if is_over:
            return
        left -= len(text)
        guesses = row.new_empty(0) if guesser is None else guesser.guess(states, following)
        states, choices = target.read(torch.cat([following[-1:], guesses]))
        right = int((guesses == choices[:-1]).long().cumprod(0).sum())
        target.remove(len(guesses) - right)
        states = states[: right + 1]
        following = new = choices[: right + 1]


def _cut(tokens: list[int], ends: set[int], most: int) -> tuple[list[int], bool]:
    """Return `tokens` up to the first end token, at most so many, and whether the text ends with them."""
    tokens = tokens[:most]
    for number, token in enumerate(tokens, 1):
        if token in ends:
            return tokens[:number], True
    return tokens, len(tokens) == most


class _Target:
    """The model, and what it has read of a text."""

    def __init__(self, model: PreTrainedModel, reads: Sequence[nn.Module]) -> None:
        self._model = model
        self._reads = reads
        self._cache = _cache_of_full_attention(model)
        self._tokens = torch.empty(0, dtype=torch.int64, device=model.device)

    def read(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the tokens `row` (n,) after the ones before. Return their states (n, S) and the greedy tokens (n,)."""
        self._tokens = torch.cat([self._tokens, row])
        ids = self._tokens if self._cache is None else row
        with tapped(self._reads) as seen:
            logits = self._model(input_ids=ids[None], **_cache_arguments(self._model, self._cache)).logits
        states = torch.cat([x[0, -len(row) :] for x in seen], -1) if seen else logits.new_empty(len(row), 0)
        return states, logits[0, -len(row) :].argmax(-1)

    def remove(self, count: int) -> None:
        """Forget the last `count` tokens."""
        if count == 0:
            return
        self._tokens = self._tokens[:-count]
        if self._cache is not None:
            self._cache.crop(-count)


def _cache_of_full_attention(model: PreTrainedModel) -> DynamicCache | None:
    """Return an empty cache, or None if a layer of `model` keeps anything but keys and values of all tokens."""
    cache = DynamicCache(config=model.config)
    if not all(type(layer) is DynamicLayer for layer in cache.layers):
        return None
    # A class whose layers may keep a state says so. If its config does not name the layers, transformers takes them for
    # attention here.
    names_layers = getattr(model.config.get_text_config(decoder=True), "layer_types", None) is not None
    return cache if names_layers or not model._is_stateful else None


def _cache_arguments(module: nn.Module, cache: DynamicCache | None) -> dict[str, Any]:
    """Return the arguments of a call of `module` with `cache`. transformers 5.24 renamed one of them."""
    if cache is None:
        return {"use_cache": False}
    parameters = inspect.signature(type(base_model_of(module)).forward).parameters
    return {"use_cache": True, "cache" if "cache" in parameters else "past_key_values": cache}


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps is {steps}; expected 1 or more. Pass no guesser to decode without guesses.")


class EagleGuesser:
    """Guesses with an EAGLE-3 drafter, as its `forward` does, one token after the other and with a cache.

    Args:
        model (`PreTrainedModel`): The drafter's target.
        drafter (`EagleDrafter`): On the device of the model.
        steps (`int`): Tokens to guess for a pass.
    """

    def __init__(self, model: PreTrainedModel, drafter: EagleDrafter, steps: int) -> None:
        _check_steps(steps)
        self.reads = layers_to_read(model, drafter.config.layers)
        self._drafter = drafter
        self._steps = steps
        self._embedding = embedding_of(model)
        self._target_ids = drafter.target_ids
        self.start()

    def start(self) -> None:
        self._keys: list[torch.Tensor] = []  # (m, heads, D) each
        self._values: list[torch.Tensor] = []

    def guess(self, states: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        drafter = self._drafter
        with in_dtype_of(self._embedding, drafter):
            hidden = self._run_layer(drafter.fc(states.to(drafter.fc.weight.dtype)), following)
            guesses = [self._choose(hidden)]
            for _ in range(self._steps - 1):
                hidden = self._run_layer(hidden, guesses[-1])
                guesses.append(self._choose(hidden))
        # What it has made of its own outputs is replaced by what the model's states give.
        known = len(self._keys) - (self._steps - 1)
        self._keys = [torch.cat(self._keys[:known])]
        self._values = [torch.cat(self._values[:known])]
        return torch.cat(guesses)

    def _run_layer(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the layer's output (1, H) at the last of the rows (m, H), and keep keys and values of all of them."""
        layer = self._drafter.midlayer
        attention = layer.self_attn
        embeds = F.embedding(tokens, self._embedding).to(hidden.dtype)
        x = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], -1)
        q, k, v = (
            project(rows).unflatten(-1, (-1, attention.head_dim))
            for project, rows in ((attention.q_proj, x[-1:]), (attention.k_proj, x), (attention.v_proj, x))
        )
        first = sum(map(len, self._keys))
        angles = self._drafter.angles(torch.arange(first, first + len(x), device=x.device))
        self._keys.append(rotated(k, angles))
        self._values.append(v)
        q, keys, values = (
            y.transpose(0, 1)[None] for y in (rotated(q, angles[-1:]), torch.cat(self._keys), torch.cat(self._values))
        )
        # The one query is at the last row, so it sees all keys, and needs no mask.
        seen = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)[0, :, 0]
        normed, residual = layer.post_attention_layernorm.with_sum(attention.o_proj(seen.flatten()[None]), hidden[-1:])
        return residual + layer.mlp(normed)

    def _choose(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._target_ids[self._drafter.lm_head(self._drafter.norm(hidden)).argmax(-1)]


class MTPGuesser:
    """Guesses with an MTP head; for later guesses it reads its own output, as `rollout.py` says.

    Args:
        model (`PreTrainedModel`): The head's model.
        predictor (`nn.Module`): The head, as `load_predictor` returns it.
        steps (`int`): Tokens to guess for a pass.
    """

    def __init__(self, model: PreTrainedModel, predictor: Any, steps: int) -> None:
        _check_steps(steps)
        self._lm_head: Any = innermost(output_head(model))
        self.reads = [self._lm_head]
        self._predictor = predictor
        self._steps = steps
        self._embedding = embedding_of(model)
        self.start()

    def start(self) -> None:
        self._cache = DynamicCache(config=self._predictor.config)

    def guess(self, states: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        normed, state = self._run_layer(states, following)
        guesses = [self._choose(normed)]
        for _ in range(self._steps - 1):
            normed, state = self._run_layer(state, guesses[-1])
            guesses.append(self._choose(normed))
        if self._steps > 1:
            self._cache.crop(1 - self._steps)  # as with the drafter
        return torch.cat(guesses)

    def _run_layer(self, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the LM head's input and the state for the next guess, both (1, H), at the last of the rows (m, H)."""
        dtype = self._predictor.fc.weight.dtype  # fp32 after a training with autocast
        x = joined(self._predictor, states.to(dtype), F.embedding(tokens, self._embedding).to(dtype))
        first = self._cache.get_seq_length()
        positions = torch.arange(first, first + len(x), device=x.device)
        normed, state = run_layer(self._predictor, x, positions, **_cache_arguments(self._predictor, self._cache))
        return normed[-1:], state[-1:]

    def _choose(self, normed: torch.Tensor) -> torch.Tensor:
        return self._lm_head(normed.to(self._lm_head.weight.dtype)).argmax(-1)


class MedusaGuesser:
    """Guesses with the first Medusa heads, all from the hidden state of the last token that the model has read.

    Args:
        model (`PreTrainedModel`): The heads' model; they may be attached to it.
        heads (`MedusaHeads`): On the device of its LM head and in its dtype.
        steps (`int`): Tokens to guess for a pass, at most one for each head.
    """

    def __init__(self, model: PreTrainedModel, heads: MedusaHeads, steps: int) -> None:
        _check_steps(steps)
        if steps > len(heads):
            raise ValueError(f"steps is {steps}, but each of the {len(heads)} Medusa heads guesses one token.")
        self._lm_head: Any = innermost(output_head(model))
        self.reads = [self._lm_head]
        self._heads: list[Any] = list(heads)[:steps]

    def start(self) -> None:
        """It keeps nothing from one call to the next."""

    def guess(self, states: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        outputs = [head(states[-1:]) for head in self._heads]
        if self._heads[0].lm_head is None:  # tied: one product instead of K reads the weight once
            return self._lm_head(torch.cat(outputs)).argmax(-1)
        return torch.cat([head.lm_head(x).argmax(-1) for head, x in zip(self._heads, outputs, strict=True)])
