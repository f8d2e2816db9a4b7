"""Measures Medusa heads on the greedy text of their own model.

With y the greedy text and t a position in it, head k is right if its argmax at t is y[t + k + 1]. The acceptance length
is the number of tokens that one forward pass of a decoder yields. One teacher-forced pass over the text is enough to
compute it: walk the text as a decoder would, and if the first a heads at t are right and the next is not, go on at
t + a + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from liger_trainer.data.answers import answer
from liger_trainer.head.module import innermost, output_head
from liger_trainer.medusa.heads import MedusaHeads


@dataclass(frozen=True)
class MedusaReport:
    """The result of `evaluate`. Its `str()` is a table.

    Attributes:
        accuracy: For each head, the share of positions with a right first choice.
        accepted: For each head, the share of its guesses that were accepted when all heads before it were right.
        tokens_per_pass: Tokens per forward pass, without the pass over the prompt and its token. It is 1 without heads.
    """

    heads: dict
    rows: int
    tokens: int
    accuracy: list[float]
    accepted: list[float | None]
    tokens_per_pass: float

    def __str__(self) -> str:
        kind = "tied" if self.heads["medusa_tied"] else "untied"
        lines = [
            f"Medusa: {self.heads['medusa_num_heads']} {kind} heads of {self.heads['medusa_num_layers']} block(s), on "
            f"{self.tokens} tokens of greedy text after {self.rows} prompts",
            "  head   accuracy   accepted after those before it",
        ]
        for k, (right, accepted) in enumerate(zip(self.accuracy, self.accepted, strict=True), 1):
            lines.append(f"  {k:<6} {right:.3f}      {'-' if accepted is None else f'{accepted:.3f}'}")
        return "\n".join([*lines, f"  tokens per forward pass  {self.tokens_per_pass:.3f}  (1 without heads)"])


@torch.no_grad()
def evaluate(
    model: PreTrainedModel,
    heads: MedusaHeads,
    prompts: Sequence[list[int]],
    ends: set[int],
    *,
    max_new_tokens: int = 128,
    batch_size: int = 16,
) -> MedusaReport:
    """Return accuracy and acceptance length of `heads` on the greedy text of `model`.

    Args:
        model (`PreTrainedModel`): Its training mode is restored afterwards.
        heads (`MedusaHeads`): On the device of the LM head and in its dtype, attached to the model or not.
        prompts, ends: Token ids of each prompt; tokens that end a text, as `end_tokens` gives them.
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
        rows = [right_guesses(model, heads, p, text) for p, text in zip(prompts, texts, strict=True) if len(text) > 1]
    finally:
        model.train(training)
    if not rows:
        raise ValueError(
            f"The model ends all {len(prompts)} texts after one token, so there is nothing to guess. Use other prompts."
        )
    tokens_per_pass, accepted = simulate_decoding(rows)
    return MedusaReport(
        heads=heads.config.to_dict(),
        rows=len(prompts),
        tokens=sum(map(len, texts)),
        accuracy=[float((right == 1).sum() / (right >= 0).sum().clamp(min=1)) for right in torch.cat(rows, dim=1)],
        accepted=accepted,
        tokens_per_pass=tokens_per_pass,
    )


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


def simulate_decoding(rows: list[torch.Tensor]) -> tuple[float, list[float | None]]:
    """Walk texts as a decoder would. Return tokens per forward pass, and each head's acceptance rate (None: not used).

    `rows` has the result of `right_guesses` for each text.
    """
    num_heads = rows[0].shape[0]
    reached = [0] * num_heads
    accepted = [0] * num_heads
    passes = 0
    tokens = 0
    for guesses in rows:
        columns = guesses.T.tolist()
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
    return tokens / passes, [a / r if r else None for a, r in zip(accepted, reached, strict=True)]
