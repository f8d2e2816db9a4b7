"""The inputs of recomputed layers, which wait for the backward pass in the host's memory.

With every layer recomputed, what is left on the GPU for the backward pass is the input of each: layers * tokens * width
numbers. `activation_checkpointing_kwargs: {offload: true}` of transformers copies them on the stream that computes.
Here they are copied by the copy engines, while the GPU computes: out while their own layer runs, and back while the
layer behind runs again. The last layer's input stays.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from liger_trainer.memory.pinned_memory import PinnedMemory
from liger_trainer.memory.switches import Switch, options_of
from liger_trainer.patching.core.saved_tensors import active_saved_tensor_hooks

OPTION = "offload"  # of activation_checkpointing_kwargs


class _Made(torch.autograd.Function):
    """Gives a tensor a place in a graph, as the output of a layer has one."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx, dx: torch.Tensor) -> tuple[None, None]:
        raise AssertionError("a recomputed layer has no backward pass of its own")


class _Input:
    """The input of one call of a layer."""

    def __init__(self, x: torch.Tensor, inputs: "HostInputs"):
        self.back: torch.Tensor | None = None  # what came back from the host
        self.x: torch.Tensor | None = x  # as long as it is on the GPU
        self.like = torch.empty_like(x, device="meta")
        self.is_leaf = x.is_leaf
        self.version = x._version
        self.requires_grad = x.requires_grad
        self.device = x.device
        self.changed = False
        self.event: torch.cuda.Event | None = None  # the end of the last copy
        self.before = inputs.last  # of the layer in front
        self.stream = inputs.stream_of(x.device)
        self.slot = inputs.host.take(x.nbytes) if x.is_contiguous() else None
        if self.slot is not None:
            self._copy(self._on_host(), x.detach())

    def __del__(self) -> None:
        if self.back is not None:
            self._wait()  # the memory may go to another tensor, and must not be written to any more

    def _on_host(self) -> torch.Tensor:
        assert self.slot is not None
        return self.slot.bytes.view(self.like.dtype).view(self.like.shape)

    def _copy(self, to: torch.Tensor, of: torch.Tensor) -> None:
        if self.stream is None:
            to.copy_(of)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            to.copy_(of, non_blocking=True)
            self.event = self.stream.record_event()

    def _wait(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)
            self.event = None

    def leave(self) -> None:
        """Give back the GPU's memory, as soon as the copy is there."""
        if self.slot is not None and self.x is not None:
            self._wait()
            self.changed, self.x = self.x._version != self.version, None

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self.x is None and self.back is None:
            self.back = torch.empty_like(self.like, device=self.device)
            self._copy(self.back, self._on_host())

    def value(self) -> torch.Tensor:
        """Return it: itself while its layer runs, or what is equal to it when the layer runs again."""
        if torch._C._current_graph_task_id() != -1:  # in a backward pass, the layer in front is recomputed next
            before = self.before()
            if before is not None:
                before.fetch()
        if self.changed or (self.x is not None and self.x._version != self.version):
            raise RuntimeError(
                "The input of a checkpointed layer has been modified by an inplace operation since its forward pass."
            )
        if self.x is not None:
            return self.x
        self.fetch()
        self._wait()
        x, self.back = self.back, None
        assert x is not None
        if not self.requires_grad:
            return x
        return x.requires_grad_() if self.is_leaf else _Made.apply(x.new_empty(()).requires_grad_(), x)


class HostInputs:
    """Calls checkpointed layers so that their hidden states wait on the host.

    Attributes:
        host (`PinnedMemory`): Where they wait. What it has no room for stays on the GPU.
        last: A weak reference to the input of the last call.
    """

    def __init__(self, host: PinnedMemory):
        self.host = host
        self.last: Callable[[], _Input | None] = lambda: None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def stream_of(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the stream on which is copied, or None for a device that copies at once."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def __call__(self, switch: Switch, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call the layer of `switch`."""
        given = _without_option(switch.checkpointed)
        hidden: Any = args[0] if args else None  # Llama 4's vision encoder passes all of them by name
        plain = torch.is_grad_enabled() and active_saved_tensor_hooks() is None and not torch.compiler.is_compiling()
        plain = plain and options_of(given) is not None
        if not plain or getattr(hidden, "ndim", 0) < 2 or not hidden.is_floating_point():
            known = OPTION in getattr(switch.checkpointed, "keywords", ())  # transformers 5.17 hands it on to PyTorch
            return (given if known else switch.checkpointed)(function, *args)
        before = self.last()
        if before is not None:
            before.leave()
        kept = _Input(hidden, self)
        self.last = weakref.ref(kept)

        def run(device: torch.Tensor, kept: _Input, *others: Any) -> Any:
            return function(kept.value(), *others)

        return given(run, hidden.new_empty(()), kept, *args[1:])  # PyTorch looks for the device of a tensor


def _without_option(checkpointed: Callable[..., Any]) -> Callable[..., Any]:
    """Return PyTorch's function in place of transformers' offloading one, with the other options."""
    if not isinstance(checkpointed, functools.partial) or checkpointed.args:
        return checkpointed
    if checkpointed.func is not checkpoint_of_torch and checkpointed.func.__name__ != "checkpoint_func":
        return checkpointed
    options = {name: value for name, value in checkpointed.keywords.items() if name != OPTION}
    return functools.partial(checkpoint_of_torch, **options)
