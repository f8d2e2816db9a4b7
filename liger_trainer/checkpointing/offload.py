"""Layers whose activations wait for their backward pass in the host's memory.

What autograd keeps of such a layer is copied to the host when the layer has returned, while the GPU computes the next
layers, and copied back while it computes the backward pass of those behind. So a layer that lies between others costs
neither the GPU's memory nor its time, as long as the copies keep up with the layers. How many they keep up with, and
which, is chosen in `choose.py`. Where even checkpointed layers do not fit, what they were given waits there too.

What is kept is copied as a whole: several tensors that share memory, such as views, share the copy. Weights, small
tensors, and what the layer was given beside its hidden states stay where they are. A tensor that is changed in place
after it was kept is an error, as without this.
"""

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from liger_trainer.checkpointing.host_memory import HostMemory, Slot
from liger_trainer.checkpointing.plan import Seen, Spread
from liger_trainer.checkpointing.tensors import tensors_in
from liger_trainer.instance.kept import Kept, hooks_in_force, how_modified, keep, unchanged


class _Storage:
    """The memory of one or several tensors that autograd keeps of a call.

    Attributes:
        size (`int`): Bytes.
        storage (`torch.UntypedStorage` or `None`): The memory, as long as it is on the GPU.
        seen (`list` or `None`): The tensors in it and their versions, as long as they are on the GPU.
        slot (`Slot` or `None`): Where the copy is, or None as long as there is none.
        back (`torch.Tensor` or `None`): uint8 (size,), what came back from the host.
        broken (`str` or `None`): Why the copy is worth nothing.
        parts (`int`): How many times autograd has kept a tensor of it.
        asked (`int`): How many of these it has asked for in this backward pass. After the last, `back` is let go.
        round (`int`): The number of the backward pass.
    """

    def __init__(self, call: "_Call", storage: torch.UntypedStorage):
        self.call, self.size = call, storage.nbytes()
        self.storage: torch.UntypedStorage | None = storage
        self.seen: list[Kept] | None = []
        self.slot: Slot | None = None
        self.back: torch.Tensor | None = None
        self.broken: str | None = None
        self.parts = self.asked = self.round = 0

    def __del__(self) -> None:
        if self.back is not None:
            self.call.wait()  # the memory may go to another tensor, and must not be written to any more

    def covered(self) -> int:
        """The bytes of its tensors, counted once for each place and shape. No more than these are used."""
        return sum({(x.storage_offset(), x.shape): x.nbytes for x, _ in self.seen or ()}.values())

    def check(self) -> None:
        """See whether the tensors still have the values with which they were kept."""
        for x, version in self.seen or ():
            if x._version != version:
                self.broken = how_modified((x, version))
            elif x.untyped_storage().nbytes() != self.size:
                self.broken = (
                    f"The memory of a tensor {tuple(x.shape)} was freed by its owner while it was copied to the host. "
                    "Set host_memory_budget: 0, so that activations stay on the GPU, and please report this."
                )

    def leave_gpu(self) -> None:
        """The copy is there."""
        self.check()
        self.seen = self.storage = None

    def fetched(self) -> torch.Tensor:
        """uint8 (size,), what came back from the host."""
        if self.broken is not None:
            raise RuntimeError(self.broken)
        if self.back is None:
            self.call.fetch()
        assert self.back is not None
        self.call.give(self.back)
        return self.back


class _Part:
    """What autograd keeps in place of a tensor: where its values are, and its form."""

    __slots__ = ("form", "number", "round", "storage")

    def __init__(self, storage: _Storage, kept: Kept):
        x, _ = kept
        self.storage, self.round, self.number = storage, -1, storage.parts
        self.form = (x.dtype, x.storage_offset(), x.shape, x.stride())
        assert storage.seen is not None
        storage.seen.append(kept)
        storage.parts += 1

    def value(self) -> torch.Tensor:
        storage = self.storage
        if storage.seen is not None:  # it has not left the GPU
            return unchanged(storage.seen[self.number])
        found = storage.fetched()
        dtype, offset, shape, stride = self.form
        x = torch.empty(0, dtype=dtype, device=found.device).set_(found.untyped_storage(), offset, shape, stride)
        if self.round != storage.round:
            self.round, storage.asked = storage.round, storage.asked + 1
            if storage.asked == storage.parts:  # the last one to ask, until there is another backward pass
                storage.back, storage.asked, storage.round = None, 0, storage.round + 1
        return x


class _Call:
    """One call of a layer, which is also the function by which autograd keeps its tensors.

    Attributes:
        keeps_values (`bool`): Tells others who have hooks for kept tensors that what they leave to this one, and ask of
            it again, has the same values.
    """

    keeps_values = True

    def __init__(self, host: HostMemory, stream: torch.cuda.Stream | None, module: nn.Module | None, given: Any):
        self.host, self.stream, self._module = host, stream, module
        self._elsewhere = {x.untyped_storage()._cdata for x in _plain_in(given)}
        self._storages: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
        self.number: int | None = None  # of a call all activations of which are copied
        self.hidden: weakref.ref[torch.UntypedStorage] | None = None  # what it was given
        self._event: torch.cuda.Event | None = None  # the end of the copies
        self._compute: torch.cuda.Stream | None = None

    # While the layer runs

    def __call__(self, x: torch.Tensor) -> Any:
        """What autograd keeps in place of `x`."""
        if self._module is not None:  # the weights that FSDP has gathered are there now
            tensors = (*self._module.parameters(), *self._module.buffers())
            self._elsewhere |= {weight.untyped_storage()._cdata for weight in _plain_in(tensors)}
            self._module = None
        kept = keep(x)
        if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter) or (x.is_leaf and x.requires_grad):
            return kept
        if type(x) is not torch.Tensor or x.layout != torch.strided or x.untyped_storage().nbytes() < self.host.small:
            return kept
        if self.stream is not None and x.device != self.stream.device:
            return kept
        key = x.untyped_storage()._cdata
        if key in self._elsewhere:
            return kept
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = _Storage(self, x.untyped_storage())
        return _Part(storage, kept)

    def send(self) -> None:
        """Begin to copy to the host. To be called when the layer has returned."""
        with self._beside():
            for kept in list(self._storages.values()):
                here = kept.storage
                if here is not None and here.nbytes() == kept.size and 2 * kept.covered() >= kept.size:
                    kept.slot = self.host.take(kept.size)
                    if kept.slot is not None:
                        kept.slot.bytes.copy_(_as_bytes(here), non_blocking=True)

    def settle(self) -> None:
        """Give back the GPU's memory, as soon as the copies are there."""
        self.wait()
        for kept in list(self._storages.values()):
            if kept.slot is not None:
                kept.leave_gpu()

    def seen(self) -> Seen:
        """What of it is on the GPU after `settle`."""
        stays = sum(kept.size for kept in self._storages.values() if kept.slot is None)
        return Seen(self.hidden is None or self.hidden() is None, stays)

    # In the backward pass

    def fetch(self) -> None:
        """Begin to copy back from the host what has left the GPU."""
        absent = [kept for kept in self._storages.values() if kept.storage is None and kept.back is None]
        room = [torch.empty(kept.size, dtype=torch.uint8, device=self._device()) for kept in absent]  # may be too much
        if absent:
            with self._beside():
                for kept, back in zip(absent, room, strict=True):
                    assert kept.slot is not None
                    kept.back = back.copy_(kept.slot.bytes, non_blocking=True)

    def wait(self) -> None:
        """Let the GPU wait for the copies that have begun."""
        event, self._event = self._event, None
        if event is not None and self._compute is not None:
            self._compute.wait_event(event)

    def give(self, back: torch.Tensor) -> None:
        """Let the stream that is about to read `back` wait for its copy, and its memory for what the stream reads."""
        self.wait()
        if self.stream is not None and self._compute is not None:
            reader = torch.cuda.current_stream(self.stream.device)
            if reader != self._compute:  # a part of the layer has run on a stream of its own
                reader.wait_stream(self._compute)
                back.record_stream(reader)

    def _device(self) -> torch.device:
        return torch.device("cpu") if self.stream is None else self.stream.device

    def _beside(self) -> "_Beside":
        return _Beside(self)


class _Beside:
    """A context in which copies go on beside what the GPU computes, after what it has been given until now."""

    def __init__(self, call: _Call):
        self.call = call
        self.context: contextlib.AbstractContextManager = contextlib.nullcontext()

    def __enter__(self) -> None:
        stream = self.call.stream
        if stream is not None:
            self.call.wait()
            self.call._compute = torch.cuda.current_stream(stream.device)
            stream.wait_stream(self.call._compute)
            self.context = torch.cuda.stream(stream)
        self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.call.stream is not None:
            self.call._event = self.call.stream.record_event()
        self.context.__exit__(*error)


class Offload:
    """The calls of one micro-batch of which something waits on the host.

    Args:
        host (`HostMemory`): Where it waits.
        stream (`torch.cuda.Stream`, *optional*): On which it is copied. None on a device that copies at once.
        spread (`Spread`): How long copies of all activations of a call take.

    Attributes:
        seen (`dict[int, Seen]`): By the number of each call whose activations are on the host, what of it is not.
    """

    def __init__(self, host: HostMemory, stream: torch.cuda.Stream | None, spread: Spread):
        self.host, self.stream, self.spread = host, stream, spread
        self.seen: dict[int, Seen] = {}
        self._copied: defaultdict[int, list[_Call]] = defaultdict(list)  # by the number of the call that waits for it
        self._fetched: defaultdict[int, list[_Call]] = defaultdict(list)  # by the call whose backward pass begins it

    def call(
        self, number: int, module: nn.Module | None, run: Callable[..., Any], args: tuple[Any, ...], given: Any,
        hidden: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Return `run(*args)`, of which autograd keeps on the host what it needs.

        Args:
            number (`int`): Of the call.
            module (`nn.Module` or `None`): The layer, whose weights stay where they are.
            run (`Callable`), args (`tuple`): The function to be called, and what it is given.
            given: Tensors that stay on the GPU, because all layers are given them.
            hidden (`torch.Tensor`, *optional*): One that it alone is given, of which `seen` tells.
        """
        call = self._new(number, self.spread.lag, self.spread.ahead, module, given)
        call.number = number
        if hidden is not None:
            call.hidden = weakref.ref(hidden.untyped_storage())
        with saved_tensors_hooks(call, _value_of):
            output = run(*args)
        call.send()
        return output

    def checkpointed(
        self, number: int, checkpoint: Callable[..., Any], hidden: torch.Tensor, run: Callable[..., Any], *args: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Return `checkpoint(run, *args, **options)`, with `hidden`, one of the arguments, on the host meanwhile."""
        if not any(x is hidden for x in args):
            return checkpoint(run, *args, **options)
        call = self._new(number, 1, 1, None, ())
        kept, first, learns = call(hidden), [hidden], hidden.requires_grad
        places = [x is hidden for x in args]

        def with_hidden(*others: Any) -> Any:
            x = first.pop() if first else _value_of(kept).requires_grad_(learns)
            return run(*(x if there else other for there, other in zip(places, others, strict=True)))

        output = checkpoint(with_hidden, *(None if x is hidden else x for x in args), **options)
        first.clear()
        call.send()
        return output

    def _new(self, number: int, lag: int, ahead: int, module: nn.Module | None, given: Any) -> _Call:
        call = _Call(self.host, self.stream, module, given)
        self._copied[number + 1 + lag].append(call)
        self._fetched[number + ahead].append(call)
        return call

    def begins(self, number: int) -> None:
        """To be called before each call of a layer."""
        for call in self._copied.pop(number, ()):
            call.settle()
            if call.number is not None:
                self.seen[call.number] = call.seen()

    def returned(self, number: int, outputs: Iterable[torch.Tensor]) -> None:
        """To be called after each call of a layer, with what it has returned."""
        calls = self._fetched.pop(number, ())
        node = next((x.grad_fn for x in outputs if x.grad_fn is not None), None)
        if calls and node is not None:
            node.register_prehook(functools.partial(_fetch, calls))


def _fetch(calls: Iterable[_Call], _: Any) -> None:
    for call in calls:
        call.fetch()


def is_possible() -> bool:
    """Whether nobody else has hooks for what autograd keeps."""
    return hooks_in_force() is None


def _value_of(found: Any) -> torch.Tensor:
    return found.value() if type(found) is _Part else unchanged(found)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _plain_in(value: Any) -> Iterator[torch.Tensor]:
    """The plain tensors in `value`; of wrappers such as DTensor, the tensors that they are made of."""
    for x in tensors_in(value):
        if is_traceable_wrapper_subclass(x):
            for name in x.__tensor_flatten__()[0]:
                yield from _plain_in(getattr(x, name))
        else:
            yield x
