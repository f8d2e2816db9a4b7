"""Runs layers that keep a state as a GPU does: by a package's kernels, or with documents of packed rows side by side.

Without a GPU these layers run transformers' PyTorch code, and see full rows. On a GPU, flash-linear-attention computes
the gated delta rule, and knows where documents begin. Layers that cannot be told that get the documents of a packed
micro-batch side by side, in groups of like length, padded on the right (`varlen/state_layers.py`).
"""

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.patching.core.binding import own_class
from liger_trainer.patching.core.own_globals import decorated_like, forward_with_globals
from liger_trainer.varlen import state_layers
from liger_trainer.varlen.proof import convolutions
from liger_trainer.varlen.proof.deferred_convolution import DeferredConvolution
from liger_trainer.varlen.proof.find_state_layers import calls_rule, is_state_layer
from liger_trainer.varlen.proof.packed_rows import choice_behind
from liger_trainer.varlen.rows import Rows

GATED_DELTA_RULE = "chunk_gated_delta_rule"  # the package's function
_CHUNK = 64  # tokens, of the package
_SHARE_OF_LONGEST = 4  # of a row: rows of 2048 are counted with documents of 512 tokens
_SHARE_OF_SHORT = 32  # and less, down to 64


def usual_documents(rows: int, length: int) -> list[int]:
    """Return the tokens of each document in `rows` packed rows of `length` tokens, where they are not known.

    Their lengths go from a quarter of a row down to a 32nd, each four fifths of the one before, again and again until
    all rows are full. Of documents whose lengths are so spread out, groups of like length have much padding.
    """
    spread = [max(1, length // _SHARE_OF_LONGEST)]
    while spread[-1] * 4 // 5 >= max(1, length // _SHARE_OF_SHORT):
        spread.append(spread[-1] * 4 // 5)
    found = []
    for _ in range(rows):
        room = length
        for document in itertools.cycle(spread):
            found.append(min(document, room))
            room -= found[-1]
            if room == 0:
                break
    return found


def layers_by_package(model: nn.Module) -> list[nn.Module]:
    """Return the layers with the gated delta rule, which flash-linear-attention computes where it is installed."""
    return [module for module in model.modules() if _gated_delta_rules_in(own_class(module))]


def layers_side_by_side(model: nn.Module, package: bool) -> list[nn.Module]:
    """Return the layers that cannot be told where the documents of packed rows begin.

    `package` is whether flash-linear-attention is installed, which can be told.
    """
    told = set(layers_by_package(model)) if package else set()
    return [module for module in model.modules() if module not in told and _goes_side_by_side(module)]


def run_as_on_gpu(model: nn.Module, package: bool, lengths: list[int] | None, rows: int) -> None:
    """Make the layers of `model` that keep a state allocate what they do on a GPU. They are replaced on the instance.

    Args:
        model (`nn.Module`): A model that is not copied any more.
        package (`bool`): Whether flash-linear-attention is installed.
        lengths (`list[int]` or `None`): The tokens of each document of a packed micro-batch; None without packing.
        rows (`int`): The rows of the micro-batch, which have equal lengths.
    """
    if package:
        for layer in layers_by_package(model):
            layer_class: Any = own_class(layer)  # Any, because mypy does not consider a class hashable
            layer.forward = functools.partial(_forward_with_package(layer_class), layer)
    if lengths is None:
        return
    documents = Rows(lengths, torch.device("cpu"), rows)
    _compute_places(documents)
    for layer in layers_side_by_side(model, package):
        layer.forward = functools.partial(_on_documents, layer, documents)


def _compute_places(documents: Rows) -> None:
    """Compute the places of tokens outside of the step, where their numbers would be unknown."""
    _ = documents.side_by_side
    if documents.alike:
        _ = documents.order_of_alike
    for group in documents.alike:
        _ = group.rows.side_by_side


def _goes_side_by_side(module: nn.Module) -> bool:
    if not is_state_layer(module):
        return False
    own = inspect.unwrap(own_class(module).forward)
    is_told = bool(convolutions.replacement(own.__globals__)) and not calls_rule(own)  # a convolution alone
    return not is_told


def _on_documents(layer: nn.Module, documents: Rows, *args: Any, **kwargs: Any) -> Any:
    own = own_class(layer).forward
    names = list(inspect.signature(own).parameters)[1:]
    call = dict(zip(names, args, strict=False)) | kwargs
    masks = [name for name in names if name.endswith("mask")]
    return state_layers.run_side_by_side(functools.partial(own, layer), call, masks, documents)


def _gated_delta_rules_in(layer_class: Any) -> list[str]:
    """Return the globals through which the forward of a class calls the rule."""
    own = inspect.unwrap(layer_class.forward)
    code = getattr(own, "__code__", None)
    found = []
    for name in () if code is None else code.co_names:
        choice = choice_behind(own.__globals__.get(name))
        if choice is not None and choice["func_name"] == GATED_DELTA_RULE:
            found.append(name)
    return found


@functools.cache
def _forward_with_package(layer_class: Any) -> Callable:
    decorated = layer_class.forward
    own = inspect.unwrap(decorated)
    replaced: list[tuple[str, Callable]] = [(name, _rule) for name in _gated_delta_rules_in(layer_class)]
    if convolutions.NAME in own.__code__.co_names:
        replaced.append((convolutions.NAME, _convolution))
    return decorated_like(decorated, forward_with_globals(own, tuple(replaced)))


def _convolution(
    hidden_states: torch.Tensor,  # (B, C, L)
    weight: torch.Tensor,  # (C, K)
    bias: torch.Tensor | None = None,  # (C,)
    activation: str | None = None,
    **kwargs: Any,
) -> DeferredConvolution:
    """Convolve as on a GPU, where a layer of this rule gets queries, keys and values as three tensors."""

    def compute(widths: tuple[int, ...] | None) -> Any:
        if widths is None:
            return convolutions.by_kernel(hidden_states, weight, bias, activation)
        return convolutions.parts_by_kernel(hidden_states, weight, bias, activation, None, widths)

    return DeferredConvolution(compute, hidden_states.shape)


def _rule(
    query: torch.Tensor,  # (B, T, H, K)
    key: torch.Tensor,  # (B, T, H, K)
    value: torch.Tensor,  # (B, T, HV, V)
    g: torch.Tensor,  # (B, T, HV)
    beta: torch.Tensor,  # (B, T, HV)
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    return _GatedDeltaRule.apply(query, key, value, g, beta), None


class _GatedDeltaRule(torch.autograd.Function):
    """Allocates what the rule of flash-linear-attention 0.6.0 does: (B, T, H, K) and (B, T, HV, V) to (B, T, HV, V).

    Forward saves normalized queries and keys, their norms, the values, the summed decay and beta, and for each token a
    row of the inverse within its chunk. Backward computes the states of all chunks again.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        query, key = torch.empty_like(query.contiguous()), torch.empty_like(key.contiguous())
        value = value.contiguous()
        norms = [x.new_empty(x.shape[:3], dtype=torch.float32) for x in (query, key)]
        decay = torch.empty_like(g, dtype=torch.float32)
        inverse = key.new_empty(*value.shape[:3], _CHUNK)
        temporary = _states(key, value)
        out = torch.empty_like(value)
        del temporary
        ctx.save_for_backward(query, key, value, *norms, decay, beta, inverse)
        ctx.dtypes = g.dtype, beta.dtype
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, _, decay, beta, _ = ctx.saved_tensors
        gradient = gradient.contiguous()
        temporary = _states(key, value)
        temporary.append(torch.empty_like(gradient))  # of the values, within chunks
        temporary += [_of_chunks(key, value), torch.empty_like(value)]  # of the states, and of the values by them
        per_head = (*value.shape[:3], key.shape[-1])
        of_query, of_key, of_second_key = (key.new_empty(per_head) for _ in range(3))
        temporary += [of_query, of_key, of_second_key, key.new_empty(per_head)]
        of_decay = torch.empty_like(decay)
        of_value = torch.empty_like(value)
        of_beta = torch.empty_like(beta)
        del temporary, of_query, of_key, of_second_key
        results = torch.empty_like(query), torch.empty_like(key), of_value
        return *results, of_decay.to(ctx.dtypes[0]), of_beta.to(ctx.dtypes[1])


def _states(key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """Return what both passes compute: decayed keys, new values, their corrections, and the state of each chunk."""
    decayed = key.new_empty(*value.shape[:3], key.shape[-1])
    return [decayed, torch.empty_like(value), torch.empty_like(value), _of_chunks(key, value)]


def _of_chunks(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    rows, tokens, heads, width = value.shape
    return key.new_empty(rows, -(-tokens // _CHUNK), heads, key.shape[-1], width)
