"""Merging an adapter into a base whose LM head and embeddings share a weight."""

from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn


def merge(adapted: PeftModel) -> Any:
    """The base of `adapted` with its adapter merged into it.

    Where the adapter changes a tied LM head or tied embeddings, each gets a weight of its own first. Otherwise PEFT
    would merge into both.
    """
    base: Any = adapted.get_base_model()
    head, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
    own_head = getattr(head, "base_layer", head)
    tied = own_head is not None and own_head.weight is getattr(embeddings, "base_layer", embeddings).weight
    if tied and (isinstance(head, BaseTunerLayer) or isinstance(embeddings, BaseTunerLayer)):
        own_head.weight = nn.Parameter(own_head.weight.detach().clone(), requires_grad=False)
        base.config.get_text_config().tie_word_embeddings = base.config.tie_word_embeddings = False
    return adapted.merge_and_unload(safe_merge=True)
