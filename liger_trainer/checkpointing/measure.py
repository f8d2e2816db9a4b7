"""Measuring one micro-batch, call by call, while its layers are checkpointed.

One call of each group of like layers keeps its activations meanwhile, and another, if rows are long, the results of its
attention. What such a sample holds beyond the others of its group is taken for what each of them would hold. Samples
are the last calls of a group, as the micro-batch before has shown them: these give their bytes back before the
gradients of the others have grown, so that the measured micro-batch too stays within the limit if there is room for one
layer at the end of the forward pass.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from liger_trainer.checkpointing import keep_attention
from liger_trainer.checkpointing.host_memory import Transport
from liger_trainer.checkpointing.memory import Memory
from liger_trainer.checkpointing.plan import Call, Profile, Size
from liger_trainer.checkpointing.switches import Switch
from liger_trainer.checkpointing.tensors import tensors_in


class Order:
    """The layers that a micro-batch has called, group by group. Layers of one group are alike and get one size."""

    def __init__(self) -> None:
        self._sizes: defaultdict[Hashable, list[Size]] = defaultdict(list)
        self._layers: defaultdict[Hashable, list[int]] = defaultdict(list)

    def add(self, switch: Switch, size: Size) -> Hashable:
        """Note a call. Returns its group, by a name that it has in other micro-batches too."""
        sizes = self._sizes[switch.group]
        if size not in sizes:
            sizes.append(size)
        group = (switch.group, sizes.index(size))
        self._layers[group].append(switch.layer)
        return group

    def last(self, group: Hashable) -> tuple[int | None, int | None]:
        """The layer of the last call of a group of two and more, and that of the call before in one of three."""
        layers = self._layers.get(group, [])
        return layers[-1] if len(layers) > 1 else None, layers[-2] if len(layers) > 2 else None


class Recording:
    """The sizes of one micro-batch, which begins with its first call.

    Args:
        memory (`Memory`): The device's.
        before (`Order`): Of a micro-batch before.
        long (`bool`): Whether rows are so long that it pays to keep the results of attention.
        transport (`Transport`, *optional*): By which activations could be carried to the host, if there is time.
    """

    def __init__(self, memory: Memory, before: Order, long: bool, transport: Transport | None = None):
        self.memory, self._before, self.long, self._transport = memory, before, long, transport
        self.base = memory.allocated()
        self.order = Order()
        self._peaks: list[int] = []
        self._calls: list[Call] = []
        self._groups: defaultdict[Hashable, list[int]] = defaultdict(list)
        self._held: list[int] = []  # by each call, when it has returned
        self._whole: dict[Hashable, int] = {}  # the number of the sample of each group
        self._attention: dict[Hashable, int] = {}
        self._learns = False  # whether a call has a backward pass
        self._marks: list[Any] = []  # at the start and at the end of each call
        memory.start_peak()

    @property
    def samples(self) -> int:
        """How many calls have kept something."""
        return len(self._whole) + len(self._attention)

    @property
    def is_whole(self) -> bool:
        """Whether all calls have returned, and the backward pass has come to them.

        Who skips a batch, by an error that is caught or a loss without the model, leaves nothing to plan by.
        """
        came = any(call.last is not None for call in self._calls)
        return len(self._held) == len(self._calls) and (came or not self._learns)

    def _next_moment(self) -> int:
        """End the moment before, and return the number of the one that begins."""
        self._peaks.append(self.memory.peak())
        self.memory.start_peak()
        return len(self._peaks)

    def call(
        self, switch: Switch, checkpointed: Callable[..., Any], run: Callable[..., Any], args: tuple[Any, ...],
        size: Size, given: int = 0, leaves: bool = False,
    ) -> Any:  # fmt: skip
        """Return `run(*args)`, checkpointed unless it is the sample of its group.

        Args:
            switch (`Switch`): Of the layer.
            checkpointed (`Callable`): Checkpoints it.
            run (`Callable`), args (`tuple`): The call.
            size (`Size`): Of the hidden states.
            given (`int`): The bytes of the hidden states.
            leaves (`bool`): Whether they leave the GPU if it is checkpointed, and stay if it keeps its activations.
        """
        number, group = len(self._calls), self.order.add(switch, size)
        given, away = (0, given) if leaves else (given, 0)
        self._calls.append(Call(size, None, self._next_moment(), None, given=given, away=away))
        self._groups[group].append(number)
        last, before_last = self._before.last(group)
        self._mark()
        before = self.memory.allocated()
        if switch.layer == last and group not in self._whole:
            self._whole[group] = number
            output = run(*args)
        elif self.long and switch.layer == before_last and group not in self._attention:
            self._attention[group] = number
            output = keep_attention.checkpoint(checkpointed, run, args)
        else:
            output = checkpointed(run, *args)
        self._held.append(self.memory.allocated() - before)
        self._mark()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                self._learns = True
                tensor.register_hook(lambda gradient: self._backward_begins(number))
                break
        return output

    def _backward_begins(self, number: int) -> None:
        if self._calls[number].last is None:  # a second backward pass is like the first
            self._calls[number] = replace(self._calls[number], last=self._next_moment())

    def profile(self) -> Profile:
        """What was measured. To be called when the backward pass is over."""
        self._next_moment()
        calls = list(self._calls)
        moments = [peak - self.base for peak in self._peaks]
        for group, numbers in self._groups.items():
            samples = (self._whole.get(group), self._attention.get(group))
            held = [self._held[number] for number in numbers if number not in samples]
            if not held:
                continue
            # Not the least of them: where the hooks of FSDP2 run within the call (transformers 5.17), the first
            # layer gives back the gathered embedding meanwhile.
            checkpointed = statistics.median_low(held)
            extra, attention = (
                None if number is None else max(0, self._held[number] - checkpointed) for number in samples
            )
            for number, more in zip(samples, (extra, attention), strict=True):
                if number is not None and more is not None:
                    for moment in range(calls[number].first, calls[number].last or 0):
                        moments[moment] -= more
            for number in numbers:
                whole = None if extra is None else extra + calls[number].away
                calls[number] = replace(calls[number], extra=whole, attention=attention or None)
        return Profile(tuple(moments), tuple(calls), self.long, self._seconds())

    def _mark(self) -> None:
        if self._transport is not None:
            self._marks.append(self._transport.mark())

    def _seconds(self) -> float:
        """How long the forward pass of all calls takes, without what happens once, such as compiling a kernel."""
        if self._transport is None or not self._marks:
            return 0.0
        of_calls = [self._transport.seconds(*pair) for pair in zip(self._marks[::2], self._marks[1::2], strict=True)]
        return statistics.median(of_calls) * len(of_calls)
