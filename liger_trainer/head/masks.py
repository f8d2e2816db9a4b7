"""No mask in memory where attention is plainly causal, under torch.compile too.

Without torch.compile, transformers looks at the values of `attention_mask` and `position_ids`. Where nothing is masked
and nothing packed, it tells SDPA `is_causal=True`, which skips half of the work. Traced code cannot look at values, so
each layer reads a (B, 1, S, S) mask and computes both halves. But when a patched model is called without these two
arguments, nothing can be masked or packed. The model is then given a mask of ones, by which transformers sees that
nothing is packed, and `sdpa_mask` of transformers is told that the mask is all ones. transformers still decides whether
anything else needs a mask, such as a sliding window or tokens of an image that see each other.
"""

import functools
import weakref

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

_nothing_is_padding = False  # while the forward of a plain call is traced


_models = weakref.WeakSet()  # those patched now
_replaced = None  # transformers' own function, while ours stands in its place


def install(model) -> None:
    """Have transformers ask here for masks of SDPA while `model` is patched.

    Outside traced calls of patched models nothing changes.
    """
    global _replaced
    if model not in _models:
        weakref.finalize(model, _restore_after_last).atexit = False  # runs after the set below has let go of the model
        _models.add(model)
    if _replaced is None:
        _replaced = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
        ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", _asking(_replaced))


def uninstall(model) -> None:
    """Undo `install`: after the last patched model, transformers' registry is as before."""
    _models.discard(model)
    _restore_after_last()


def _restore_after_last() -> None:
    global _replaced
    current = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    if not _models and getattr(current, "_liger_asks", False):  # else somebody has put another function around ours
        ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", _replaced)
        _replaced = None


def _asking(own):
    @functools.wraps(own)
    def sdpa_mask(*args, **kwargs):
        if _nothing_is_padding and torch.compiler.is_compiling() and not args and _needless(**kwargs):
            return None
        return own(*args, **kwargs)

    sdpa_mask._liger_asks = True
    return sdpa_mask


def _needless(
    *, q_length, kv_length, q_offset=0, kv_offset=0, local_size=None, allow_is_causal_skip=True,
    allow_is_bidirectional_skip=False, **_,
) -> bool:  # fmt: skip
    """Of the arguments of `sdpa_mask`, whether it could return None if it knew that nothing is padding."""
    skip = allow_is_causal_skip or allow_is_bidirectional_skip
    whole = q_length == kv_length and (q_offset, kv_offset) == (0, 0)
    return skip and whole and (local_size is None or kv_length < local_size)


def run_plain(forward, model, args, kwargs):
    """`forward(args, kwargs)`, a forward of `model`; while it is traced, without masks if nothing asks for one."""
    global _nothing_is_padding
    ids = kwargs.get("input_ids")
    if not torch.compiler.is_compiling() or args or ids is None or not _is_plain(model, kwargs):
        return forward(args, kwargs)
    _nothing_is_padding = True
    try:
        return forward(args, kwargs | {"attention_mask": torch.ones_like(ids)})
    finally:
        _nothing_is_padding = False


def _is_plain(model, call) -> bool:
    """Whether `model` decodes text, attends through SDPA in all layers, and nothing in `call` says what to mask.

    Others (state-space layers, towers) may do more with a mask of ones than without one.
    """
    if not isinstance(model, PreTrainedModel):
        return False
    config = model.config
    text = config.get_text_config() is config and not config.is_encoder_decoder and not model._is_stateful
    given = ("attention_mask", "position_ids", "past_key_values")
    return text and config._attn_implementation == "sdpa" and all(call.get(name) is None for name in given)


def without_mask_of_ones(compiled, model):
    """A stand-in for `compiled`, which is `model`, that drops an `attention_mask` (B, S) which masks nothing.

    It looks at the values, which what is traced cannot; the stock trainer's model, where it is not compiled, looks too.
    """

    def forward(**call):
        mask = call.pop("attention_mask", None)
        if mask is not None and not (mask.ndim == 2 and _is_plain(model, call) and bool(mask.all())):
            call["attention_mask"] = mask
        return compiled(**call)

    return forward
