"""Proves on a small copy of a model that rows which start with the same tokens may compute these tokens once."""

from typing import Any

import torch

from liger_trainer.patching.core import probe
from liger_trainer.varlen import unpad_plan, unpadded_backbone
from liger_trainer.varlen.groups import ALWAYS
from liger_trainer.varlen.plan_batch import plan_batch
from liger_trainer.varlen.proof.compare import run, what_differs

_PROMPT_OF_ROW = (0, 0, 0, 1, 1, 2)  # a group of three rows, a group of two, and a row that shares nothing
_PROMPT_LENGTHS = (5, 3, 4)  # prompts are padded on the left, as for generation
_ANSWER_LENGTHS = (2, 5, 1, 4, 4, 3)  # of each row; with its prompt, a row is longer than the window of a small copy
_LONGEST_PROMPT = max(_PROMPT_LENGTHS)


def batch_of_groups() -> dict[str, torch.Tensor]:
    """Return a batch of two groups of rows and one row alone, with labels for their answers."""
    source = probe.generator()
    prompt_of_row = list(_PROMPT_OF_ROW)
    prompts = torch.randint(3, 40, (len(_PROMPT_LENGTHS), _LONGEST_PROMPT), generator=source)[prompt_of_row]
    answers = torch.randint(3, 40, (len(_ANSWER_LENGTHS), max(_ANSWER_LENGTHS)), generator=source)
    lengths = torch.tensor(_PROMPT_LENGTHS)[prompt_of_row, None]
    in_prompt = torch.arange(_LONGEST_PROMPT) >= _LONGEST_PROMPT - lengths
    in_answer = torch.arange(max(_ANSWER_LENGTHS)) < torch.tensor(_ANSWER_LENGTHS)[:, None]
    real = torch.cat((in_prompt, in_answer), 1)
    ids = torch.cat((prompts, answers), 1)
    scored = torch.cat((torch.zeros_like(in_prompt), in_answer), 1)
    return {"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~scored, -100)}


def why_prompts_cannot_be_shared(own: Any, ours: Any, backbone: Any) -> str | None:
    """Return why rows must not share their prompts, or None if nothing differs when they do.

    Args:
        own ([`~transformers.PreTrainedModel`]): A small copy with its own code.
        ours ([`~transformers.PreTrainedModel`]): The same copy, with a backbone that runs on real tokens.
        backbone (`nn.Module`): The backbone of `ours`.
    """
    call = batch_of_groups()
    config = ours.config
    plan = plan_batch(
        config, call | {"use_cache": False}, config._attn_implementation, with_full_batches=True, sharing=ALWAYS
    )
    if plan is None or not plan.saved:
        return "its rows are not known"
    buffers_before = {name: x.clone() for name, x in ours.named_buffers()}
    with unpad_plan.use_plan(plan):
        got = run(ours, call)
    bound = unpadded_backbone.BackboneBinding.of(backbone)
    if not plan.used:
        return "its backbone did not run on them" if bound is None else bound.sharing.never
    for name, x in ours.named_buffers():
        if not torch.equal(x, buffers_before[name]):
            return f"it writes to {name}, which may count tokens"
    differs = what_differs(got, run(own, call))
    return None if differs is None else f"{differs} where rows share what they begin with"
