"""Merge an adapter into a base model, also where its LM head and its embeddings share a weight."""

from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import TrainableTokensWrapper
from torch import nn

_ADAPTERS = (BaseTunerLayer, TrainableTokensWrapper)


def merge(adapted: PeftModel) -> Any:
    """Return the base of `adapted` with its adapter merged into it.

    Where the adapter changes a tied LM head or tied embeddings, each gets a weight of its own first. Otherwise PEFT
    would merge into both. New rows of tokens that PEFT has tied are the same in both, which then stay tied.

    Raises:
        ValueError: PEFT leaves a part of the adapter unmerged: a LoRA around new rows of tokens on one layer.
    """
    base: Any = adapted.get_base_model()
    head = base.get_output_embeddings()
    embeddings = base.get_input_embeddings()
    plain_head = _without_adapters(head)
    plain_embeddings = _without_adapters(embeddings)
    is_tied = plain_head is not None and plain_head.weight is plain_embeddings.weight
    has_adapter = head is not plain_head or embeddings is not plain_embeddings
    changes_are_tied = isinstance(head, TrainableTokensWrapper) and head.token_adapter.tied_adapter is not None
    if is_tied and has_adapter and not changes_are_tied:
        plain_head.weight = nn.Parameter(plain_head.weight.detach().clone(), requires_grad=False)
        base.config.tie_word_embeddings = False
        base.config.get_text_config().tie_word_embeddings = False
    merged = adapted.merge_and_unload(safe_merge=True)
    for name, module in merged.named_modules():
        if isinstance(module, _ADAPTERS):
            raise ValueError(f"PEFT does not merge a LoRA and trainable_token_indices on one layer, as on {name}")
    return merged


def _without_adapters(module: Any) -> Any:
    """Return the layer that PEFT's adapters change."""
    while isinstance(module, _ADAPTERS):
        is_layer = isinstance(module, BaseTunerLayer)
        module = module.get_base_layer() if is_layer else module.original_module
    return module
