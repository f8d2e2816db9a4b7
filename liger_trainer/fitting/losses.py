"""Runs the losses of the trainers on one micro-batch, with everything in them that takes memory."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Call = Callable[..., Any]
Inputs = dict[str, torch.Tensor]  # the arguments of a call without labels


def of_labels(model: Call, reference: Call | None, inputs: Inputs) -> torch.Tensor:
    """Return the loss of SFT: one call with labels."""
    return model(**inputs, labels=inputs["input_ids"], use_cache=False).loss


def of_pairs(model: Call, reference: Call | None, inputs: Inputs) -> torch.Tensor:
    """Return a loss like DPO's, ORPO's and CPO's: one call for both sequences of each pair."""
    checkpointing, rejected = _scores(model, reference, inputs).chunk(2)
    return -F.logsigmoid(checkpointing - rejected).mean()


def of_answers(model: Call, reference: Call | None, inputs: Inputs) -> torch.Tensor:
    """Return a loss like KTO's: single sequences. KTO's KL estimate is left out, because it saves nothing."""
    return -torch.sigmoid(_scores(model, reference, inputs)).mean()


def sequences(loss: Callable[..., torch.Tensor]) -> int:
    """Return the number of sequences per row."""
    return 2 if loss is of_pairs else 1


def _scores(model: Call, reference: Call | None, inputs: Inputs) -> torch.Tensor:
    arguments: dict[str, Any] = inputs | {"labels": inputs["input_ids"], "fused_lm_head": True, "use_cache": False}
    scores = model(**arguments).log_probs.sum(1)
    if reference is None:
        return scores
    with torch.no_grad():
        reference_scores = reference(**arguments).log_probs.sum(1)
    return scores - reference_scores


def without_adapter(model: nn.Module) -> Call:
    """Return the reference model of a model with an adapter: the same model with the adapter disabled."""

    def call(**inputs: Any) -> Any:
        with model.disable_adapter():
            return model(**inputs)

    return call
