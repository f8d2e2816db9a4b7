"""One micro-batch while it runs: which of its calls of layers keep their activations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from liger_trainer.checkpointing import keep_attention
from liger_trainer.checkpointing.measure import Order, Recording
from liger_trainer.checkpointing.plan import NOTHING, Count, Plan, Size
from liger_trainer.checkpointing.switches import Switch, longest_of, size_of

if TYPE_CHECKING:
    from liger_trainer.checkpointing.chooser import Chooser


class MicroBatch:
    """One micro-batch while it runs.

    Attributes:
        adds (`bool`): Whether it adds to gradients that are there already.
        size (`Size` or `None`): Of what its first layer is given.
        long (`bool`): Whether its rows are so long that it pays to keep the results of attention, and that is possible.
        order (`Order` or `None`): The layers that it has called, if it has no plan.
        recording (`Recording` or `None`): If it is measured.
        inside (`bool`): Whether a layer is running. The layers inside it are its own affair.
        plan (`Plan` or `None`): What it keeps.
        outgrew (`bool`): Whether a call was larger than those that were measured.
    """

    def __init__(self, chooser: "Chooser", adds: bool):
        self._chooser, self.adds = chooser, adds
        self.size: Size | None = None
        self.recording: Recording | None = None
        self.order: Order | None = None
        self.plan: Plan | None = None
        self.inside = self.outgrew = self.long = False
        self._calls = 0

    @property
    def keeps(self) -> Count:
        """How many of its calls keep something."""
        if self.recording is not None:
            return Count(self.recording.samples, 0)
        return NOTHING if self.plan is None else self.plan.count

    def call(self, switch: Switch, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call the layer of `switch`, and keep its activations or not."""
        number, size = self._calls, size_of(function, args)
        self._calls += 1
        if number == 0 and size is not None:
            self.size = size
            pays = longest_of(function, args, size) >= keep_attention.LONG
            self.long = pays and keep_attention.is_possible(switch.checkpointed)
        if number == 0:
            self.plan, self.recording = self._chooser.decide(self)
            self.order = Order() if self.plan is None and self.recording is None else None

        def run(*args: Any) -> Any:  # also when the backward pass computes the layer again
            with self._running():
                return function(*args)

        if self.recording is not None and size is not None:
            return self.recording.call(switch, run, args, size)
        if self.order is not None and size is not None:
            self.order.add(switch, size)
        plan = self.plan
        if plan is not None and plan.count != NOTHING and not self.outgrew:
            self.outgrew = not self._chooser.covers(self, size, number)
        if plan is None or self.outgrew:
            return switch.checkpointed(run, *args)
        if number in plan.kept:
            return run(*args)
        if number in plan.attention and keep_attention.is_possible(switch.checkpointed):
            return keep_attention.checkpoint(switch.checkpointed, run, args)
        return switch.checkpointed(run, *args)

    @contextmanager
    def _running(self) -> Iterator[None]:
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before
