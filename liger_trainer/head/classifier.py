"""Binds the forward of models with a classification head, so that their backbone runs on real tokens.

transformers' `GenericForSequenceClassification` scores every position, and returns the score of the last token of each
row whose id is not the padding id. So the position that a row is judged by depends on ids, not on the mask. If all rows
of a call are judged by real tokens, padding is left out. In any other call the model's own code runs on the batch as it
is.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GenericForSequenceClassification

from liger_trainer.patching.core.binding import Binding, call_previous, in_place_of
from liger_trainer.patching.core.hooks import replaced_forward
from liger_trainer.varlen.decide import bound_backbone, decide, why_positions_are_read
from liger_trainer.varlen.groups import SharingRule
from liger_trainer.varlen.host_copies import remember, sent, values_of
from liger_trainer.varlen.unpad_plan import cache_of, use_plan


class ClassifierBinding(Binding):
    """The binding of a model with a classification head.

    Attributes:
        sharing (`SharingRule` or None): When both rows of a pair share what they begin with. The trainer sets it.
    """

    key = "_liger_classifier"
    is_of_model = True

    def __init__(self, function: Callable):
        super().__init__(function)
        self.sharing: SharingRule | None = None


def is_classifier(model: nn.Module) -> bool:
    """Return whether `model` has a classification head that pools as this module knows it."""
    own = GenericForSequenceClassification.forward
    return isinstance(model, GenericForSequenceClassification) and type(model).forward is own


def classifier_binding(model: nn.Module) -> ClassifierBinding:
    """Make the binding for `model`. With it, calls of the backbone leave out padding."""
    return ClassifierBinding(_forward_of(type(model)))  # type: ignore[arg-type] # mypy takes no class for hashable


@functools.cache
def _forward_of(model_class: Any) -> Callable:
    @in_place_of(model_class.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound, backbone = ClassifierBinding.of(self), bound_backbone(self)
        if self.training and cache_of(kwargs) is None:  # a training step reads no cache
            kwargs["use_cache"] = bool(kwargs.get("use_cache"))
        plan = None
        marked = None if bound is None or backbone is None or bound.fallback_active else _with_pooled(self, kwargs)
        if marked is not None and bound is not None and backbone is not None:
            replaced = replaced_forward(self, bound.previous)
            if replaced is not None:
                replaced = f"{replaced} on the {type(self).__name__} may read what padding has"
            decision = decide(
                self, backbone, args, marked, why_positions_are_read(self, kwargs), replaced, bound.sharing
            )
            plan = decision.plan
        with use_plan(plan):
            return call_previous(self, ClassifierBinding, args, kwargs)

    return forward


def _with_pooled(model: Any, call: dict[str, Any]) -> dict[str, Any] | None:
    """Return `call` with `shift_labels` that mark the position by which each row is judged, or None if it is not known.

    If a padding position is marked, `decide` keeps the padding of the batch, as it does for labels.
    """
    ids = call.get("input_ids")
    pad = model.config.get_text_config().pad_token_id
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or pad is None:
        return None
    values = values_of(ids)[0].cpu()  # waits for the device if the host does not know the values
    columns = torch.arange(values.shape[1], device="cpu", dtype=torch.int32)
    pooled = (columns * (values != pad)).argmax(-1, keepdim=True)  # as transformers does
    marks = torch.where(columns == pooled, 0, -100).to(values.dtype)
    on_device = sent(marks, ids.device)
    if on_device is not marks:
        remember(on_device, marks)
    return call | {"shift_labels": on_device}
