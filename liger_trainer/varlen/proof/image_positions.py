"""Positions of image patches and tokens, computed on the host, which knows the sizes of the images of a batch.

Models of transformers compute where patches, windows and the tokens of images lie, and the positions of tokens in three
dimensions, from values that they read back from the GPU, image by image. Each read waits for all that was launched
before. Here the same code gets the values that the host has kept of the batch (`varlen/host_copies.py`), and its
results are sent to the GPU.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from liger_trainer.patching.core.binding import Binding, in_place_of, own_class
from liger_trainer.patching.core.guards import Guards, code_guards_of, global_lookups
from liger_trainer.patching.core.hooks import comes_from, home
from liger_trainer.patching.core.own_globals import decorated_like, forward_with_globals, is_decorated_by
from liger_trainer.patching.core.pattern import PatchPattern, Proof
from liger_trainer.patching.core.probe import one_thread
from liger_trainer.varlen.host_copies import remember, sent, values_of
from liger_trainer.varlen.mirrored_tensor import MirroredTensor

_HELPERS = "get_vision_"  # functions of `transformers.vision_utils` that a tower's forward calls with the sizes
_ROOM = "transformers.vision_utils"
_DECORATORS = ("transformers.utils.", "torch.utils._contextlib")


def on_host(function: Callable, *args: Any, kwargs: dict[str, Any] | None = None, **named: Any) -> Any:
    """Call `function` with the values on the host of the tensors that it is given, and send its results to the GPU.

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
    with one_thread():
        results = function(*args, **named, **more)
    return tree_map(functools.partial(_sent, device=given[0].device), results)


def _value_of(x: Any) -> torch.Tensor | None:
    """Return the values of a tensor of a GPU, if the host knows them."""
    if not isinstance(x, torch.Tensor) or not x.is_cuda or torch.compiler.is_compiling():
        return None
    values = values_of(x)[0]
    return None if values.is_cuda else values


def _sent(x: Any, device: torch.device) -> Any:
    if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
        return x
    there = sent(x, device)
    remember(there, x)
    return there


def _index(own: Callable, call: inspect.BoundArguments) -> Any:
    return on_host(own, *call.args, **call.kwargs)


def _places(own: Callable, call: inspect.BoundArguments) -> Any:
    """Run `get_placeholder_mask` on the host. It reads only the sizes of embeddings and features."""
    given = call.arguments
    embeds = given.get("inputs_embeds")
    values = _value_of(given.get("input_ids"))
    if values is None or not isinstance(embeds, torch.Tensor):
        return own(*call.args, **call.kwargs)
    more = {n: _stand_in(x) for n, x in given.items() if n != "input_ids"}
    with one_thread():
        masks = own(**more, input_ids=values)
    return tree_map(lambda x: MirroredTensor.of(x, embeds.device) if isinstance(x, torch.Tensor) else x, masks)


def _stand_in(x: Any) -> Any:
    return torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape) if isinstance(x, torch.Tensor) else x


def _features(sizes: str, own: Callable, call: inspect.BoundArguments) -> Any:
    """Call `get_image_features` with known `sizes`, so that splitting its tower's output needs no wait."""
    given = call.arguments.get(sizes)
    values = _value_of(given)
    if values is not None:
        call.arguments[sizes] = MirroredTensor.around(given, values)
    return own(*call.args, **call.kwargs)


_METHODS: dict[str, tuple[set[str], Callable]] = {  # of a model -> parameters that it must have, what runs in its place
    "get_rope_index": (set(), _index),  # positions of tokens
    "get_placeholder_mask": ({"input_ids", "inputs_embeds"}, _places),  # which tokens are images; checks how many
    "get_image_features": ({"image_grid_thw"}, functools.partial(_features, "image_grid_thw")),
    "get_video_features": ({"video_grid_thw"}, functools.partial(_features, "video_grid_thw")),
}


def _own(module: nn.Module, name: str) -> Any:
    """Return the method `name` of a class of transformers, or None."""
    cls = own_class(module)
    own = getattr(cls, name, None) if cls.__module__.startswith("transformers.") else None
    return own if own is not None and comes_from(own, "transformers.") else None


def _prove_method(name: str, module: nn.Module) -> tuple[Proof | None, str | None]:
    own, (needed, compute) = _own(module, name), _METHODS[name]
    signature = inspect.signature(own)
    if not needed <= signature.parameters.keys():
        return None, f"its {name} takes other arguments"

    @in_place_of(own, name)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return compute(own, signature.bind(self, *args, **kwargs))

    return Proof("", name, method), None


def _method_pattern(name: str) -> PatchPattern:
    """Make the pattern of models that have a method `name`. It is then called with values on the host."""
    return PatchPattern(
        lambda module: _own(module, name) is not None,
        functools.partial(_prove_method, name),
        lambda module: "",
        guards=lambda module: Guards(own_class(module), [(own_class(module), name, _own(module, name))]),
        binding=functools.partial(Binding, key=f"_liger_{name}"),
        method=name,
    )


def _helpers_of(own: Any) -> list[str]:
    names = getattr(getattr(own, "__code__", None), "co_names", ())
    return [name for name in names if name.startswith(_HELPERS) and _is_theirs(own.__globals__.get(name))]


def _is_tower(module: nn.Module) -> bool:
    """Return whether the forward of `module` computes where its patches lie, and no other method of ours is bound."""
    forward = own_class(module).forward
    known = comes_from(inspect.unwrap(forward), "transformers.") and is_decorated_by(forward, _is_known)
    return known and bool(_helpers_of(inspect.unwrap(forward))) and Binding.of(module) is None


def _is_known(decorated: Any, cells: list) -> bool:
    return home(decorated).startswith(_DECORATORS)


def _prove_tower(module: nn.Module) -> tuple[Proof, None]:
    decorated: Any = own_class(module).forward
    own = inspect.unwrap(decorated)
    replaced = tuple((name, _helper(own.__globals__[name])) for name in _helpers_of(own))
    return Proof("", "sizes", decorated_like(decorated, forward_with_globals(own, replaced))), None


def _tower_guards(module: nn.Module) -> Guards:
    cls = own_class(module)
    return Guards(cls, [*global_lookups(inspect.unwrap(cls.forward)), *code_guards_of(cls).lookups])


def _is_theirs(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and function.__module__ == _ROOM


@functools.cache
def _helper(function: Callable) -> Callable:
    return functools.wraps(function)(functools.partial(on_host, function))


PATTERNS = (
    PatchPattern(
        _is_tower,
        _prove_tower,
        lambda module: "",
        guards=_tower_guards,
        binding=functools.partial(Binding, key="_liger_sizes"),
    ),
    *map(_method_pattern, _METHODS),
)
