"""Leaves the masks of text to the decoder in models that make them around it, such as Gemma 4.

The model around the decoder makes a mask for each call. If tokens of an image see each other both ways, that mask is
more than causal, and the batch keeps its padding. Every other mask is what the decoder itself would make of the padding
mask, and a decoder that makes its own masks can leave padding out. So in a call that has a plan, the functions that
make masks return the padding mask. `proof/backbone.py` proves it on a small copy of the whole model without its towers.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import set_zero3_state

from liger_trainer.patching.core.binding import Binding, in_place_of, own_class
from liger_trainer.patching.core.guards import Guards, code_guards_of, global_lookups
from liger_trainer.patching.core.own_globals import decorated_like, forward_with_globals
from liger_trainer.patching.core.pattern import slot_of
from liger_trainer.varlen.host_copies import values_of
from liger_trainer.varlen.proof.small_model import drawn, small_config
from liger_trainer.varlen.unpad_plan import current_plan

# The arguments that a plain causal mask needs, with a window or without. Any other one asks for more than causal.
_CAUSAL = {"config", "inputs_embeds", "attention_mask", "cache", "past_key_values", "position_ids"}
_KINDS_OF_TOKENS = ("mm_token_type_ids", "token_type_ids")  # 0 for text
_IMAGE_TOKEN = 41  # of a small copy; rows of text are drawn from those before it


def made_by(module: nn.Module) -> list[str]:
    """List the names of the functions that make masks in the forward of `module`."""
    code = getattr(inspect.unwrap(own_class(module).forward), "__code__", None)
    return [name for name in getattr(code, "co_names", ()) if name.startswith("create_") and "mask" in name]


def binding_for(around: nn.Module) -> tuple[Binding | None, str | None]:
    """Return (the binding of `around` that leaves masks to its decoder, None), or (None, why there is none)."""
    slot, reason = slot_of(around)
    if reason is not None:
        return None, reason
    cls: Any = own_class(around)  # Any, because mypy does not consider a class hashable
    own = inspect.unwrap(cls.forward)
    replaced = tuple((name, _mask_of_padding(own.__globals__[name])) for name in made_by(around))
    guards = Guards(cls, [*code_guards_of(cls).lookups, *global_lookups(own)])
    ours = decorated_like(cls.forward, forward_with_globals(own, replaced))

    @in_place_of(cls.forward)
    def forward(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    return Binding(forward, slot, guards=guards, key="_liger_masks"), None


@functools.cache
def _mask_of_padding(own: Callable) -> Callable:
    """Return the function that replaces `own`, which makes masks.

    In a call that has a plan it returns the padding mask, unless tokens of images may see each other. In any other call
    it calls `own`.
    """

    @functools.wraps(own)
    def make_mask(*args: Any, **kwargs: Any) -> Any:
        plan = current_plan()
        if plan is None or args or "attention_mask" not in kwargs:
            return own(*args, **kwargs)
        asks_for_more = any(x is not None for name, x in kwargs.items() if name not in _CAUSAL)
        if asks_for_more and _holds_images(plan.given):
            return own(**kwargs)
        return kwargs["attention_mask"]

    return make_mask


def _holds_images(call: dict[str, Any]) -> bool:
    """Return whether some tokens of a call are not text. Waits for the GPU if the host does not know their kinds."""
    kinds = [call[name] for name in _KINDS_OF_TOKENS if call.get(name) is not None]
    return any(bool((values != 0).any()) for values in values_of(*kinds))


def small_whole_copy(model, seed: int, attention: str):
    """Return a small copy of a model of images and text without its towers, in fp32 and training mode on the CPU.

    Raises:
        ValueError: Its config has sizes that are not known, as in `small_copy`.
        Exception: Any error of its class, if it cannot be built without towers.
    """
    config = copy.deepcopy(model.config)
    for name in type(config).sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            setattr(config, name, small_config(part) if part is config.get_text_config() else None)
    if isinstance(getattr(config, "image_token_id", None), int):
        config.image_token_id = _IMAGE_TOKEN
    with set_zero3_state():
        return drawn(
            lambda: own_class(model)._from_config(config, attn_implementation=attention, dtype=torch.float32), seed
        )


def batch_of_text(model, batch: dict[str, Any]) -> dict[str, Any]:
    """Return `batch` with arguments that say that all tokens are text."""
    return batch | {name: torch.zeros_like(batch["input_ids"]) for name in _token_kind_arguments(model)}


def batch_of_images(model, batch: dict[str, Any]) -> dict[str, Any]:
    """Return `batch` with image tokens in place of some tokens of text."""
    real = batch["attention_mask"].bool()
    is_image = real & (torch.arange(real.shape[1]) % 5 > 2)
    ids = batch["input_ids"].masked_fill(is_image, _IMAGE_TOKEN)
    labels = batch["labels"].masked_fill(is_image, -100)
    kinds = {name: is_image.long() for name in _token_kind_arguments(model)}
    return batch | {"input_ids": ids, "labels": labels} | kinds


def _token_kind_arguments(model) -> list[str]:
    """Return the names of the arguments that say which tokens are text, as far as the model's forward takes them."""
    return [name for name in _KINDS_OF_TOKENS if name in inspect.signature(model.forward).parameters]
