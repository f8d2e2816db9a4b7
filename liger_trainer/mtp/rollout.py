"""Lets an MTP head guess several tokens ahead, as a server does with `num_speculative_tokens` above 1.

Guess k at token t, with s_t^0 the model's hidden state, which is the input of its LM head:

    f_t^k = fc([pre_fc_norm_embedding(e(x_{t+k})), pre_fc_norm_hidden(s_t^{k-1})])        at position t + k - 1
    y_t^k = layer(f^k)_t                     its query sees f_u^1 for all u up to t, and f_t^2 ... f_t^k
    guess = argmax of LM head(norm(y_t^k)), for token t + k + 1
    s_t^k = norm(y_t^k) for heads `mtp.*`, and y_t^k for heads `model.layers.N.*`

That is what vLLM does: its layer reads the model's hidden states up to t, and then its own output. SGLang gives heads
`model.layers.N.*` norm(y_t^k), too. In decoding, x_{t+2} and the tokens after it are guesses. Here they are tokens of
the text. The two are equal while all earlier guesses are right, and guesses after a wrong one do not count.
"""

from typing import Any

import torch
import torch.nn.functional as F

from liger_trainer.mtp.predictor import joined

_WITH_MASKS = ("sdpa", "eager")


@torch.no_grad()
def roll_out(
    predictor: Any, hidden: torch.Tensor, embedding: torch.Tensor, ids: torch.Tensor, first: int, guesses: int
) -> list[torch.Tensor]:
    """Return the inputs of the LM head for each guess at the tokens from `first` on: `guesses` tensors (n - first, H).

    Rows of guess k that go past the end of the text, the last k, have meaningless numbers.

    Args:
        predictor (`nn.Module`): What `load_predictor` returned.
        hidden (`torch.Tensor`): (n, H), the model's inputs of the LM head.
        embedding (`torch.Tensor`): (V, H), the weight of the model's embeddings.
        ids (`torch.Tensor`): (n,) int64, one text.
        first (`int`): The first token to guess at.
        guesses (`int`): How many tokens are guessed at each.

    Raises:
        ValueError: `guesses` is below 1, or the attention of the head takes no masks.
    """
    if guesses < 1:
        raise ValueError(f"guesses is {guesses}; expected 1 or more.")
    attention = predictor.config._attn_implementation
    if attention not in _WITH_MASKS:
        raise ValueError(
            f"attn_implementation is {attention!r}, which takes no mask of tokens by tokens. Load the model with "
            "attn_implementation='sdpa'."
        )
    dtype = predictor.fc.weight.dtype  # fp32 after a training with autocast
    token = torch.arange(len(ids), device=ids.device)
    drafted = token[first:]
    guess = torch.ones_like(token)  # the k of each row
    x = joined(predictor, hidden.to(dtype), F.embedding(ids.roll(-1), embedding).to(dtype))
    found = []
    for k in range(1, guesses + 1):
        out, state = _run(predictor, x, token, guess)
        found.append(out[-len(drafted) :])
        embeds = F.embedding(ids.roll(-k - 1)[first:], embedding).to(dtype)
        x = torch.cat([x, joined(predictor, state[-len(drafted) :], embeds)])
        token = torch.cat([token, drafted])
        guess = torch.cat([guess, torch.full_like(drafted, k + 1)])
    return found


def _run(
    predictor: Any, x: torch.Tensor, token: torch.Tensor, guess: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(y), s) for rows f (L, H) of the given tokens and guesses."""
    of_text = (guess == 1) & (token <= token[:, None])
    of_rollout = (guess > 1) & (guess <= guess[:, None]) & (token == token[:, None])
    hidden_rows = torch.zeros(len(x), len(x), dtype=x.dtype, device=x.device)
    hidden_rows.masked_fill_(~(of_text | of_rollout), torch.finfo(x.dtype).min)
    return run_layer(predictor, x, token + guess - 1, attention_mask=hidden_rows[None, None], use_cache=False)


def run_layer(
    predictor: Any, x: torch.Tensor, positions: torch.Tensor, **call: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(y), s) for rows f (L, H) at `positions` (L,). `call` are further arguments of the head's module."""
    inputs: list[torch.Tensor] = []
    hook = predictor.norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        outputs = predictor(inputs_embeds=x[None], position_ids=positions[None], **call)
    finally:
        hook.remove()
    normed = outputs.last_hidden_state[0]
    return normed, inputs[-1][0] if predictor.names_in_files.is_layer else normed
