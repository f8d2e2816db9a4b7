"""Our functions in transformers' registries for SDPA: attention by lengths, and no needless mask under torch.compile.

Without torch.compile, transformers looks at the values of `attention_mask` and `position_ids`. Where nothing is masked
and nothing packed, it tells SDPA `is_causal=True`, which skips half of the work. Traced code cannot look at values, so
each layer reads a (B, 1, S, S) mask and computes both halves. But in a call without these two arguments nothing can be
masked or packed. The model is then given a mask of ones, and `sdpa_mask` is told so. transformers still decides whether
anything else needs a mask, such as a sliding window.

Models with sinks or soft caps have no SDPA. They attend by a function of their own under the name `eager`, and no
registry has that name. Each layer asks for its function by `get_interface`: `_interface` answers that call.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch._guards import TracingContext
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from liger_trainer.patching.core.hooks import comes_from
from liger_trainer.varlen.attention import attend_by_rows, refuse_rows
from liger_trainer.varlen.rows import RowMask, row_mask
from liger_trainer.varlen.segments import attend_in_segments, current_segments
from liger_trainer.varlen.unpad_plan import cache_of

_nothing_is_padding = False  # True while a call without padding is traced


def sdpa_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within the segments of a tower, or over the rows of a `RowMask`, or as transformers' SDPA.

    Every patched model runs this under the name `sdpa`. It takes and returns what `sdpa_attention_forward` does.
    """
    if not isinstance(attention_mask, RowMask):  # which a decoder's layers have: they are in no tower
        segments = current_segments()
        if segments is not None:
            return attend_in_segments(segments, query, key, value, attention_mask, *args, **kwargs)
    return attend_by_rows(sdpa_attention_forward, module, query, key, value, attention_mask, *args, **kwargs)


@functools.wraps(sdpa_mask)
def _mask(*args: Any, **kwargs: Any) -> Any:
    """Make the mask of `sdpa_mask`, or of rows that are known; None if it masks no more than `is_causal=True` does."""
    known = row_mask(args, kwargs)
    if known is not None:
        return known
    if _nothing_is_padding and torch.compiler.is_compiling() and not args and _is_needless(**kwargs):
        return None
    return sdpa_mask(*args, **kwargs)


@functools.wraps(eager_mask)
def _eager_mask(*args: Any, **kwargs: Any) -> Any:
    """Make the mask of `eager_mask`, or of rows that are known."""
    known = row_mask(args, kwargs)
    return eager_mask(*args, **kwargs) if known is None else known


def _interface(name: str, default: Callable) -> Callable:
    """Answer for `get_interface` of transformers, with ours over `default`, a model's own eager attention."""
    attention_function = AttentionInterface.get_interface(ALL_ATTENTION_FUNCTIONS, name, default)
    if name != "eager" or attention_function is not default or torch.compiler.is_compiling():
        return attention_function
    wrapper = attend_by_rows if comes_from(attention_function, "transformers.") else refuse_rows
    return functools.partial(wrapper, attention_function)


_FUNCTIONS = (  # transformers' registry, the name and its function there, ours
    (ALL_ATTENTION_FUNCTIONS, "sdpa", sdpa_attention_forward, sdpa_attention),
    (ALL_MASK_ATTENTION_FUNCTIONS, "sdpa", sdpa_mask, _mask),
    (ALL_MASK_ATTENTION_FUNCTIONS, "eager", eager_mask, _eager_mask),
)


_users: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that need our functions in their forward


def install(model: nn.Module) -> None:
    """Register our functions for `model`, unless the user has registered others.

    They answer like transformers' own, except in traced calls and for rows that are known. `release` takes them away.
    """
    _users.add(model)
    # The names stay transformers' own, so that configs and code that compares them see no difference.
    for registry, name, own, ours in _FUNCTIONS:
        if registry[name] is own:
            registry.register(name, ours)
    vars(ALL_ATTENTION_FUNCTIONS).setdefault("get_interface", _interface)


def release(is_patched: Callable[[nn.Module], bool]) -> None:
    """Give transformers its own functions back once no model that needed ours is patched any more (`is_patched`).

    `remove_liger` asks for this, and the garbage collector does not: it could run while another model is compiled,
    which would then fail. Within a compilation ours stay until the next `remove_liger`. A patched copy that is not
    known here registers our functions again in its next call.
    """
    if TracingContext.try_get() is not None:
        return
    if any(map(is_patched, _users)):
        return
    for registry, name, own, ours in _FUNCTIONS:
        if registry[name] is ours:
            registry.register(name, own)
    if vars(ALL_ATTENTION_FUNCTIONS).get("get_interface") is _interface:
        del ALL_ATTENTION_FUNCTIONS.get_interface


def why_attention_is_not_ours(model: nn.Module, asked: str | None = None) -> str | None:
    """Return the reason why layers of `model` would not be given our attention and our masks, or None.

    `asked` is the attention of its config, where the caller knows it.
    """
    install(model)
    if asked is None:
        config: Any = model.config
        asked = config.get_text_config()._attn_implementation
    if asked == "eager" and (
        "eager" in ALL_ATTENTION_FUNCTIONS or vars(ALL_ATTENTION_FUNCTIONS)["get_interface"] is not _interface
    ):
        return "a function of your own is registered for the attention 'eager'"
    for registry, name, _, ours in _FUNCTIONS:
        if name == asked and registry[name] is not ours:
            return f"a function of your own is registered for the attention {asked!r} or for its mask"
    return None


def _is_needless(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> bool:
    """Return whether `sdpa_mask`, called with these arguments, could return None if it knew that nothing is padding."""
    may_return_none = allow_is_causal_skip or allow_is_bidirectional_skip
    is_square = q_length == kv_length and (q_offset, kv_offset) == (0, 0)
    return may_return_none and is_square and (local_size is None or kv_length < local_size)


class TracedCall(Protocol):
    """A call of a model's own forward, as `head/request.py` makes it."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def args(self) -> tuple[Any, ...]: ...

    @property
    def kwargs(self) -> dict[str, Any]: ...

    def run(self) -> Any: ...

    def _replace(self, *, kwargs: dict[str, Any]) -> "TracedCall": ...


def run_without_masks(call: TracedCall) -> Any:
    """Run a traced call of a model's forward, which then builds no needless masks."""
    global _nothing_is_padding
    ids = call.kwargs.get("input_ids")
    if call.args or ids is None or not _nothing_is_masked(call.model, call.kwargs):
        return call.run()
    _nothing_is_padding = True
    try:
        return call._replace(kwargs=call.kwargs | {"attention_mask": torch.ones_like(ids)}).run()
    finally:
        _nothing_is_padding = False


def _nothing_is_masked(model: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return whether `model` decodes text and attends through SDPA, and nothing in `kwargs` says what to mask.

    A mask of ones may change what models with state-space layers or with towers do.
    """
    if not isinstance(model, PreTrainedModel):
        return False
    config = model.config
    decodes_text = config.get_text_config() is config and not config.is_encoder_decoder and not model._is_stateful
    masking = (kwargs.get("attention_mask"), kwargs.get("position_ids"), cache_of(kwargs))
    is_sdpa = config._attn_implementation == "sdpa"
    return decodes_text and is_sdpa and all(x is None for x in masking)


def without_mask_of_ones(compiled: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    """Return a function that calls `compiled`, the compiled `model`, without a mask (B, S) that masks nothing."""

    def forward(**kwargs: Any) -> Any:
        mask = kwargs.pop("attention_mask", None)
        if mask is not None and not (mask.ndim == 2 and _nothing_is_masked(model, kwargs) and bool(mask.all())):
            kwargs["attention_mask"] = mask
        return compiled(**kwargs)

    return forward
