"""One micro-batch while it runs: which of its calls of layers keep their activations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from liger_trainer.checkpointing import keep_attention, offload
from liger_trainer.checkpointing.measure import Order, Recording
from liger_trainer.checkpointing.offload import Offload
from liger_trainer.checkpointing.plan import NOTHING, Count, Plan, Size
from liger_trainer.checkpointing.switches import Switch, given, hidden_of, longest_of, size_of
from liger_trainer.checkpointing.tensors import tensors_in

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
        offload (`Offload` or `None`): The calls of which something waits on the host.
        outgrew (`bool`): Whether a call was larger than those that were measured.
        called (`list`): The layers that it has called.
    """

    def __init__(self, chooser: "Chooser", adds: bool):
        self._chooser, self.adds = chooser, adds
        self.size: Size | None = None
        self.recording: Recording | None = None
        self.order: Order | None = None
        self.plan: Plan | None = None
        self.offload: Offload | None = None
        self.inside = self.outgrew = self.long = False
        self.called: list[nn.Module] = []
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
        if (module := switch.module()) is not None:
            self.called.append(module)
        if number == 0 and size is not None:
            self.size = size
            pays = longest_of(function, args, size) >= keep_attention.LONG
            self.long = pays and keep_attention.is_possible(switch.checkpointed)
        if number == 0:
            self.plan, self.recording = self._chooser.decide(self)
            self.order = Order() if self.plan is None and self.recording is None else None
            self.offload = self._chooser.offload(self.plan)

        def run(*args: Any) -> Any:  # also when the backward pass computes the layer again
            with self._running():
                output = function(*args)
            if self._chooser.forgets_casts:
                torch.clear_autocast_cache()
            return output

        if self.order is not None and size is not None:
            self.order.add(switch, size)
        if self.plan is not None and self.plan.count != NOTHING and not self.outgrew:
            self.outgrew = not self._chooser.covers(self, size, number)
        if self.offload is None:
            return self._run(number, switch, switch.checkpointed, run, args, function)
        self.offload.begins(number)
        hidden, checkpointed = hidden_of(function, args), switch.checkpointed
        if self._chooser.inputs_on_host and hidden is not None and keep_attention.is_possible(switch.checkpointed):
            checkpointed = partial(self.offload.checkpointed, number, switch.checkpointed, hidden)
        output = self._run(number, switch, checkpointed, run, args, function)
        self.offload.returned(number, tensors_in(output))
        return output

    def _run(
        self, number: int, switch: Switch, checkpointed: Callable[..., Any], run: Callable[..., Any],
        args: tuple[Any, ...], function: Callable[..., Any],
    ) -> Any:  # fmt: skip
        """Return `run(*args)`, and keep of it what the plan says. `checkpointed` keeps nothing."""
        size, plan = size_of(function, args), self.plan
        if self.recording is not None and size is not None:
            hidden, leaves = hidden_of(function, args), checkpointed is not switch.checkpointed
            nbytes = 0 if hidden is None else hidden.nbytes
            return self.recording.call(switch, checkpointed, run, args, size, nbytes, leaves)
        if plan is None or self.outgrew:
            return checkpointed(run, *args)
        if number in plan.kept:
            return run(*args)
        if number in plan.on_host and self.offload is not None and offload.is_possible():
            hidden = hidden_of(function, args)
            others = [x for x in given(function, args) if x is not hidden]
            return self.offload.call(number, switch.module(), run, args, others, hidden)
        if number in plan.attention and keep_attention.is_possible(switch.checkpointed):
            return keep_attention.checkpoint(checkpointed, run, args)
        return checkpointed(run, *args)

    @contextmanager
    def _running(self) -> Iterator[None]:
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before
