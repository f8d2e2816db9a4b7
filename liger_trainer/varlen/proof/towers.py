"""Runs the attention of vision and audio towers once for all segments (images or windows), not once for each.

A tower is the encoder of images or sound next to a decoder of text. Its attention splits the tokens into segments and
calls the attention function for each. A patched attention runs the same code, which is told that all tokens are one
segment. So it calls the attention function once, and that call gets the true segments
(`liger_trainer.varlen.segments`). The proof runs clones of the module in training mode with its own split and with
ours. Values and gradients must agree.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.patching.core import probe
from liger_trainer.patching.core.binding import Binding, bind, call_previous, in_place_of, own_class
from liger_trainer.patching.core.guards import NotProven, code_guards_of
from liger_trainer.patching.core.hooks import comes_from
from liger_trainer.patching.core.pattern import PatchPattern, Proof
from liger_trainer.varlen import registry
from liger_trainer.varlen.segments import NotInSegments, segments_of, use_segments

OPERATION = "varlen_attention"
_OFFSETS = "cu_seqlens"
_LENGTHS = (5, 1, 4, 5, 2)
_RTOL = 1e-4  # of the largest element, in fp32; a token of another segment moves it by 1e-2 and more


class TowerBinding(Binding):
    """The binding of a tower's attention. It may lie around another binding of the same module, and then calls it."""

    key = "_liger_tower"


def is_candidate(module: nn.Module) -> bool:
    """Return whether a module looks like an attention that takes the offsets of segments."""
    forward = inspect.unwrap(own_class(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and _OFFSETS in code.co_varnames and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _why_not(module: nn.Module) -> str | None:
    """Return why the attention of `module` cannot be ours, or None."""
    cls = own_class(module)
    attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if not (comes_from(cls.forward, "transformers.") and cls.__module__.startswith("transformers.")):
        return f"{cls.__name__} is not a class of transformers with its own forward"
    if attention != "sdpa":
        return f"attn_implementation is {attention!r}, which stays as it is"
    return registry.why_attention_is_not_ours(module)


@functools.cache
def _forward_of(cls: type[nn.Module]) -> Callable:
    """Make the forward to bind to attentions of one class."""
    at = list(inspect.signature(cls.forward).parameters).index(_OFFSETS) - 1  # place of the offsets after `self`

    @in_place_of(cls.forward)
    def forward(self, *args, **kwargs):
        offsets = args[at] if len(args) > at else kwargs.get(_OFFSETS)
        is_stock = offsets is None or torch.compiler.is_compiling() or self.config._attn_implementation != "sdpa"
        if is_stock or registry.why_attention_is_not_ours(self) is not None:
            return call_previous(self, TowerBinding, args, kwargs)
        segments = segments_of(offsets)
        if len(args) > at:
            whole_args, whole_kwargs = (*args[:at], segments.whole, *args[at + 1 :]), kwargs
        else:
            whole_args, whole_kwargs = args, kwargs | {_OFFSETS: segments.whole}
        try:
            with use_segments(segments):
                output = call_previous(self, TowerBinding, whole_args, whole_kwargs)
            if segments.calls == 1:
                return output
            reason = f"it asks for attention {segments.calls} times"
        except NotInSegments as error:
            reason = str(error)
        bound = TowerBinding.of(self)
        if bound is not None:
            bound.fall_back(reason)
        return call_previous(self, TowerBinding, args, kwargs)

    return forward


def prove(module: nn.Module) -> tuple[Proof | None, str | None]:
    """Return (that one call attends in all segments, None), or (None, what differs)."""
    reason = _why_not(module)
    if reason is not None:
        return None, reason
    forward: Any = _forward_of(own_class(module))  # type: ignore[arg-type]
    copies = [_drawn(module) for _ in range(2)]
    bound = bind(copies[1], TowerBinding(forward))
    given = _inputs(copies[0])
    want, got = (_run(copy, given) for copy in copies)
    if bound.fallback_active:
        return None, "it does not attend once to all tokens of its segments"
    if not all(probe.allclose_to_max(x, y, _RTOL) for x, y in zip(got, want, strict=True)):
        return None, "within segments, values or gradients differ from its own"
    return Proof(OPERATION, "one attention for all images or windows", forward), None


def _drawn(module: nn.Module) -> nn.Module:
    """Return a clone in training mode with random weights."""
    copy = probe.clone(module, probe.generator())
    with torch.no_grad():
        for parameter in copy.parameters():  # with `clone`'s values, each token would attend to one other alone
            if parameter.ndim > 1:
                parameter.sub_(1).mul_(2 / parameter.shape[-1] ** 0.5)
    probe.set_training(copy, True)
    return copy


def _inputs(module: nn.Module) -> dict[str, Any]:
    """Make random arguments for the forward of an attention, under the names that transformers uses."""
    names = inspect.signature(own_class(module).forward).parameters
    source, tokens = probe.generator(), sum(_LENGTHS)
    first = next(child for child in module.modules() if isinstance(child, nn.Linear))
    given: dict[str, Any] = {"hidden_states": probe.randn((tokens, first.in_features), source)}
    given[_OFFSETS] = torch.tensor([0, *_LENGTHS], device="cpu").cumsum(0).int()
    if "position_embeddings" in names:
        head_dim = int(getattr(module, "head_dim", None) or module.head_size)
        angles = probe.randn((tokens, head_dim), source)
        given["position_embeddings"] = angles.cos(), angles.sin()
    for name, parameter in names.items():
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            given.setdefault(name, None)
    return {name: value for name, value in given.items() if name != "self"}


def _run(module: nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
    """Return the result of a module, and the gradients of its input and parameters."""
    error: Exception | None = None
    for shape in ((-1,), (1, -1)):  # a tower's tokens, or a batch of one row of them
        x = given["hidden_states"].unflatten(0, shape).clone().requires_grad_()
        try:
            y = module(**(given | {"hidden_states": x}))
        except (RuntimeError, ValueError, IndexError) as failed:
            error = failed
            continue
        y = y[0] if isinstance(y, tuple) else y
        leaves = [x, *module.parameters()]
        dy = probe.randn(y.shape, probe.generator())
        return [y, *torch.autograd.grad(y, leaves, dy, materialize_grads=True)]
    raise NotProven(str(error))


PATTERN = PatchPattern(
    is_candidate,
    prove,
    lambda module: OPERATION,
    guards=lambda module: code_guards_of(own_class(module)),
    binding=TowerBinding,
    is_rare=True,
)
