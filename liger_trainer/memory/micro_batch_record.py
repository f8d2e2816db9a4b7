"""Records one micro-batch: its layer calls, the memory peak of each interval, the bytes and the seconds of a layer.

The recorder measures and decides nothing. `plan.py` says what the intervals are; `planner.py` chooses from the records.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from liger_trainer.memory.device_memory import DeviceMemory, SupportsHostCopies
from liger_trainer.memory.plan import Measurement, RecordedCall, Size, Sizes


class MicroBatchRecord:
    """The record of one micro-batch.

    Attributes:
        base (`int`): Bytes allocated when the first layer was called.
        calls (`list`): The calls of layers, in their order.
        peaks (`list`): Bytes, the peak of each interval that is over.
    """

    def __init__(self, memory: DeviceMemory, transport: SupportsHostCopies | None):
        self.memory, self.transport = memory, transport
        self.base = 0
        self.calls: list[RecordedCall] = []
        self.peaks: list[int] = []
        self._marks: list[Any] = []  # of the device's clock, at the start and at the end of each call
        self._is_open = True

    @property
    def interval(self) -> int:
        """Return the number of the interval that is running."""
        return len(self.peaks)

    @property
    def size(self) -> Size | None:
        """Return the largest input of a layer, or None before the first call."""
        return max((call.size for call in self.calls), key=lambda size: size.tokens, default=None)

    def start(self) -> None:
        """Begin the first interval, when the first layer is about to be called."""
        self.memory.peak()  # resets the counter, so that the first interval begins here
        self.base = self.memory.allocated()

    def mark(self) -> None:
        """Note the device's time."""
        if self.transport is not None:  # only the pace of copies to the host is computed from it
            self._marks.append(self.transport.mark())

    @contextmanager
    def recomputing(self, call: RecordedCall) -> Iterator[None]:
        """Context manager: the backward pass recomputes `call`. Begins an interval, and counts the layer's bytes."""
        if not self._is_open or call.last is not None:  # a backward pass that comes later, or a second one
            yield
            return
        self.peaks.append(self.memory.peak())
        call.last = self.interval
        before = self.memory.allocated()
        try:
            yield
        except BaseException as stop:  # PyTorch leaves a layer by it that has made all that was kept
            traceback.clear_frames(stop.__traceback__)  # its locals would count as bytes that the layer keeps
            raise
        finally:
            call.extra = max(0, self.memory.allocated() - before)

    def close(self) -> None:
        """End the record: what a later backward pass recomputes is not measured."""
        self._is_open = False

    def end_last_interval(self) -> int:
        """Note the peak of the last interval. Returns the peak of all, in bytes."""
        self.peaks.append(self.memory.peak())
        return max(self.peaks)

    def measurement(self, sizes: Sizes, accumulates: bool, long: bool) -> Measurement | None:
        """Return what was measured, or None if the backward pass has recomputed no layer: a loss without the model."""
        if all(call.last is None for call in self.calls):
            return None
        peaks = [peak - self.base for peak in self.peaks]
        return Measurement(sizes, accumulates, long, peaks, self.calls, self._seconds())

    def _seconds(self) -> float:
        """Return the seconds of all calls in the forward pass: the median, without what happens once; 0 if unknown."""
        if self.transport is None or not self._marks:
            return 0.0
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        return median(self.transport.seconds(begin, end) for begin, end in pairs) * len(self.calls)
