"""One micro-batch while it runs: which of its calls of layers keep their activations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from liger_trainer.checkpointing.measure import Recording
from liger_trainer.checkpointing.plan import Size
from liger_trainer.checkpointing.switches import Switch, size_of

if TYPE_CHECKING:
    from liger_trainer.checkpointing.chooser import Chooser


class MicroBatch:
    """One micro-batch while it runs.

    Attributes:
        adds (`bool`): Whether it adds to gradients that are there already.
        size (`Size` or `None`): Of what its first layer is given.
        recording (`Recording` or `None`): If it is measured.
        inside (`bool`): Whether a layer is running. The layers inside it are its own affair.
        planned (`int`): The most bytes that it was planned to have allocated; 0 without a plan.
        outgrew (`bool`): Whether a call was larger than those that were measured.
    """

    def __init__(self, chooser: "Chooser", adds: bool):
        self._chooser, self.adds = chooser, adds
        self.size: Size | None = None
        self.recording: Recording | None = None
        self.inside = self.outgrew = False
        self._calls = self.planned = 0
        self._kept: frozenset[int] = frozenset()

    @property
    def keeps(self) -> int:
        """How many of its calls keep their activations."""
        return len(self._kept) if self.recording is None else self.recording.samples

    def call(self, switch: Switch, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call the layer of `switch`, and keep its activations or not."""
        number, size = self._calls, size_of(function, args)
        self._calls += 1
        if number == 0:
            self.size = size
            plan, measured = self._chooser.decide(self, size)
            if plan is not None:
                self._kept, self.planned = plan.kept, plan.peak
            self.recording = Recording(self._chooser.memory) if measured else None

        def run(*args: Any) -> Any:  # also when the backward pass computes the layer again
            with self._running():
                return function(*args)

        if self.recording is not None and size is not None:
            return self.recording.call(lambda: run(*args), lambda: switch.checkpointed(run, *args), switch.group, size)
        if self._kept and not self.outgrew:
            self.outgrew = not self._chooser.covers(self, size, number)
        keep = number in self._kept and not self.outgrew
        return run(*args) if keep else switch.checkpointed(run, *args)

    @contextmanager
    def _running(self) -> Iterator[None]:
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before
