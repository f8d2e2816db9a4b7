"""Measuring one micro-batch, call by call, while its layers are checkpointed.

One call of each group of like layers, the second, keeps its activations meanwhile. What it holds beyond the others of
its group is taken for what each of them would hold.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch

from liger_trainer.checkpointing.memory import Memory
from liger_trainer.checkpointing.plan import Call, Profile, Size

SAMPLED = 1  # the number within its group of the call that keeps its activations


class Recording:
    """The sizes of one micro-batch, which begins with its first call.

    Args:
        memory (`Memory`): The device's.
    """

    def __init__(self, memory: Memory):
        self.memory = memory
        self.base = memory.allocated()
        self._peaks: list[int] = []
        self._calls: list[Call] = []
        self._groups: defaultdict[Hashable, list[int]] = defaultdict(list)
        self._held: list[int] = []  # by each call, when it has returned
        self._sampled: list[int] = []
        memory.start_peak()

    @property
    def samples(self) -> int:
        """How many calls have kept their activations."""
        return len(self._sampled)

    def _next_moment(self) -> int:
        """End the moment before, and return the number of the one that begins."""
        self._peaks.append(self.memory.peak())
        self.memory.start_peak()
        return len(self._peaks)

    def call(self, keep: Callable[[], Any], checkpoint: Callable[[], Any], group: Hashable, size: Size) -> Any:
        """Return what the call returns: `keep()` if it is the sample of its group, and otherwise `checkpoint()`."""
        number, group = len(self._calls), (group, size)
        self._calls.append(Call(size, None, self._next_moment(), None))
        before = self.memory.allocated()
        sampled = len(self._groups[group]) == SAMPLED
        self._groups[group].append(number)
        if sampled:
            self._sampled.append(number)
        output = keep() if sampled else checkpoint()
        self._held.append(self.memory.allocated() - before)
        for tensor in _tensors(output):
            if tensor.requires_grad:
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
        for group in self._groups.values():
            sample = next((number for number in group if number in self._sampled), None)
            if sample is None:
                continue
            checkpointed = min(self._held[number] for number in group if number != sample)
            for number in group:
                calls[number] = replace(calls[number], extra=max(0, self._held[sample] - checkpointed))
        moments = [peak - self.base for peak in self._peaks]
        for number in self._sampled:
            call = calls[number]
            for moment in range(call.first, call.last or 0):
                moments[moment] -= call.extra or 0
        return Profile(tuple(moments), tuple(calls))


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        yield from _tensors(tuple(output.values()))
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)
