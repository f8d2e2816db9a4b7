"""Positions of image patches and tokens, computed on the host, which knows the sizes of the images of a batch.

Models of transformers compute where patches, windows and the tokens of images lie, and the three-dimensional positions
of tokens. For that they read sizes and ids back from the GPU, image by image, and each read waits for everything that
was launched before. Here the same code runs on the values of the batch that the host has kept
(`varlen/host_copies.py`), and its results are sent to the GPU.
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

_HELPER_PREFIX = "get_vision_"  # of the functions that a tower's forward calls with the sizes of images
_HELPER_MODULE = "transformers.vision_utils"
_DECORATORS = ("transformers.utils.", "torch.utils._contextlib")  # decorators of a forward that are known


def on_host(function: Callable, *args: Any, kwargs: dict[str, Any] | None = None, **named: Any) -> Any:
    """Call `function` with the host's values of its tensors, and send its results to the GPU.

    If its tensors are not all on the GPU, or the host does not know all their values, it gets the tensors themselves.
    `kwargs` are handed on unchanged: transformers' helpers take from them what their caller has computed already.
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
    """Return the host's values of a GPU tensor, or None if the host does not know them."""
    if not isinstance(x, torch.Tensor) or not x.is_cuda or torch.compiler.is_compiling():
        return None
    values = values_of(x)[0]
    return None if values.is_cuda else values


def _sent(x: Any, device: torch.device) -> Any:
    """Send a result to the GPU, and remember its values. Anything but a CPU tensor is returned as it is."""
    if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
        return x
    on_device = sent(x, device)
    remember(on_device, x)
    return on_device


def _rope_index(own: Callable, call: inspect.BoundArguments) -> Any:
    """Run `get_rope_index` on the host."""
    return on_host(own, *call.args, **call.kwargs)


def _placeholder_mask(own: Callable, call: inspect.BoundArguments) -> Any:
    """Run `get_placeholder_mask` on the host. It reads ids, and only the shapes of embeddings and features."""
    arguments = call.arguments
    embeds = arguments.get("inputs_embeds")
    values = _value_of(arguments.get("input_ids"))
    if values is None or not isinstance(embeds, torch.Tensor):
        return own(*call.args, **call.kwargs)
    others = {name: _of_this_shape(x) for name, x in arguments.items() if name != "input_ids"}
    with one_thread():
        masks = own(**others, input_ids=values)
    return tree_map(lambda x: MirroredTensor.of(x, embeds.device) if isinstance(x, torch.Tensor) else x, masks)


def _of_this_shape(x: Any) -> Any:
    """Return a CPU tensor with the shape and dtype of `x` and the memory of one element."""
    return torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape) if isinstance(x, torch.Tensor) else x


def _features(sizes: str, own: Callable, call: inspect.BoundArguments) -> Any:
    """Call a method that splits its tower's output by the argument `sizes`, whose values the host knows."""
    on_device = call.arguments.get(sizes)
    values = _value_of(on_device)
    if values is not None:
        call.arguments[sizes] = MirroredTensor.around(on_device, values)
    return own(*call.args, **call.kwargs)


_METHODS: dict[str, tuple[set[str], Callable]] = {  # a model's method -> (parameters that it must have, replacement)
    "get_rope_index": (set(), _rope_index),  # positions of tokens
    # Which tokens are images. It also checks their number.
    "get_placeholder_mask": ({"input_ids", "inputs_embeds"}, _placeholder_mask),
    "get_image_features": ({"image_grid_thw"}, functools.partial(_features, "image_grid_thw")),
    "get_video_features": ({"video_grid_thw"}, functools.partial(_features, "video_grid_thw")),
}


def _method_of(module: nn.Module, name: str) -> Any:
    """Return the method `name` of a class of transformers, or None."""
    cls = own_class(module)
    own = getattr(cls, name, None) if cls.__module__.startswith("transformers.") else None
    return own if own is not None and comes_from(own, "transformers.") else None


def _prove_method(name: str, module: nn.Module) -> tuple[Proof | None, str | None]:
    """Return the proof of a replacement. It runs the same code on other tensors, so only its parameters are checked."""
    own = _method_of(module, name)
    needed, compute = _METHODS[name]
    signature = inspect.signature(own)
    if not needed <= signature.parameters.keys():
        return None, f"its {name} takes other arguments"
    if "expand_as" in inspect.unwrap(own).__code__.co_names:
        return None, f"its {name} makes a mask as large as the embeddings, which takes the host longer than waiting"

    @in_place_of(own, name)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return compute(own, signature.bind(self, *args, **kwargs))

    return Proof("", name, method), None


def _method_pattern(name: str) -> PatchPattern:
    """Make the pattern of models that have a method `name`. It is then called with values on the host."""
    return PatchPattern(
        lambda module: _method_of(module, name) is not None,
        functools.partial(_prove_method, name),
        lambda module: "",
        guards=lambda module: Guards(own_class(module), [(own_class(module), name, _method_of(module, name))]),
        binding=functools.partial(Binding, key=f"_liger_{name}"),
        method=name,
    )


def _helpers_of(own: Any) -> list[str]:
    """Return the names of transformers' helpers that a forward calls."""
    names = getattr(getattr(own, "__code__", None), "co_names", ())
    return [name for name in names if name.startswith(_HELPER_PREFIX) and _is_helper(own.__globals__.get(name))]


def _is_tower(module: nn.Module) -> bool:
    """Return whether the forward of `module` computes where its patches lie, and no other method of ours is bound."""
    forward = own_class(module).forward
    known = comes_from(inspect.unwrap(forward), "transformers.") and is_decorated_by(forward, _is_known_decorator)
    return known and bool(_helpers_of(inspect.unwrap(forward))) and Binding.of(module) is None


def _is_known_decorator(decorated: Any, cells: list) -> bool:
    return home(decorated).startswith(_DECORATORS)


def _prove_tower(module: nn.Module) -> tuple[Proof, None]:
    """Return the proof of a tower's forward with its helpers on the host. There is nothing to compare: same code."""
    decorated: Any = own_class(module).forward
    own = inspect.unwrap(decorated)
    replaced = tuple((name, _helper_on_host(own.__globals__[name])) for name in _helpers_of(own))
    return Proof("", "sizes", decorated_like(decorated, forward_with_globals(own, replaced))), None


def _tower_guards(module: nn.Module) -> Guards:
    cls = own_class(module)
    return Guards(cls, [*global_lookups(inspect.unwrap(cls.forward)), *code_guards_of(cls).lookups])


def _is_helper(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and function.__module__ == _HELPER_MODULE


@functools.cache
def _helper_on_host(function: Callable) -> Callable:
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
