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

from liger_trainer.memory.switches import Switch, options_of
from liger_trainer.patching.core.saved_tensors import active_saved_tensor_hooks


class _AllMade(Exception):  # noqa: N818 - no error
    """Raised when a recomputed layer has made the last tensor that was kept."""


class _Placeholder:
    """Stands for a tensor in the graph: where its value will be, and what it must be like.

    There is one for each kept tensor, so it has no `__init__`: that would be one more call of Python for each.
    """

    __slots__ = ("__weakref__", "call", "like", "value")

    call: "_CheckpointedCall"
    like: tuple[torch.Size, torch.dtype, torch.device]
    value: torch.Tensor | None


class _CheckpointedCall:
    """One call of a layer, and what it takes to run it again."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], device: torch.device):
        self.function = function
        self.args = args
        self.versions = _versions(args)
        on_gpu = [torch.cuda.default_generators[device.index]] if device.type == "cuda" else []
        self.generators = [torch.default_generator, *on_gpu]
        self.drawn: list[torch.Tensor] = []  # their states, if the layer draws numbers
        self.autocasts = {device.type: _autocast_on(device.type)}
        if device.type != "cpu":
            self.autocasts["cpu"] = _autocast_on("cpu")
        self.kept: list[weakref.ref[_Placeholder]] = []  # in their order; those that are gone get no value again
        self.backward = -1  # the backward pass that has run the layer again

    def run(self) -> Any:
        """Run the layer. Autograd saves placeholders in place of its tensors."""
        before = [generator.get_state() for generator in self.generators]
        with saved_tensors_hooks(self._keep, _value_of):
            result = self.function(*self.args)
        for generator, state in zip(self.generators, before, strict=True):
            if not torch.equal(generator.get_state(), state):
                self.drawn = before
        return result

    def _keep(self, x: torch.Tensor) -> Any:
        """Return what autograd keeps for `x`."""
        if type(x) is Parameter:
            return x
        kept = _Placeholder()
        kept.call = self
        kept.like = (x.shape, x.dtype, x.device)
        kept.value = None
        self.kept.append(weakref.ref(kept))
        return kept

    def run_again(self) -> None:
        """Recompute the layer, and give the placeholders that are still in the graph their values."""
        waiting = iter(self.kept)
        left = len(self.kept)

        def keep(x: torch.Tensor) -> torch.Tensor:
            nonlocal left
            if type(x) is Parameter:
                return x
            x = x.detach() if x.requires_grad else x  # with its graph, it would keep all that it was made from
            kept = next(waiting)()
            left -= 1
            if kept is not None:
                like = (x.shape, x.dtype, x.device)
                if kept.like != like:
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


def _value_of(kept: _Placeholder | Parameter) -> torch.Tensor:
    """Return the tensor that `kept` stands for, once in each backward pass."""
    if type(kept) is not _Placeholder:
        return kept
    call = kept.call
    backward = torch._C._current_graph_task_id()
    if backward != call.backward or backward == -1:  # -1: other code looks at what is kept
        call.run_again()
        call.backward = backward
    value = kept.value
    kept.value = None
    if value is None:
        raise CheckpointError("A tensor of a checkpointed layer was asked for twice in one backward pass.")
    return value


def _versions(args: tuple[Any, ...]) -> list[int]:
    """Return the versions of the tensors in `args`, which change when a tensor is written to."""
    return [x._version for x in args if isinstance(x, torch.Tensor)]


def _autocast_on(kind: str) -> tuple[bool, torch.dtype]:
    """Return whether autocast is on for devices of `kind`, and its dtype."""
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def checkpoint(switch: Switch, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call the layer of `switch`, checkpointed."""
    if torch.compiler.is_compiling():  # it cannot trace what is asked of the tensors below
        return switch.checkpointed(function, *args)
    device = _device_of(args)
    others = active_saved_tensor_hooks() is not None or torch._C._len_torch_function_stack() > 0
    if device is None or others or not torch.is_grad_enabled():
        return switch.checkpointed(function, *args)
    if options_of(switch.checkpointed) != {"use_reentrant": False}:
        return switch.checkpointed(function, *args)
    return _CheckpointedCall(function, args, device).run()


def _device_of(args: tuple[Any, ...]) -> torch.device | None:
    """Return the device of all tensors in `args`, a CPU or a CUDA GPU; None for other devices, or for inference."""
    found: torch.device | None = None
    for x in args:
        if not isinstance(x, torch.Tensor):
            continue
        if x.is_inference() or x.device.type not in ("cpu", "cuda"):
            return None
        if found is not None and x.device != found:
            return None
        found = x.device
    return found
