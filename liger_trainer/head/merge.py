"""Merging an adapter into a base whose LM head and embeddings share a weight."""

from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import TrainableTokensWrapper
from torch import nn


def merge(adapted: PeftModel) -> Any:
    """The base of `adapted` with its adapter merged into it.

    Where the adapter changes a tied LM head or tied embeddings, each gets a weight of its own first. Otherwise PEFT
    would merge into both. New rows of tokens that PEFT has tied are the same in both, which then stay tied.

    Raises:
        ValueError: PEFT leaves a part of the adapter unmerged: a LoRA around new rows of tokens on one layer.
    """
    base: Any = adapted.get_base_model()
    head, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
    own_head = _inside(head)
    tied = own_head is not None and own_head.weight is _inside(embeddings).weight
    same = isinstance(head, TrainableTokensWrapper) and head.token_adapter.tied_adapter is not None
    if tied and not same and (head is not own_head or embeddings is not _inside(embeddings)):
        own_head.weight = nn.Parameter(own_head.weight.detach().clone(), requires_grad=False)
        base.config.get_text_config().tie_word_embeddings = base.config.tie_word_embeddings = False
    merged = adapted.merge_and_unload(safe_merge=True)
    kinds = BaseTunerLayer | TrainableTokensWrapper
    if left := [name for name, module in merged.named_modules() if isinstance(module, kinds)]:
        raise ValueError(f"PEFT does not merge a LoRA and trainable_token_indices on one layer, as on {left[0]}")
    return merged


def _inside(module: Any) -> Any:
    """The layer that PEFT's adapters change, without them."""
    while isinstance(module, BaseTunerLayer | TrainableTokensWrapper):
        is_layer = isinstance(module, BaseTunerLayer)
        module = module.get_base_layer() if is_layer else module.original_module
    return module
