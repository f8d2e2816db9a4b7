"""Rebuilds tensors in the backward pass by elementwise work, so that autograd need not keep them.

There are two of them:

- `down(act(gate) * up)` would keep three tensors of the intermediate width: gate and up for the gradient of their
  product, and the product for the gradient of `down`'s weight. The product is rebuilt.
- The projections after a norm would keep its output. The norm keeps its input anyway, so its output is rebuilt once,
  for all of them.

Where nothing else reads gate and up, their gradients are written over them. The backward pass of a layer then holds
four tensors of the intermediate width at its peak, not five.

Under torch.compile nothing is rebuilt: it does as much by itself. Nor is anything inside the saved-tensor hooks of
others, such as checkpointing and TRL's offloading, which decide for themselves what is kept. Hooks that
are `KeepsValues`, as in `offload.py`, give back the same values, so they keep what is left. Small tensors are kept: to
rebuild one costs the host about 0.1 ms, and a step of few rows would wait for that.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from liger_trainer.patching.core import saved_tensors
from liger_trainer.patching.core.binding import Binding, is_bound
from liger_trainer.patching.core.contracts import KeepsValues
from liger_trainer.patching.core.hooks import has_hooks, home
from liger_trainer.patching.core.pattern import PLAIN_TENSORS

# Forwards in these Python modules keep nothing of what they return: linear layers, LoRA and its parts
_PROJECTIONS = (
    "torch.nn.modules.linear",
    "peft.tuners.lora.layer",
    "transformers.pytorch_utils",
    "liger_trainer.fp8.frozen_layer",
)
_INSIDE = (*_PROJECTIONS, "torch.nn.modules.dropout", "torch.nn.modules.module")
REBUILD_ABOVE_BYTES = 16 << 20  # tensors of up to this size are kept unless a caller says otherwise


class _Rebuilt:
    """Stands for a tensor that can be rebuilt.

    Attributes:
        kept (`int`): How many operations keep this for their backward pass.
        used (`int`): How many of them have asked for the value since it was computed.
    """

    def __init__(self, tensor: torch.Tensor, make: Callable, parents: tuple[torch.Tensor | None, ...]):
        self.tensor = weakref.ref(tensor)
        self.version = tensor._version
        self.make = make
        keep, self.value_of = _hooks()
        # Detached, or they would keep their graphs alive; a detached tensor still has the version of its source
        self.parents = [None if t is None else keep(t.detach()) for t in parents]
        self.numel = tensor.numel()
        self.kept = self.used = 0
        self.value: torch.Tensor | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Become None in a pickle of the tensor that has this as an attribute."""
        return type(None), ()

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is this one, or a view of all of it, and has not been changed."""
        same = tensor is self.tensor() or (tensor._base is not None and tensor._base is self.tensor())
        return same and tensor.numel() == self.numel and tensor.is_contiguous() and tensor._version == self.version

    def get(self, shape: torch.Size) -> torch.Tensor:
        """Return the value. It is computed for the first operation that asks, and dropped after the last."""
        if self.value is None:
            parents = [None if parent is None else self.value_of(parent) for parent in self.parents]
            with torch.no_grad():
                self.value = self.make(*parents)
        value = self.value
        self.used += 1
        if self.used == self.kept:
            self.value, self.used = None, 0
        return value.view(shape)


def rebuildable(
    tensor: torch.Tensor, make: Callable, *parents: torch.Tensor | None, above: int = REBUILD_ABOVE_BYTES
) -> torch.Tensor:
    """Return `tensor` with a note that `make(*parents)` rebuilds it, so that `rebuilding` need not keep it.

    `make` gets the `parents` detached, which are kept anyway, and must compute the same bits. A tensor of at most
    `above` bytes gets no note.
    """
    # The size is asked first, since most tensors of small steps are small. Not in traced code, which would guard it
    if not torch.compiler.is_compiling() and tensor.nbytes > above and _applies(tensor):
        tensor._liger_rebuilt = _Rebuilt(tensor, make, parents)
    return tensor


def is_rebuildable(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has the note of `rebuildable`."""
    return hasattr(tensor, "_liger_rebuilt")


def _applies(tensor: torch.Tensor) -> bool:
    """Return whether autograd would keep `tensor`, and no hooks of others decide about it."""
    return not torch.compiler.is_compiling() and tensor.requires_grad and not other_hooks_active()


def rebuilding(tensor: torch.Tensor, *consumers: torch.nn.Module) -> contextlib.AbstractContextManager:
    """Context manager: autograd saves how to recompute `tensor` instead of the tensor and of views of all of it.

    It does nothing if one of `consumers`, the modules that take `tensor`, or a module inside one has a hook. A hook may
    change the values without autograd seeing it, through `tensor.data` or NumPy.

    A tensor that was changed in place after the note is kept like all others. Changing a kept tensor in place before
    the backward pass is an error, as without this context.
    """
    rebuilt = None if torch.compiler.is_compiling() else getattr(tensor, "_liger_rebuilt", None)
    if rebuilt is None or not _applies(tensor) or any(map(_has_hooks_inside, consumers)):
        return contextlib.nullcontext()

    keep, value_of = _hooks()

    def pack(x: torch.Tensor) -> Any:
        if rebuilt.is_of(x):
            rebuilt.kept += 1
            return x.shape
        return keep(x)

    def unpack(packed: Any) -> torch.Tensor:
        return rebuilt.get(packed) if isinstance(packed, torch.Size) else value_of(packed)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _has_hooks_inside(module: torch.nn.Module) -> bool:
    """Return whether `module`, or one inside it such as a part of its LoRA, has hooks."""
    if has_hooks(module):
        return True
    return any(_has_hooks_inside(child) for child in module._modules.values() if child is not None)


@functools.cache
def forward_rebuilding(forward: Callable) -> Callable:
    """Return the method `forward`, called so that an argument that can be rebuilt is not kept."""

    @functools.wraps(forward)
    def call(self, *args, **kwargs):
        if not torch.compiler.is_compiling():
            for argument in (*args, *kwargs.values()):
                if isinstance(argument, torch.Tensor) and hasattr(argument, "_liger_rebuilt"):
                    with rebuilding(argument, self):
                        return forward(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return call


def call_rebuilding(
    module: Callable,
    gate: Callable,
    a: torch.Tensor,
    b: torch.Tensor,
    reuse: bool = False,
    above: int = REBUILD_ABOVE_BYTES,
) -> torch.Tensor:
    """Return `module(gate(a, b))`, keeping a and b for the backward pass but not the product, whatever `module` is.

    With `reuse`, the gradients of a and b may be written over a and b, see `only_caller_reads`. A product of at most
    `above` bytes is kept.
    """
    x = gate(a, b, reuse_inputs=reuse)
    if torch.compiler.is_compiling() or x.nbytes <= above:
        return module(x)
    consumers = [module] if isinstance(module, torch.nn.Module) else []
    with rebuilding(rebuildable(x, gate, a, b, above=above), *consumers):
        return module(x)


def only_caller_reads(projection: torch.nn.Module, output: torch.Tensor) -> bool:
    """Return whether the caller alone reads this `output` of `projection`, in the backward pass too.

    A matrix product does not keep its result, nor does the sum that adds the output of an adapter. A forward hook, a
    replaced forward, or a weight of a tensor subclass may.
    """
    if torch.compiler.is_compiling() or torch.nn.modules.module._global_forward_hooks or output.grad_fn is None:
        return False
    for module in projection.modules():
        if module._forward_hooks:
            return False
        if "forward" in module.__dict__:  # replaced, if not by us
            ours = Binding.of(module)
            if ours is None or not is_bound(module, ours):
                return False
        if home(type(module).forward) not in (_PROJECTIONS if module is projection else _INSIDE):
            return False
        for parameter in module._parameters.values():
            if parameter is not None and type(parameter) not in PLAIN_TENSORS:
                return False
    return not isinstance(projection, torch.nn.Identity)


def _hooks() -> saved_tensors.Hooks:
    """Return the functions that keep a tensor and find it again: the active saved-tensor hooks, or our own."""
    return saved_tensors.active_saved_tensor_hooks() or (saved_tensors.save_with_version, saved_tensors.load_checked)


def other_hooks_active() -> bool:
    """Return whether saved-tensor hooks of others decide what is kept."""
    hooks = saved_tensors.active_saved_tensor_hooks()
    return hooks is not None and not isinstance(hooks[0], KeepsValues)
