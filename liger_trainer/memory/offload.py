"""Swaps the activations of layers out to the host's memory, and in again for their backward pass.

The tensors that autograd keeps of such a layer are copied to the host while the GPU computes the next layers, and
back while it computes the backward pass of the layers behind. So it costs neither the GPU's memory nor its time, as
long as the copies keep up with the layers. `plan.py` chooses these layers.

Storages are copied as a whole: tensors that share one, such as views, share the copy. Weights, small tensors, and the
inputs of the layer besides its hidden states stay on the GPU. A tensor that is changed in place after it was kept is an
error, as without this.

PyTorch's `save_on_cpu` and TRL's `OffloadActivations` copy a tensor back only when the backward pass asks for it. That
takes longer than to recompute the layer.
"""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from liger_trainer.memory.pinned_memory import PinnedMemory, Slot
from liger_trainer.memory.switches import tensors_in
from liger_trainer.patching.core.contracts import KeepsValues
from liger_trainer.patching.core.saved_tensors import SavedTensor, load_checked, modified_message, save_with_version


class _Storage:
    """The storage of one or several tensors that autograd keeps of a call."""

    def __init__(self, call: "_OffloadedCall", storage: torch.UntypedStorage):
        self.call, self.size = call, storage.nbytes()
        self.storage: torch.UntypedStorage | None = storage  # as long as it is on the GPU
        self.tensors: list[SavedTensor] = []  # in it, as long as it is on the GPU
        self.slot: Slot | None = None  # of the copy on the host
        self.back: torch.Tensor | None = None  # uint8 (size,), swapped in
        self.broken: str | None = None  # why the copy must not be used

    def __del__(self) -> None:
        if self.back is not None:
            self.call.wait()  # or the copy may write to memory that has gone to another tensor

    def leave_gpu(self) -> None:
        """Drop what is on the GPU, since the copy is there."""
        for x, version in self.tensors:
            if x._version != version:
                self.broken = modified_message((x, version))
            elif x.untyped_storage().nbytes() != self.size:
                self.broken = f"The memory of a tensor {tuple(x.shape)} was freed while it was copied to the host. "
                self.broken += "Set host_memory_budget: 0, so that activations stay on the GPU, and please report this."
        self.tensors = []
        self.storage = None


class _Part:
    """Stands for a tensor in the graph: its storage and its form."""

    __slots__ = ("form", "number", "storage")

    def __init__(self, storage: _Storage, kept: SavedTensor):
        x, _ = kept
        self.storage, self.number = storage, len(storage.tensors)
        self.form = (x.dtype, x.storage_offset(), x.shape, x.stride())
        storage.tensors.append(kept)

    def value(self) -> torch.Tensor:
        storage = self.storage
        if storage.storage is not None:  # it has not left the GPU
            return load_checked(storage.tensors[self.number])
        found = storage.call.swapped_in(storage)
        dtype, offset, shape, stride = self.form
        return torch.empty(0, dtype=dtype, device=found.device).set_(found.untyped_storage(), offset, shape, stride)


class _OffloadedCall(KeepsValues):
    """One call of a layer. It is also the pack hook that gets the tensors that autograd saves."""

    def __init__(
        self,
        host: PinnedMemory,
        stream: torch.cuda.Stream | None,
        module: nn.Module | None,
        shared: Sequence[Any],
    ):
        self.host = host
        self.stream = stream
        self._module = module
        self._elsewhere = {x.untyped_storage()._cdata for x in _plain_in(shared)}  # storages that stay on the GPU
        self._storages: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
        self._event: torch.cuda.Event | None = None  # the end of the copies
        self._compute: torch.cuda.Stream | None = None

    # While the layer runs

    def __call__(self, x: torch.Tensor) -> "_Part | SavedTensor":
        """Return what stands for `x` in the graph."""
        if self._module is not None:  # the weights that FSDP has gathered are there now
            tensors = (*self._module.parameters(), *self._module.buffers())
            self._elsewhere |= {weight.untyped_storage()._cdata for weight in _plain_in(tensors)}
            self._module = None
        kept = save_with_version(x)
        if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter) or (x.is_leaf and x.requires_grad):
            return kept
        plain = type(x) is torch.Tensor and x.layout == torch.strided
        key = x.untyped_storage()._cdata if plain else 0
        if key in self._elsewhere or (x.untyped_storage().nbytes() if plain else x.nbytes) < self.host.small:
            return kept
        if not plain or (self.stream is not None and x.device != self.stream.device):
            return kept
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = _Storage(self, x.untyped_storage())
        return _Part(storage, kept)

    def swap_out(self) -> None:
        """Begin to copy to the host. To be called when the layer has returned."""
        with self._copying():
            for kept in list(self._storages.values()):
                here = kept.storage
                if here is not None and here.nbytes() == kept.size:
                    kept.slot = self.host.take(kept.size)
                if here is not None and kept.slot is not None:
                    on_gpu = torch.empty(0, dtype=torch.uint8, device=here.device).set_(here)
                    kept.slot.bytes.copy_(on_gpu, non_blocking=True)

    def free_gpu(self) -> None:
        """Free the GPU's memory when the copies to the host are done."""
        self.wait()
        for kept in list(self._storages.values()):
            if kept.slot is not None:
                kept.leave_gpu()

    # In the backward pass

    def swap_in(self) -> None:
        """Begin to copy back from the host what has left the GPU."""
        device = torch.device("cpu") if self.stream is None else self.stream.device
        absent = [kept for kept in self._storages.values() if kept.storage is None and kept.back is None]
        room = [torch.empty(kept.size, dtype=torch.uint8, device=device) for kept in absent]  # may be too much
        if absent:
            with self._copying():
                for kept, back in zip(absent, room, strict=True):
                    assert kept.slot is not None
                    kept.back = back.copy_(kept.slot.bytes, non_blocking=True)

    def swapped_in(self, kept: _Storage) -> torch.Tensor:
        """Return the bytes, uint8 (size,), for the stream that is about to read them."""
        if kept.broken is not None:
            raise RuntimeError(kept.broken)
        if kept.back is None:
            self.swap_in()
        assert kept.back is not None
        self.wait()
        if self.stream is not None and self._compute is not None:
            reader = torch.cuda.current_stream(self.stream.device)
            if reader != self._compute:  # a part of the layer has run on a stream of its own
                reader.wait_stream(self._compute)
                kept.back.record_stream(reader)
        return kept.back

    def wait(self) -> None:
        """Have the GPU wait for the copies that have begun."""
        event, self._event = self._event, None
        if event is not None and self._compute is not None:
            self._compute.wait_event(event)

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """Return a context for copies that begin after what the GPU has been given, and run while it computes."""
        if self.stream is None:
            yield
            return
        self.wait()
        self._compute = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(self._compute)
        with torch.cuda.stream(self.stream):
            yield
            self._event = self.stream.record_event()


class Offload:
    """The calls of one micro-batch that have their activations swapped out.

    The copies of a call are waited for `offload_lag` calls later. Its swap-in begins `prefetch_depth` calls before its
    backward pass. Without a `stream`, the device copies at once.
    """

    def __init__(self, host: PinnedMemory, stream: torch.cuda.Stream | None, offload_lag: int, prefetch_depth: int):
        self.host = host
        self.stream = stream
        self.offload_lag = offload_lag
        self.prefetch_depth = prefetch_depth
        self._leaving: dict[int, _OffloadedCall] = {}  # by the call that waits for the copy
        self._swapped_in: defaultdict[int, list[_OffloadedCall]] = defaultdict(
            list
        )  # by the call that begins it in its backward pass

    def call(
        self,
        number: int,
        module: nn.Module | None,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        shared: Sequence[Any],
    ) -> Any:
        """Return `run(*args)`, call `number` of a layer, and swap out what autograd keeps of it.

        The weights of `module` stay on the GPU, and so do the tensors in `shared`, which all layers get.
        """
        call = _OffloadedCall(self.host, self.stream, module, shared)
        self._leaving[number + 1 + self.offload_lag] = call
        self._swapped_in[number + self.prefetch_depth].append(call)
        with saved_tensors_hooks(call, _value_of):
            output = run(*args)
        call.swap_out()
        return output

    def before_call(self, number: int) -> None:
        """To be called before each call of a layer."""
        if number in self._leaving:
            self._leaving.pop(number).free_gpu()

    def after_call(self, number: int, outputs: Iterable[torch.Tensor]) -> None:
        """To be called after each call of a layer, with its results."""
        calls = self._swapped_in.pop(number, ())
        node = next((x.grad_fn for x in outputs if x.grad_fn is not None), None)

        def swap_in(_: tuple[torch.Tensor, ...]) -> None:
            for call in calls:
                call.swap_in()

        if calls and node is not None:
            node.register_prehook(swap_in)


def _value_of(found: _Part | SavedTensor) -> torch.Tensor:
    """Return the tensor that `found` stands for in the graph."""
    return found.value() if isinstance(found, _Part) else load_checked(found)


def _plain_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in `value`, and those inside wrappers such as DTensor."""
    for x in tensors_in(value):
        if is_traceable_wrapper_subclass(x):
            for name in x.__tensor_flatten__()[0]:
                yield from _plain_in(getattr(x, name))
        else:
            yield x
