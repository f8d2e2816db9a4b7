"""No mask in memory where attention is plainly causal, under torch.compile too.

Without torch.compile, transformers looks at the values of `attention_mask` and `position_ids`. Where nothing is masked
and nothing packed, it tells SDPA `is_causal=True`, which skips half of the work. Traced code cannot look at values, so
each layer reads a (B, 1, S, S) mask and computes both halves. But when a patched model is called without these two
arguments, nothing can be masked or packed. The model is then given a mask of ones, by which transformers sees that
nothing is packed, and `sdpa_mask` of transformers is told that the mask is all ones. transformers still decides whether
anything else needs a mask, such as a sliding window or tokens of an image that see each other.

The same function of ours answers for a call whose padding is left out (`liger_trainer.varlen`), with the mask of its
rows.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from liger_trainer.varlen.attention import STANDS_BEFORE, row_mask

_nothing_is_padding = False  # True while a call is traced in which nothing is padding


_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the models that are patched now
_replaced: Callable | None = None  # transformers' own function, while ours stands in its place
_ours: Callable | None = None  # our function, while it stands there


def install(model: nn.Module) -> None:
    """Put our function in the place of `sdpa_mask` of transformers while `model` is patched.

    It answers like the function that it replaces, except in traced calls of patched models.
    """
    global _replaced, _ours
    if model not in _models:
        weakref.finalize(model, _restore_after_last).atexit = False  # runs after the set below has let go of the model
        _models.add(model)
    if _replaced is None:
        _replaced = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
        _ours = _without_needless_masks(_replaced)
        ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", _ours)


def uninstall(model: nn.Module) -> None:
    """Undo `install`. When no model is patched any more, transformers' registry is as before."""
    _models.discard(model)
    _restore_after_last()


def _restore_after_last() -> None:
    global _replaced, _ours
    if not _models and _ours is not None and ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is _ours:  # nobody has wrapped it
        ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", _replaced)
        _replaced = _ours = None


def _without_needless_masks(own: Callable) -> Callable:
    """The function `own`, but None in place of a mask that masks no more than `is_causal=True` does."""

    @functools.wraps(own)
    def sdpa_mask(*args, **kwargs):
        if (known := row_mask(args, kwargs)) is not None:
            return known
        if _nothing_is_padding and torch.compiler.is_compiling() and not args and _is_needless(**kwargs):
            return None
        return own(*args, **kwargs)

    setattr(sdpa_mask, STANDS_BEFORE, own)
    return sdpa_mask


def _is_needless(
    *, q_length, kv_length, q_offset=0, kv_offset=0, local_size=None, allow_is_causal_skip=True,
    allow_is_bidirectional_skip=False, **_,
) -> bool:  # fmt: skip
    """Whether `sdpa_mask`, called with these arguments, could return None if it knew that nothing is padding."""
    may_return_none = allow_is_causal_skip or allow_is_bidirectional_skip
    is_square = q_length == kv_length and (q_offset, kv_offset) == (0, 0)
    return may_return_none and is_square and (local_size is None or kv_length < local_size)


def run_without_masks(
    forward: Callable[[tuple, dict[str, Any]], Any], model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Run `forward(args, kwargs)`, a forward of `model`. While it is traced, it builds no needless masks."""
    global _nothing_is_padding
    ids = kwargs.get("input_ids")
    if not torch.compiler.is_compiling() or args or ids is None or not _nothing_is_masked(model, kwargs):
        return forward(args, kwargs)
    _nothing_is_padding = True
    try:
        return forward(args, kwargs | {"attention_mask": torch.ones_like(ids)})
    finally:
        _nothing_is_padding = False


def _nothing_is_masked(model: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether `model` decodes text, attends through SDPA in all layers, and nothing in `kwargs` says what to mask.

    Models with state-space layers or with towers are left out, since a mask of ones may change what they do.
    """
    if not isinstance(model, PreTrainedModel):
        return False
    config = model.config
    decodes_text = config.get_text_config() is config and not config.is_encoder_decoder and not model._is_stateful
    masking = ("attention_mask", "position_ids", "past_key_values")
    is_sdpa = config._attn_implementation == "sdpa"
    return decodes_text and is_sdpa and all(kwargs.get(name) is None for name in masking)


def without_mask_of_ones(compiled: Callable, model: nn.Module) -> Callable:
    """A function to call in place of `compiled`, the compiled `model`, without an `attention_mask` that masks nothing.

    It looks at the values of the mask (B, S), which traced code cannot do. So does transformers in a model that is not
    compiled.
    """

    def forward(**kwargs):
        mask = kwargs.pop("attention_mask", None)
        if mask is not None and not (mask.ndim == 2 and _nothing_is_masked(model, kwargs) and bool(mask.all())):
            kwargs["attention_mask"] = mask
        return compiled(**kwargs)

    return forward
