"""Positions of image patches and tokens, computed on the host, which knows the sizes of the images of a batch.

Models of transformers compute where patches and windows lie, and the positions of tokens in three dimensions, from
sizes that they read back from the GPU, image by image. Each read waits for all that was launched before. Here the same
code gets the values that the host has kept of the batch (`varlen/host_copies.py`), and its results are sent to the GPU.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from liger_trainer.instance import probe
from liger_trainer.instance.binding import Binding, bind, own_class, unbind
from liger_trainer.instance.guards import Guards, NotProven, code_guards_of, global_lookups
from liger_trainer.instance.hooks import comes_from, home
from liger_trainer.patching.rotary import decorated_like, forward_with_globals
from liger_trainer.varlen.host_copies import remember, sent, values_of

_INDEX = "get_rope_index"  # of a model: positions of its tokens
_HELPERS = "get_vision_"  # functions of `transformers.vision_utils` that a tower's forward calls with the sizes
_ROOM = "transformers.vision_utils"
_DECORATORS = ("transformers.utils.", "torch.utils._contextlib")


class IndexBinding(Binding):
    """What is bound in the place of `get_rope_index`."""

    key = "_liger_rope_index"


class SizesBinding(Binding):
    """What is bound to a tower that computes where its patches lie."""

    key = "_liger_sizes"


def swap(model: nn.Module) -> None:
    """Have each part of `model` that computes positions from the sizes of images compute them on the host."""
    for module in model.modules():
        cls = own_class(module)
        if not cls.__module__.startswith("transformers."):
            continue
        index = getattr(cls, _INDEX, None)
        if index is not None and comes_from(index, "transformers.") and _INDEX not in module.__dict__:
            bind(module, IndexBinding(_index_of(cls), _INDEX))  # type: ignore[arg-type]
        elif (binding := _sizes_of(module)) is not None:
            bind(module, binding)


def remove(model: nn.Module) -> None:
    """Undo `swap`."""
    for module in model.modules():
        unbind(module, IndexBinding)
        unbind(module, SizesBinding)


def on_host(function: Callable, *args: Any, kwargs: dict[str, Any] | None = None, **named: Any) -> Any:
    """What `function` returns, computed from the values on the host of the tensors that it is given.

    It runs as it is where these are not all on one GPU, or not all known. `kwargs` are handed on: helpers of
    transformers take from them what the caller has computed.
    """
    more = {} if kwargs is None else {"kwargs": kwargs}
    given = [x for x in tree_leaves((args, named)) if isinstance(x, torch.Tensor)]
    values = () if torch.compiler.is_compiling() or not all(x.is_cuda for x in given) else values_of(*given)
    if not values or any(x.is_cuda for x in values):
        return function(*args, **named, **more)
    known = {id(x): value for x, value in zip(given, values, strict=True)}
    args, named = tree_map(lambda x: known.get(id(x), x), (args, named))
    return tree_map(functools.partial(_sent, device=given[0].device), function(*args, **named, **more))


def _sent(x: Any, device: torch.device) -> Any:
    if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
        return x
    there = sent(x, device)
    remember(there, x)
    return there


@functools.cache
def _index_of(cls: type) -> Callable:
    own = getattr(cls, _INDEX)

    @functools.wraps(own)
    def get_rope_index(self, *args, **kwargs):
        return on_host(functools.partial(own, self), *args, **kwargs)

    get_rope_index.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    del get_rope_index.__wrapped__
    return get_rope_index


def _sizes_of(module: nn.Module) -> SizesBinding | None:
    """What to bind to a tower, or None for any other module."""
    cls = own_class(module)
    own = inspect.unwrap(cls.forward)
    names = getattr(getattr(own, "__code__", None), "co_names", ())
    helpers = [name for name in names if name.startswith(_HELPERS) and _is_theirs(own.__globals__.get(name))]
    if (
        not helpers
        or not _is_decorated_as_known(cls.forward)
        or probe.slot_of(module)[1] is not None
        or Binding.of(module) is not None
    ):
        return None
    replaced = tuple((name, _helper(own.__globals__[name])) for name in helpers)
    try:
        guards = Guards(cls, [*global_lookups(own), *code_guards_of(cls).lookups])
    except NotProven:
        return None
    forward = decorated_like(cls.forward, forward_with_globals(own, replaced))  # type: ignore[arg-type]
    return SizesBinding(forward, probe.slot_of(module)[0], guards=guards)


def _is_decorated_as_known(forward: Any) -> bool:
    """Whether all decorators of a forward are transformers' or PyTorch's, and have what they decorate in a cell."""
    while (inner := getattr(forward, "__wrapped__", None)) is not None:
        cells = getattr(forward, "__closure__", None) or ()
        if not home(forward).startswith(_DECORATORS) or all(cell.cell_contents is not inner for cell in cells):
            return False
        forward = inner
    return comes_from(forward, "transformers.")


def _is_theirs(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and function.__module__ == _ROOM


@functools.cache
def _helper(function: Callable) -> Callable:
    return functools.wraps(function)(functools.partial(on_host, function))
