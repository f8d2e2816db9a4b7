"""Finds the parts of the target that a drafter reads: its decoder layers, its embeddings and its LM head."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from liger_trainer.head.module import base_model_of, head_reason, innermost, output_head


def text_config(model: nn.Module) -> Any:
    """Return the config of the language model."""
    config: Any = base_model_of(model).config
    return config.get_text_config(decoder=True)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers of a transformers or PEFT model. ValueError if they are not found."""
    base: Any = base_model_of(model)
    layers = getattr(base.get_decoder(), "layers", None)
    depth = getattr(text_config(model), "num_hidden_layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != depth:
        raise ValueError(
            f"{type(base).__name__} has no list `layers` of {depth} decoder layers, but a drafter reads their inputs. "
            "Use a decoder-only model of transformers."
        )
    return layers


def layers_to_read(model: nn.Module, numbers: Sequence[int] | None) -> list[nn.Module]:
    """Return the layers whose inputs a drafter reads. Without `numbers`, the ones of `default_layers`."""
    layers = decoder_layers(model)
    return [layers[i] for i in numbers or default_layers(len(layers))]


def default_layers(depth: int) -> tuple[int, int, int]:
    """Return the hidden states that vLLM and SGLang read if the config names none. ValueError below 7 layers."""
    layers = (2, depth // 2, depth - 3)
    if depth < 7:
        raise ValueError(
            f"eagle_layers is unset, which means {list(layers)} for a model of {depth} layers, but the numbers have to "
            f"increase. Set eagle_layers to three increasing numbers from 0 to {depth - 1}."
        )
    return layers


def check_layers(layers: Sequence[int], depth: int) -> None:
    """ValueError unless `layers` are three hidden states of a model of `depth` layers, in increasing order."""
    whole = all(isinstance(i, int) for i in layers)
    if len(layers) != 3 or not whole or not 0 <= layers[0] < layers[1] < layers[2] < depth:
        raise ValueError(
            f"eagle_layers is {list(layers)}; expected three increasing numbers from 0 to {depth - 1}. Number i is the "
            "input of layer i."
        )


def lm_head_of(model: nn.Module) -> nn.Linear:
    """Return the LM head. ValueError if it is not fused, or has a bias or an adapter, which a drafter cannot copy."""
    reason = head_reason(model)
    if reason is not None:
        raise ValueError(f"A drafter learns from the input and the weight of the LM head, but {reason}.")
    head: Any = innermost(output_head(model))
    name = type(base_model_of(model)).__name__
    if hasattr(head, "base_layer"):
        raise ValueError(f"The LM head of {name} has an adapter. Merge it into the model (merge_and_unload) first.")
    if head.bias is not None:
        raise ValueError(f"The LM head of {name} has a bias, but drafters have none. Use a model without one.")
    return head


def embedding_of(model: nn.Module) -> torch.Tensor:
    """Return the weight (V, H) of the input embeddings."""
    base: Any = base_model_of(model)
    return base.get_input_embeddings().weight
