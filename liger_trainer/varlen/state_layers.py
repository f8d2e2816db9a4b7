"""Runs layers that keep a state between tokens (a convolution, linear attention, a state space) on real tokens.

Such a layer carries its state from token to token and does not know where a row begins. So it gets a padded batch: one
row each, padded on the right, with the mask of real tokens. Padding on the right of a row cannot reach its tokens. The
real tokens are then taken out of its output. Only these layers see padding. Rows of very different lengths run in
several calls, each with rows of like length (`alike.py`).

On a GPU, a layer with a convolution and a rule that accept row offsets gets the concatenated rows instead
(`use_layer_rows`). The functions that replace these two among its globals call `current_layer_rows`.

The rows are passed in the layer's mask argument. A context variable would not do: checkpointing runs the layer again in
backward, when the context of the call is gone.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from liger_trainer.patching.core.binding import Binding, SupportsGuardCheck, call_previous, in_place_of
from liger_trainer.varlen.rows import AttentionKind, LikeRows, NotForRows, RowMask, Rows, current_rows

MASK_OF_STATES = "create_recurrent_attention_mask"  # the global that transformers' decoders make the mask with
_ROW_ARGUMENTS = {  # tell a stock layer the rows of a packed row; not passed on, since the layout is another one here
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
        function (`Callable`): The result of `forward_of`.
        slot (`str`): As in `Binding`.
        own (`Callable`, *optional*): Replaces the forward of the layer's class: the same code with another convolution
            and rule. Unset: the forward of the class runs.
        rest (`SupportsGuardCheck`, *optional*): What `own` relies on. If it no longer holds, the forward of the class
            runs.

    Attributes:
        by_rows (`bool`): Whether a proof has shown that `own` keeps concatenated rows apart (`use_layer_rows`).
        on_cpu (`bool`): Whether it runs on concatenated rows on a CPU too, as its proof does.
        in_parts (`Callable` or None): `own` with a convolution that writes queries, keys and values as three tensors.
            It replaces `own` once it is proven.
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
        """Call `own`, or the forward of the class if `own` may not run."""
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
    """Context manager: the convolution and the rule of a layer reset their state at the start of each row."""
    token = _layer_rows.set(rows)
    try:
        yield
    finally:
        _layer_rows.reset(token)


def current_layer_rows() -> Rows | None:
    """Return the concatenated rows that the running layer was given, or None if it runs on a batch."""
    return None if torch.compiler.is_compiling() else _layer_rows.get()


@functools.cache
def mask_or_rows(create: Callable) -> Callable:
    """Return a function that replaces `create_recurrent_attention_mask` and returns the rows of the call."""

    @functools.wraps(create)
    def created(*args: Any, **kwargs: Any) -> Any:
        rows = current_rows()
        return create(*args, **kwargs) if rows is None else RowMask(rows)

    return created


@functools.cache
def forward_of(layer_class: Any) -> Callable:
    """Return the forward to bind to the layers of a class that keep a state."""
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
    return run_side_by_side(lambda **laid_out: _run(layer, (), laid_out), call, masks, rows)


def run_side_by_side(run: Callable, call: dict[str, Any], masks: list[str], rows: Rows) -> Any:
    """Run a layer on rows side by side, padded on the right, and return its outputs without the padding.

    Rows of very different lengths run in groups of like length, which need less padding.

    Args:
        run (`Callable`): Runs the layer. It takes the arguments by name.
        call (`dict`): The arguments of the layer, with the rows concatenated.
        masks (`list[str]`): The arguments that get the mask of real tokens, or None if the rows are of equal length.
        rows (`Rows`): The rows.

    Raises:
        NotForRows: In groups, and an output other than those of tokens is a tensor.
    """
    groups = rows.alike
    if not groups:
        return _run_padded(run, call, masks, rows)
    found = []
    for group in groups:
        taken = tree_map(functools.partial(_taken, rows=rows, group=group), call)
        found.append(_run_padded(run, taken, masks, group.rows))
    return _joined(found, rows)


def _run_padded(run: Callable, call: dict[str, Any], masks: list[str], rows: Rows) -> Any:
    laid_out = tree_map(lambda x: _side_by_side(x, rows), {n: x for n, x in call.items() if n not in masks})
    real = None if rows.equal else rows.side_by_side[1].to(_device_of(call, rows))
    outputs = run(**laid_out, **dict.fromkeys(masks, real))
    return tree_map(lambda x: _one_after_the_other(x, rows), outputs)


def _taken(x: Any, rows: Rows, group: LikeRows) -> Any:
    """Return the tokens of a group (1, t, ...) from x (1, T, ...)."""
    if not _is_of_tokens(x, rows):
        return x
    return x.flatten(0, 1).index_select(0, group.places.to(x.device))[None]


def _joined(outputs: list[Any], rows: Rows) -> Any:
    """Return the outputs of all groups as those of all rows, in the order of `rows`."""
    leaves = [tree_flatten(output)[0] for output in outputs]
    joined = [_joined_leaf(parts, rows) for parts in zip(*leaves, strict=True)]
    return tree_unflatten(joined, tree_flatten(outputs[0])[1])


def _joined_leaf(parts: tuple[Any, ...], rows: Rows) -> Any:
    if not any(isinstance(part, torch.Tensor) for part in parts):
        return parts[0]
    for part, group in zip(parts, rows.alike, strict=True):
        if not _is_of_tokens(part, group.rows):
            raise NotForRows("a layer that keeps a state returns a tensor that is not of tokens")
    flat = torch.cat([part.flatten(0, 1) for part in parts])
    return flat.index_select(0, rows.order_of_alike.to(flat.device)).unflatten(0, (rows.batch, -1))


def _device_of(call: dict[str, Any], rows: Rows) -> torch.device:
    """Return the device of the layer's tokens. Layers may be on several devices."""
    found = [x.device for x in call.values() if _is_of_tokens(x, rows)]
    return found[0] if found else rows.offsets.device


def _is_of_tokens(x: Any, rows: Rows) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[:2] == (rows.batch, rows.tokens // rows.batch)


def _side_by_side(x: Any, rows: Rows) -> Any:
    """Return x (1, T, ...) as (rows, longest, ...), padded with zeros. Anything without tokens is returned as it is."""
    if not _is_of_tokens(x, rows):
        return x
    count = len(rows.lengths)
    flat = x.flatten(0, 1)
    if not rows.equal:
        places, _ = rows.side_by_side
        padded = flat.new_zeros(count * rows.longest, *flat.shape[1:])
        flat = padded.index_copy(0, places.to(x.device), flat)
    return flat.unflatten(0, (count, rows.longest))


def _one_after_the_other(x: Any, rows: Rows) -> Any:
    """Return x (rows, longest, ...) as (1, T, ...), without padding."""
    if not isinstance(x, torch.Tensor) or x.ndim < 2 or x.shape[:2] != (len(rows.lengths), rows.longest):
        return x
    flat = x.flatten(0, 1)
    if not rows.equal:
        places, _ = rows.side_by_side
        flat = flat.index_select(0, places.to(x.device))
    return flat.unflatten(0, (rows.batch, -1))
