"""The losses of the trainers in one micro-batch, as far as they take memory."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Call = Callable[..., Any]


def of_labels(model: Call, reference: Call | None, rows: int, length: int) -> torch.Tensor:
    """SFT: one call with labels."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def of_pairs(model: Call, reference: Call | None, rows: int, length: int) -> torch.Tensor:
    """DPO, ORPO and CPO: the log-probabilities of both sequences of each pair, in one call of twice as many rows."""
    chosen, rejected = _scores(model, reference, 2 * rows, length).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def of_answers(model: Call, reference: Call | None, rows: int, length: int) -> torch.Tensor:
    """KTO: the log-probabilities of single sequences. Its estimate of the divergence keeps nothing."""
    return -torch.sigmoid(_scores(model, reference, rows, length)).mean()


def _scores(model: Call, reference: Call | None, rows: int, length: int) -> torch.Tensor:
    ids = torch.zeros(rows, length, dtype=torch.long)
    scores = model(input_ids=ids, labels=ids, fused_lm_head=True, use_cache=False).log_probs.sum(1)
    if reference is None:
        return scores
    with torch.no_grad():
        expected = reference(input_ids=ids, labels=ids, fused_lm_head=True, use_cache=False).log_probs.sum(1)
    return scores - expected


def without_adapter(model: Any) -> Call:
    """Return the reference model of a model with an adapter: the same model, without it."""

    def call(**inputs: Any) -> Any:
        with model.disable_adapter():
            return model(**inputs)

    return call
