"""Activation checkpointing as by `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, with less for the host.

PyTorch's function runs some forty calls of Python for each tensor that a layer keeps, about thirty a layer, and the GPU
waits for it in a step of few tokens. Here a tensor costs a few calls, and a parameter none. Random generators are put
back only where the layer has drawn a number. What is computed is the same to the bit.

PyTorch's function runs in all other cases: traced code, saved-tensor hooks of others, function modes such as
`torch.device` as a context, other options, other devices than CPUs and one CUDA GPU.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.utils.checkpoint import CheckpointError

from liger_trainer.instance.kept import hooks_in_force
from liger_trainer.memory.switches import Switch, options_of


class _AllMade(Exception):  # noqa: N818 - no error
    """Raised when a recomputed layer has made the last tensor that was kept."""


class _Placeholder:
    """Stands for a tensor in the graph: where its value will be, and what it must be like."""

    __slots__ = ("__weakref__", "call", "like", "value")

    def __init__(self, call: "_Call", x: torch.Tensor):
        self.call, self.like = call, (x.shape, x.dtype, x.device)
        self.value: torch.Tensor | None = None


class _Call:
    """One call of a layer, and what it takes to run it again."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], device: torch.device):
        self.function, self.args, self.versions = function, args, _versions(args)
        on_gpu = [torch.cuda.default_generators[device.index]] if device.type == "cuda" else []
        self.generators = [torch.default_generator, *on_gpu]
        self.drawn: list[torch.Tensor] = []  # their states, if the layer draws numbers
        self.autocasts = {kind: _autocast_on(kind) for kind in (device.type, "cpu")}
        self.kept: list[weakref.ref[_Placeholder]] = []  # in their order; those that are gone get no value again
        self.backward = -1  # the backward pass for which the layer has run again

    def run(self) -> Any:
        """Return the result of the layer, of which autograd keeps only placeholders."""
        before = [generator.get_state() for generator in self.generators]
        with saved_tensors_hooks(self._keep, _value_of):
            result = self.function(*self.args)
        if not all(torch.equal(x.get_state(), state) for x, state in zip(self.generators, before, strict=True)):
            self.drawn = before
        return result

    def _keep(self, x: torch.Tensor) -> Any:
        if type(x) is Parameter:
            return x
        kept = _Placeholder(self, x)
        self.kept.append(weakref.ref(kept))
        return kept

    def value_of(self, kept: _Placeholder) -> torch.Tensor:
        """Return the tensor that `kept` stands for, once in each backward pass."""
        backward = torch._C._current_graph_task_id()
        if backward != self.backward or backward == -1:  # -1: other code looks at what is kept
            self._run_again()
            self.backward = backward
        value, kept.value = kept.value, None
        if value is None:
            raise CheckpointError("A tensor of a checkpointed layer was asked for twice in one backward pass.")
        return value

    def _run_again(self) -> None:
        waiting = iter(self.kept)
        left = len(self.kept)

        def keep(x: torch.Tensor) -> torch.Tensor:
            nonlocal left
            if type(x) is Parameter:
                return x
            x = x.detach() if x.requires_grad else x  # with its graph, it would keep all that it was made from
            kept, left = next(waiting)(), left - 1
            if kept is not None:
                if kept.like != (like := (x.shape, x.dtype, x.device)):
                    raise CheckpointError(
                        f"A recomputed layer keeps {like} where it kept {kept.like} in the forward pass. It has to "
                        "compute the same both times."
                    )
                kept.value = x
            if not left:
                raise _AllMade
            return x

        if self.versions != _versions(self.args):
            raise RuntimeError(
                "The input of a checkpointed layer has been modified by an inplace operation since its forward pass."
            )
        with contextlib.ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(keep, lambda x: x))
            stack.enter_context(torch.enable_grad())
            if self.drawn:
                stack.enter_context(torch.random.fork_rng([generator.device for generator in self.generators[1:]]))
                for generator, state in zip(self.generators, self.drawn, strict=True):
                    generator.set_state(state)
            for kind, (enabled, dtype) in self.autocasts.items():
                if _autocast_on(kind) != (enabled, dtype):
                    stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            with contextlib.suppress(_AllMade):
                self.function(*self.args)
        if left:
            raise CheckpointError(
                f"A recomputed layer keeps {left} tensors fewer than in the forward pass. It has to compute the same "
                "both times."
            )


def _value_of(kept: Any) -> torch.Tensor:
    return kept.call.value_of(kept) if type(kept) is _Placeholder else kept


def _versions(args: tuple[Any, ...]) -> list[int]:
    return [x._version for x in args if isinstance(x, torch.Tensor)]


def _autocast_on(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def checkpoint(switch: Switch, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call the layer of `switch`, checkpointed."""
    if torch.compiler.is_compiling():  # it cannot trace what is asked of the tensors below
        return switch.checkpointed(function, *args)
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    devices = {x.device for x in tensors}
    plain = len(devices) == 1 and all(device.type in ("cpu", "cuda") for device in devices)
    plain = plain and torch.is_grad_enabled() and not any(x.is_inference() for x in tensors)
    others = hooks_in_force() is not None or torch._C._len_torch_function_stack()
    if plain and not others and options_of(switch.checkpointed) == {"use_reentrant": False}:
        return _Call(function, args, devices.pop()).run()
    return switch.checkpointed(function, *args)
