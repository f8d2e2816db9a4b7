"""Builds a fresh drafter for a model, and attaches it."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from liger_trainer.eagle.drafter import EagleDrafter
from liger_trainer.eagle.files import DrafterConfig
from liger_trainer.eagle.target import check_layers, decoder_layers, default_layers, lm_head_of, text_config
from liger_trainer.head.module import base_model_of

DRAFTER_NAME = "eagle_drafter"  # the attribute of the model


def fresh_config(
    model: nn.Module, draft_vocab_size: int, layers: list[int] | None = None, intermediate_size: int | None = None
) -> DrafterConfig:
    """Return the shape of a drafter for `model`: one layer with the width and the heads of the model's layers.

    ValueError if a number is out of the model's range, or if the config does not give the width of the MLP.
    """
    config = text_config(model)
    head = lm_head_of(model)
    depth = len(decoder_layers(model))
    if layers is None:
        layers = list(default_layers(depth))
    check_layers(layers, depth)
    intermediate_size = intermediate_size or getattr(config, "intermediate_size", None)
    if intermediate_size is None:
        raise ValueError(
            f"The config of {type(base_model_of(model)).__name__} has no intermediate_size. Set "
            "eagle_intermediate_size, the width of the drafter's MLP."
        )
    heads = config.num_attention_heads
    return DrafterConfig(
        hidden_size=head.in_features,
        intermediate_size=intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or head.in_features // heads,
        vocab_size=head.out_features,
        draft_vocab_size=min(draft_vocab_size, head.out_features),
        layers=(layers[0], layers[1], layers[2]),
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(config),
        max_position_embeddings=config.max_position_embeddings,
        base_model_name_or_path=getattr(base_model_of(model), "name_or_path", None) or None,
    )


def _rope_theta(config: Any) -> float:
    """Return the base of the model's rotary angles, or the base for full attention if layers differ."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope
    return float(rope.get("rope_theta") or 10000.0)


def fresh_drafter(model: nn.Module, config: DrafterConfig, d2t: torch.Tensor, t2d: torch.Tensor) -> EagleDrafter:
    """Return a random drafter with a copy of the model's LM head, restricted to the draft vocabulary."""
    drafter = EagleDrafter(config)
    drafter.d2t.copy_(d2t)
    drafter.t2d.copy_(t2d)
    weight = lm_head_of(model).weight.detach()
    with torch.no_grad():
        drafter.lm_head.weight.copy_(weight[drafter.target_ids.to(weight.device)])
    return drafter


def drafter_of(model: nn.Module) -> Any:
    """Return the drafter attached to a transformers model, or None."""
    return getattr(base_model_of(model), DRAFTER_NAME, None)


def attach_drafter(model: nn.Module, drafter: EagleDrafter) -> EagleDrafter:
    """Make `drafter` the child `eagle_drafter` of `model`, trainable, on the LM head's device and in its dtype.

    ValueError if it was made for another width or vocabulary, or if the model already has another drafter.
    """
    head = lm_head_of(model)
    config = drafter.config
    name = type(base_model_of(model)).__name__
    for key, have, want in (
        ("hidden_size", config.hidden_size, head.in_features),
        ("vocab_size", config.vocab_size, head.out_features),
    ):
        if have != want:
            raise ValueError(
                f"The drafter has {key} {have}, but the LM head of {name} has {want}. Use the model that the drafter "
                f"was trained on ({config.base_model_name_or_path})."
            )
    if config.layers is not None:
        check_layers(config.layers, len(decoder_layers(model)))
    if drafter_of(model) not in (None, drafter):
        raise ValueError(f"{name} already has a drafter. Pass a model without one (del model.{DRAFTER_NAME}).")
    drafter.config = replace(config, target_dtype=str(head.weight.dtype).removeprefix("torch."))
    setattr(base_model_of(model), DRAFTER_NAME, drafter.to(head.weight.device, head.weight.dtype).requires_grad_(True))
    return drafter
