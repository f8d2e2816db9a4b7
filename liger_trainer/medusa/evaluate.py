"""Measures Medusa heads on the greedy text of their own model.

With y the greedy text and t a position in it, head k is right where its argmax at t is y[t + k + 1]. The acceptance
length is the number of tokens that a forward pass yields. One teacher-forced pass over the text is enough to know it:
walk the text as a decoder would; if at t the first a heads are right and the next one is not, go on at t + a + 1.
`decode.greedy_decode` measures the same number by decoding.
"""

import heapq
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from liger_trainer.head.find import output_head
from liger_trainer.head.module import innermost
from liger_trainer.medusa.decode import greedy_decode, head_input
from liger_trainer.medusa.heads import MedusaHeads, heads_of
from liger_trainer.medusa.prompts import answer, encode, end_tokens, prompt_of

REPORT_FILE = "medusa_report.json"
RANKS = 10  # how deep the tree looks into a head's candidates


@dataclass(frozen=True)
class Decoding:
    """Measured decoding of `rows` prompts, one at a time, with the heads and without.

    `differ` counts the rows whose texts part at a near tie: two logits closer than rounding in their dtype can tell.
    """

    rows: int
    tokens: int
    tokens_per_second: float
    tokens_per_second_without: float
    tokens_per_pass: float
    differ: int


@dataclass(frozen=True)
class MedusaReport:
    """The result of `evaluate`. Its `str()` is a table.

    Attributes:
        accuracy: For each head, the shares of positions whose token is its 1st, ..., `RANKS`-th candidate (not summed).
        accepted: For each head, how often its guess was accepted in the chain where all heads before it were right.
        chain, tree: Tokens per forward pass, without the pass over the prompt and its token. It is 1 without heads.
        medusa_choices: The tree, as paths of ranks in the form of FasterDecoding's decoder; 0 is the first candidate.
    """

    heads: dict
    rows: int
    tokens: int
    accuracy: list[list[float]]
    accepted: list[float | None]
    chain: float
    tree: float
    medusa_choices: list[list[int]]
    decoding: Decoding | None

    def to_dict(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        kind = "tied" if self.heads["medusa_tied"] else "untied"
        lines = [
            f"Medusa: {self.heads['medusa_num_heads']} {kind} heads of {self.heads['medusa_num_layers']} block(s), on "
            f"{self.tokens} tokens of greedy text after {self.rows} prompts",
            "  head   top-1   top-2   top-3   top-4   top-5   accepted after those before it",
        ]
        for k, (ranks, accepted) in enumerate(zip(self.accuracy, self.accepted, strict=True), 1):
            tops = "   ".join(f"{sum(ranks[: n + 1]):.3f}" for n in range(5))
            lines.append(f"  {k:<6} {tops}   {'-' if accepted is None else f'{accepted:.3f}'}")
        lines += [
            "  tokens per forward pass (1 without heads)",
            f"    chain  {self.chain:.3f}",
            f"    tree   {self.tree:.3f}   of {len(self.medusa_choices)} nodes",
        ]
        if (d := self.decoding) is not None:
            lines += [
                f"  decoding {d.tokens} tokens after {d.rows} prompts, one at a time, chain",
                f"    without heads  {d.tokens_per_second_without:.1f} tokens/s",
                f"    with heads     {d.tokens_per_second:.1f} tokens/s, "
                f"{d.tokens_per_second / d.tokens_per_second_without:.2f} times; {d.tokens_per_pass:.3f} tokens a pass",
                f"    same text      {d.rows - d.differ} of {d.rows} rows"
                + (f"; {d.differ} part at a near tie, within rounding" if d.differ else ""),
            ]
        return "\n".join(lines)


@torch.no_grad()
def evaluate(
    model: PreTrainedModel,
    heads: MedusaHeads,
    prompts: Sequence[list[int]],
    ends: set[int],
    *,
    max_new_tokens: int = 128,
    batch_size: int = 16,
    decode_rows: int = 8,
    tree_nodes: int = 64,
) -> MedusaReport:
    """Accuracy, acceptance length and decoding speed of `heads` on the greedy text of `model`.

    Args:
        model (`PreTrainedModel`): Its mode is put back afterwards.
        heads (`MedusaHeads`): On the device of the LM head and in its dtype, attached to the model or not.
        prompts, ends: Token ids of each prompt; tokens that end a text, as `end_tokens` gives them.
        max_new_tokens, batch_size (`int`): Length at which a greedy text is cut; prompts answered at once.
        decode_rows (`int`): How many prompts are decoded with heads and without; 0: none.
        tree_nodes (`int`): Size of the tree, built from the accuracy measured here.

    Raises:
        ValueError: A number is out of its range, or no text has two tokens, so that there is nothing to guess.
        RuntimeError: The text decoded with heads is not the greedy text, and no nearly equal logits explain it.
    """
    for name, value, least in (
        ("max_new_tokens", max_new_tokens, 2),
        ("batch_size", batch_size, 1),
        ("decode_rows", decode_rows, 0),
        ("tree_nodes", tree_nodes, 1),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}; expected {least} or more.")
    training = model.training
    model.eval()
    try:
        texts = []
        for first in range(0, len(prompts), batch_size):
            texts += answer(model, prompts[first : first + batch_size], ends, max_new_tokens)
        rows = [ranks_of(model, heads, p, text) for p, text in zip(prompts, texts, strict=True) if len(text) > 1]
        if not rows:
            raise ValueError(f"The model ends all {len(prompts)} texts after one token: there is nothing to guess.")
        decoding = _measure(model, heads, prompts[:decode_rows], ends, max_new_tokens) if decode_rows else None
    finally:
        model.train(training)
    accuracy = [
        [(ranks == rank).sum().item() / max((ranks >= 0).sum().item(), 1) for rank in range(RANKS)]
        for ranks in torch.cat(rows, dim=1)
    ]
    choices = build_tree(accuracy, tree_nodes)
    chain, accepted = walk(rows, [[0] * depth for depth in range(1, len(heads) + 1)])
    return MedusaReport(
        heads=heads.config.to_dict(),
        rows=len(prompts),
        tokens=sum(map(len, texts)),
        accuracy=accuracy,
        accepted=accepted,
        chain=chain,
        tree=walk(rows, choices)[0],
        medusa_choices=choices,
        decoding=decoding,
    )


def evaluation_after_training(trainer: Any, rows: Any) -> Callable[[], MedusaReport]:
    """A function that does what `medusa_eval_rows` asks for, to be called when the trainer has trained.

    Args:
        trainer (`LigerMedusaTrainer`): Its `args.output_dir` also gets the file `medusa_report.json`.
        rows (`datasets.Dataset`): The rows held out, as the recipe reads them. ValueError if one has no prompt.
    """
    tokenizer, args = trainer.processing_class, trainer.args
    rows = rows.select(range(min(args.medusa_eval_rows, len(rows))))
    texts = [prompt_of(row, bool(tokenizer.chat_template), index) for index, row in enumerate(rows)]
    prompts = [encode(tokenizer, prompt) for prompt in texts]
    ends = end_tokens(trainer.model, tokenizer)  # now, as Trainer.train reduces the model's own to the tokenizer's

    def run() -> MedusaReport:
        heads: Any = heads_of(trainer.model)
        report = evaluate(trainer.model, heads, prompts, ends, max_new_tokens=args.medusa_eval_max_new_tokens)
        with open(os.path.join(args.output_dir, REPORT_FILE), "w", encoding="utf-8") as file:
            json.dump(report.to_dict(), file, indent=1)
        return report

    return run


def ranks_of(model: PreTrainedModel, heads: MedusaHeads, prompt: list[int], text: list[int]) -> torch.Tensor:
    """Rank of the right token among each head's candidates, in one forward pass over prompt and text.

    Returns:
        `torch.Tensor`: (K, n - 1) int64 on the CPU, for a text of n tokens. Row k, column i has the rank of
        `text[i + k + 1]` for head k + 1 at the position whose next token is `text[i]`. 0 is the first candidate, and -1
        means that the text has ended.
    """
    head, target = innermost(output_head(model)), torch.tensor(text, device=model.device)
    with head_input(model) as seen:
        model(input_ids=torch.tensor([prompt + text], device=model.device), use_cache=False)
    hidden = seen[0][0, len(prompt) - 1 : -2]  # (n - 1, H): the last two positions have nothing to guess in the text
    ranks = torch.full((len(heads), len(text) - 1), -1)
    for k, own in enumerate(heads):
        right = target[k + 1 :, None]
        logits = (own.lm_head or head)(own(hidden[: len(right)]))  # (n - 1 - k, V), of one head at a time
        value = logits.gather(-1, right)
        before = torch.arange(logits.shape[-1], device=model.device) < right  # of equal logits, argmax takes the first
        ranks[k, : len(right)] = ((logits > value) | ((logits == value) & before)).sum(-1).cpu()
    return ranks


def build_tree(accuracy: list[list[float]], nodes: int) -> list[list[int]]:
    """The `nodes` paths of candidates that are most likely to be right, most likely first.

    A path (r_1, ..., r_j) takes head 1's candidate of rank r_1, and so on. Its chance is the product of the heads'
    accuracies at those ranks, and the tree grows greedily (Cai et al. 2024, arXiv:2401.10774). So the beginning of
    every path is in the tree too. Paths of chance 0 are left out.
    """
    tree: list[list[int]] = []
    heap = [(-chance, [rank]) for rank, chance in enumerate(accuracy[0])]
    heapq.heapify(heap)
    while heap and len(tree) < nodes:
        negative, path = heapq.heappop(heap)
        if negative == 0:
            break
        tree.append(path)
        if len(path) < len(accuracy):
            for rank, chance in enumerate(accuracy[len(path)]):
                heapq.heappush(heap, (negative * chance, [*path, rank]))
    return tree


def walk(rows: list[torch.Tensor], paths: list[list[int]]) -> tuple[float, list[float | None]]:
    """Tokens per forward pass of a decoder that tries `paths` of candidates, and how often each head was accepted where
    it was reached, or None if it never was.

    `rows` has the result of `ranks_of` for each text. `paths` has the beginnings of each path too, as from
    `build_tree`; a chain is `[[0], [0, 0], ...]`.
    """
    known = {tuple(path) for path in paths}
    num_heads = rows[0].shape[0]
    reached, accepted, passes, tokens = [0] * num_heads, [0] * num_heads, 0, 0
    for ranks in rows:
        columns, at = ranks.T.tolist(), 0
        tokens += len(columns)  # the first token of a text comes from the pass over the prompt
        while at < len(columns):
            guessed, passes, at = columns[at], passes + 1, at + 1  # each pass yields the model's own token
            for k, rank in enumerate(guessed):
                if rank < 0:  # past the end of the text
                    break
                reached[k] += 1
                if tuple(guessed[: k + 1]) not in known:
                    break
                accepted[k] += 1
                at += 1
    return tokens / passes, [a / r if r else None for a, r in zip(accepted, reached, strict=True)]


def _measure(
    model: PreTrainedModel, heads: MedusaHeads, prompts: Sequence[list[int]], ends: set[int], max_new_tokens: int
) -> Decoding:
    greedy_decode(model, heads, prompts[0], ends, 4)  # warm up
    done, speeds = [], []
    for own in (None, heads):
        start = time.perf_counter()
        done.append([greedy_decode(model, own, prompt, ends, max_new_tokens) for prompt in prompts])
        seconds = time.perf_counter() - start  # the last token has been read on the host, so the device is done
        speeds.append(sum(len(d.tokens) for d in done[-1]) / seconds)
    plain, fast = done
    differ = 0
    for prompt, want, got in zip(prompts, plain, fast, strict=True):
        if want.tokens != got.tokens:
            _near_tie_or_raise(model, prompt, want.tokens, got.tokens)
            differ += 1
    return Decoding(
        rows=len(prompts),
        tokens=sum(len(d.tokens) for d in fast),
        tokens_per_second=speeds[1],
        tokens_per_second_without=speeds[0],
        tokens_per_pass=sum(len(d.tokens) - 1 for d in fast) / max(sum(d.passes for d in fast), 1),
        differ=differ,
    )


def _near_tie_or_raise(model: PreTrainedModel, prompt: list[int], want: list[int], got: list[int]) -> None:
    """RuntimeError unless the two tokens at which the texts part are equally likely, but for rounding."""
    at = next(i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b)
    logits = model(input_ids=torch.tensor([prompt + want[:at]], device=model.device), use_cache=False).logits[0, -1]
    gap = (logits[want[at]] - logits[got[at]]).abs().item()
    # A product of several rows adds up in another order than a product of one row. The difference is a few units in the
    # last place of the largest logit.
    allowed = 16 * torch.finfo(logits.dtype).eps * logits.abs().max().item()
    if gap > allowed:
        raise RuntimeError(
            f"Decoding with heads wrote token {got[at]} where greedy decoding writes {want[at]}, {at} tokens into a "
            f"text; their logits differ by {gap:.3g}, and rounding explains {allowed:.3g} at most."
        )
