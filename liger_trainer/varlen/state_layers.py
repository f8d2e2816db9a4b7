"""Layers that keep a state between tokens (a convolution, linear attention, a state space), on real tokens.

Such a layer runs on from token to token, and nothing tells it where a row begins. It alone gets the rows side by side,
padded on the right, with the mask of real tokens, as in a padded batch: what is on the right of a row does not reach
it. Of what it returns the real tokens are taken back. Attention, MLPs, experts, norms and the head never see padding.

On a GPU, a layer with a convolution and a rule that take offsets gets the rows as they are, one after the other
(`use_layer_rows`). The functions that replace these in its globals ask `current_layer_rows`.

The rows travel with the call, in the argument that the decoder makes a mask for: checkpointing runs a layer again in
the backward pass, when the context of the call is gone.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from liger_trainer.patching.core.binding import Binding, SupportsGuardCheck, call_previous, in_place_of
from liger_trainer.varlen.rows import AttentionKind, NotForRows, RowMask, Rows, current_rows

MASK_OF_STATES = "create_recurrent_attention_mask"  # transformers' decoders make their mask with this global
_ROW_ARGUMENTS = {  # they give stock layers the rows of a packed row, which lie side by side here
    "seq_idx",
    "cu_seqlens",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}


class StateBinding(Binding):
    """The binding of a layer that keeps a state.

    Args:
        function (`Callable`): What `forward_of` has made.
        slot (`str`): As in `Binding`.
        own (`Callable`, *optional*): What runs in place of the forward of its class: the same code with another
            convolution and rule. Unset: the forward of its class.
        rest (`SupportsGuardCheck`, *optional*): What `own` relies on. If it no longer holds, the forward of the class
            runs.

    Attributes:
        by_rows (`bool`): Whether `own` was shown to keep rows apart that lie one after the other (`use_layer_rows`).
        on_cpu (`bool`): Whether it runs so on a CPU too, as in its proof.
        in_parts (`Callable` or None): `own` with a convolution that writes queries, keys and values as three tensors.
            It takes the place of `own` where it is proven.
        no_capture_reason (`str` or None): Why its rule cannot be captured as a CUDA graph, or None.
    """

    by_rows = on_cpu = False
    no_capture_reason: str | None = None
    in_parts: Callable | None = None

    def __init__(
        self, function: Callable, slot: str, own: Callable | None = None, rest: SupportsGuardCheck | None = None
    ):
        super().__init__(function, slot)
        self.own, self.rest = own, rest

    def run(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the layer's own code."""
        own = self.own if self.holds(layer) else None
        return call_previous(layer, StateBinding, args, kwargs) if own is None else own(layer, *args, **kwargs)

    def holds(self, layer: nn.Module) -> bool:
        """Return whether `own` runs."""
        if self.own is None or self.previous is not None:
            return False
        return self.rest is None or self.rest.broken(layer) is None


_layer_rows: contextvars.ContextVar[Rows | None] = contextvars.ContextVar("rows of the running layer", default=None)


@contextlib.contextmanager
def use_layer_rows(rows: Rows) -> Iterator[None]:
    """Context manager: the convolution and the rule of a layer start again at each of `rows`."""
    token = _layer_rows.set(rows)
    try:
        yield
    finally:
        _layer_rows.reset(token)


def current_layer_rows() -> Rows | None:
    """Return the rows that the running layer was given one after the other; None where it runs on a batch."""
    return None if torch.compiler.is_compiling() else _layer_rows.get()


@functools.cache
def mask_or_rows(create: Callable) -> Callable:
    """Replace `create`, `create_recurrent_attention_mask`, by a function that returns the rows of the call."""

    @functools.wraps(create)
    def created(*args: Any, **kwargs: Any) -> Any:
        rows = current_rows()
        return create(*args, **kwargs) if rows is None else RowMask(rows)

    return created


@functools.cache
def forward_of(layer_class: Any) -> Callable:
    """Return the forward to bind to the state layers of a class."""
    own = layer_class.forward
    names = list(inspect.signature(own).parameters)[1:]

    @in_place_of(own)
    def forward(self, *args, **kwargs):
        call = dict(zip(names, args, strict=False)) | kwargs
        masks = [name for name, value in call.items() if isinstance(value, RowMask)]
        if len(args) > len(names) or (not masks and current_rows() is not None):
            raise NotForRows(f"{type(self).__name__} keeps a state and is not told where rows begin")
        if not masks:
            return _run(self, args, kwargs)
        return _on_rows(self, call, masks)

    return forward


def _run(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    bound = StateBinding.of(layer)
    if bound is None:
        return call_previous(layer, StateBinding, args, kwargs)
    return bound.run(layer, args, kwargs)


def _on_rows(layer: nn.Module, call: dict[str, Any], masks: list[str]) -> Any:
    mask = call[masks[0]]
    if mask.chunked or mask.unknown is not None:
        raise NotForRows(f"{type(layer).__name__} keeps a state, and its mask is one of attention")
    rows = mask.rows
    rows.attention_kinds.add(AttentionKind.STATE)
    call = {name: value for name, value in call.items() if name not in _ROW_ARGUMENTS}
    if rows.is_whole_batch:
        return _run(layer, (), call | dict.fromkeys(masks))
    bound = StateBinding.of(layer)
    if bound is not None and bound.by_rows and bound.holds(layer):
        if bound.on_cpu or _device_of(call, rows).type == "cuda":
            with use_layer_rows(rows):
                return _run(layer, (), call | dict.fromkeys(masks))
    laid_out = tree_map(lambda x: _side_by_side(x, rows), {n: x for n, x in call.items() if n not in masks})
    real = None if rows.equal else rows.side_by_side[1].to(_device_of(call, rows))
    outputs = _run(layer, (), laid_out | dict.fromkeys(masks, real))
    return tree_map(lambda x: _one_after_the_other(x, rows), outputs)


def _device_of(call: dict[str, Any], rows: Rows) -> torch.device:
    """Where the tokens of a layer are; layers may be spread over devices."""
    found = [x.device for x in call.values() if _is_of_tokens(x, rows)]
    return found[0] if found else rows.offsets.device


def _is_of_tokens(x: Any, rows: Rows) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[:2] == (rows.batch, rows.tokens // rows.batch)


def _side_by_side(x: Any, rows: Rows) -> Any:
    """x (1, T, ...) as (rows, longest, ...), with zeros for padding. What is not of tokens stays as it is."""
    if not _is_of_tokens(x, rows):
        return x
    count, flat = len(rows.lengths), x.flatten(0, 1)
    if not rows.equal:
        places, _ = rows.side_by_side
        padded = flat.new_zeros(count * rows.longest, *flat.shape[1:])
        flat = padded.index_copy(0, places.to(x.device), flat)
    return flat.unflatten(0, (count, rows.longest))


def _one_after_the_other(x: Any, rows: Rows) -> Any:
    """x (rows, longest, ...) as (1, T, ...), without its padding."""
    if not isinstance(x, torch.Tensor) or x.ndim < 2 or x.shape[:2] != (len(rows.lengths), rows.longest):
        return x
    flat = x.flatten(0, 1)
    if not rows.equal:
        places, _ = rows.side_by_side
        flat = flat.index_select(0, places.to(x.device))
    return flat.unflatten(0, (rows.batch, -1))
