"""The losses of the trainers in one micro-batch, as far as they take memory."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Call = Callable[..., Any]
Inputs = dict[str, torch.Tensor]  # the arguments of a call, but for its labels


def of_labels(model: Call, reference: Call | None, inputs: Inputs) -> torch.Tensor:
    """SFT: one call with labels."""
    return model(**inputs, labels=inputs["input_ids"], use_cache=False).loss


def of_pairs(model: Call, reference: Call | None, inputs: Inputs) -> torch.Tensor:
    """DPO, ORPO and CPO: the log-probabilities of both sequences of each pair, in one call."""
    chosen, rejected = _scores(model, reference, inputs).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def of_answers(model: Call, reference: Call | None, inputs: Inputs) -> torch.Tensor:
    """KTO: the log-probabilities of single sequences. Its estimate of the divergence keeps nothing."""
    return -torch.sigmoid(_scores(model, reference, inputs)).mean()


def sequences(loss: Callable[..., torch.Tensor]) -> int:
    """Return how many sequences a row has in a call."""
    return 2 if loss is of_pairs else 1


def _scores(model: Call, reference: Call | None, inputs: Inputs) -> torch.Tensor:
    given: dict[str, Any] = inputs | {"labels": inputs["input_ids"], "fused_lm_head": True, "use_cache": False}
    scores = model(**given).log_probs.sum(1)
    if reference is None:
        return scores
    with torch.no_grad():
        expected = reference(**given).log_probs.sum(1)
    return scores - expected


def without_adapter(model: Any) -> Call:
    """Return the reference model of a model with an adapter: the same model, without it."""

    def call(**inputs: Any) -> Any:
        with model.disable_adapter():
            return model(**inputs)

    return call
