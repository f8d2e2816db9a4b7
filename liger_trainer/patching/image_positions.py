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

from liger_trainer.instance.binding import Binding, own_class
from liger_trainer.instance.guards import Guards, code_guards_of, global_lookups
from liger_trainer.instance.hooks import comes_from, home
from liger_trainer.instance.kind import Kind, Proof
from liger_trainer.patching.rotary import decorated_like, forward_with_globals
from liger_trainer.varlen.host_copies import remember, sent, values_of
from liger_trainer.varlen.known import Known

_INDEX = "get_rope_index"  # of a model: positions of its tokens
_PLACES = "get_placeholder_mask"  # of a model: which tokens are those of images; checks how many
_FEATURES = {"get_image_features": "image_grid_thw", "get_video_features": "video_grid_thw"}  # which are split by sizes
_HELPERS = "get_vision_"  # functions of `transformers.vision_utils` that a tower's forward calls with the sizes
_ROOM = "transformers.vision_utils"
_DECORATORS = ("transformers.utils.", "torch.utils._contextlib")


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
    return tree_map(functools.partial(_sent, device=given[0].device), _alone(function, *args, **named, **more))


def _value_of(x: Any) -> torch.Tensor | None:
    """The values of a tensor of a GPU, if the host knows them."""
    if not isinstance(x, torch.Tensor) or not x.is_cuda or torch.compiler.is_compiling():
        return None
    values = values_of(x)[0]
    return None if values.is_cuda else values


def _alone(function: Callable, *args: Any, **named: Any) -> Any:
    """The result of `function` in one thread: waking others takes longer than these few numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(*args, **named)
    finally:
        torch.set_num_threads(threads)


def _sent(x: Any, device: torch.device) -> Any:
    if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
        return x
    there = sent(x, device)
    remember(there, x)
    return there


@functools.cache
def _method_of(own: Callable, name: str) -> Callable | None:
    """What to bind in the place of a method; None where it is not as it is known."""
    signature, method = inspect.signature(own), None
    if name == _INDEX:
        method = _index_of(own)
    elif name == _PLACES and {"input_ids", "inputs_embeds"} <= signature.parameters.keys():
        method = _places_of(own, signature)
    elif _FEATURES.get(name) in signature.parameters:
        method = _features_of(own, signature, _FEATURES[name])
    if method is not None:
        functools.update_wrapper(method, own)
        method.__signature__ = signature  # type: ignore[attr-defined]
        del method.__wrapped__  # type: ignore[attr-defined]
    return method


def _index_of(own: Callable) -> Callable:
    def get_rope_index(self, *args, **kwargs):
        return on_host(functools.partial(own, self), *args, **kwargs)

    return get_rope_index


def _places_of(own: Callable, signature: inspect.Signature) -> Callable:
    """`get_placeholder_mask` on the host. It looks at embeddings and features for their sizes alone."""

    def get_placeholder_mask(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs).arguments
        embeds = call.get("inputs_embeds")
        if (values := _value_of(call.get("input_ids"))) is None or not isinstance(embeds, torch.Tensor):
            return own(self, *args, **kwargs)
        more = {n: _stand_in(x) for n, x in call.items() if n not in ("self", "input_ids")}
        masks = _alone(own, self, input_ids=values, **more)
        return tree_map(lambda x: Known.of(x, embeds.device) if isinstance(x, torch.Tensor) else x, masks)

    return get_placeholder_mask


def _stand_in(x: Any) -> Any:
    return torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape) if isinstance(x, torch.Tensor) else x


def _features_of(own: Callable, signature: inspect.Signature, sizes: str) -> Callable:
    """`get_image_features` with known `sizes`, by which it splits what its tower returns."""

    def get_features(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs)
        given = call.arguments.get(sizes)
        if (values := _value_of(given)) is not None:
            call.arguments[sizes] = Known.around(given, values)
        return own(*call.args, **call.kwargs)

    return get_features


def _own(module: nn.Module, name: str) -> Any:
    """The method `name` of a class of transformers, or None."""
    cls = own_class(module)
    own = getattr(cls, name, None) if cls.__module__.startswith("transformers.") else None
    return own if own is not None and comes_from(own, "transformers.") else None


def _prove_method(name: str, module: nn.Module) -> tuple[Proof | None, str | None]:
    method = _method_of(_own(module, name), name)
    return (None, f"its {name} takes other arguments") if method is None else (Proof("", name, method), None)


def _method_kind(name: str) -> Kind:
    """The kind of models that have a method `name`, which is then called with values on the host."""
    return Kind(
        lambda module: _own(module, name) is not None, functools.partial(_prove_method, name), lambda module: "",
        guards=lambda module: Guards(own_class(module), [(own_class(module), name, _own(module, name))]),
        binding=functools.partial(Binding, key=f"_liger_{name}"), method=name,
    )  # fmt: skip


def _helpers_of(own: Any) -> list[str]:
    names = getattr(getattr(own, "__code__", None), "co_names", ())
    return [name for name in names if name.startswith(_HELPERS) and _is_theirs(own.__globals__.get(name))]


def _is_tower(module: nn.Module) -> bool:
    """Return whether the forward of `module` computes where its patches lie, and no other method of ours is bound."""
    forward = own_class(module).forward
    return bool(_helpers_of(inspect.unwrap(forward))) and _is_decorated_as_known(forward) and Binding.of(module) is None


def _prove_tower(module: nn.Module) -> tuple[Proof, None]:
    decorated: Any = own_class(module).forward
    own = inspect.unwrap(decorated)
    replaced = tuple((name, _helper(own.__globals__[name])) for name in _helpers_of(own))
    return Proof("", "sizes", decorated_like(decorated, forward_with_globals(own, replaced))), None


def _tower_guards(module: nn.Module) -> Guards:
    cls = own_class(module)
    return Guards(cls, [*global_lookups(inspect.unwrap(cls.forward)), *code_guards_of(cls).lookups])


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


KINDS = (
    Kind(
        _is_tower, _prove_tower, lambda module: "", guards=_tower_guards,
        binding=functools.partial(Binding, key="_liger_sizes"),
    ),
    *map(_method_kind, (_INDEX, _PLACES, *_FEATURES)),
)  # fmt: skip
