"""The proof that rows of a batch which begin alike may share that: what they share is computed once."""

from collections.abc import Callable
from typing import Any

import torch

from liger_trainer.patching.core import probe
from liger_trainer.varlen import unpad_plan, unpadded_backbone
from liger_trainer.varlen.groups import ALWAYS
from liger_trainer.varlen.plan_batch import plan_batch

_PROMPTS = (0, 0, 0, 1, 1, 2)  # of each row: a group of three, one of two, and a row that shares nothing
_PROMPT = (5, 3, 4)  # tokens of each prompt, which are padded on the left as generation pads them
_ANSWERS = (
    2,
    5,
    1,
    4,
    4,
    3,
)  # tokens of each answer; rows are longer than the window of a small copy
_LONGEST_PROMPT = max(_PROMPT)


def batch_of_groups() -> dict[str, torch.Tensor]:
    """Rows of a batch in two groups and one alone, with labels for their answers."""
    source = probe.generator()
    prompts = torch.randint(3, 40, (len(_PROMPT), _LONGEST_PROMPT), generator=source)[list(_PROMPTS)]
    answers = torch.randint(3, 40, (len(_ANSWERS), max(_ANSWERS)), generator=source)
    lengths = torch.tensor(_PROMPT)[list(_PROMPTS), None]
    of_prompts = torch.arange(_LONGEST_PROMPT) >= _LONGEST_PROMPT - lengths
    of_answers = torch.arange(max(_ANSWERS)) < torch.tensor(_ANSWERS)[:, None]
    real = torch.cat((of_prompts, of_answers), 1)
    ids = torch.cat((prompts, answers), 1)
    scored = torch.cat((torch.zeros_like(of_prompts), of_answers), 1)
    return {"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~scored, -100)}


def why_prompts_are_kept(own: Any, ours: Any, backbone: Any, run: Callable, apart: Callable) -> str | None:
    """Name what differs if rows share, or return None.

    Args:
        own ([`~transformers.PreTrainedModel`]): A small copy with its own code.
        ours ([`~transformers.PreTrainedModel`]): The same one, which runs on real tokens.
        backbone (`nn.Module`): The backbone of `ours`.
        run (`Callable`): Runs a copy on a batch: what it computes, the loss and the gradients.
        apart (`Callable`): Names what differs in two results of `run`, or returns None.
    """
    call = batch_of_groups()
    config = ours.config
    plan = plan_batch(
        config, call | {"use_cache": False}, config._attn_implementation, with_full_batches=True, sharing=ALWAYS
    )
    if plan is None or not plan.saved:
        return "its rows are not known"
    kept = {name: x.clone() for name, x in ours.named_buffers()}
    with unpad_plan.use_plan(plan):
        got = run(ours, call)
    bound = unpadded_backbone.BackboneBinding.of(backbone)
    if not plan.used:
        return "its backbone did not run on them" if bound is None else bound.sharing.never
    for name, x in ours.named_buffers():
        if not torch.equal(x, kept[name]):
            return f"it writes to {name}, which may count tokens"
    differs = apart(got, run(own, call))
    return None if differs is None else f"{differs} where rows share what they begin with"
