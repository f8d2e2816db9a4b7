"""One micro-batch under `activation_checkpointing: auto`: what it is for, its plan and its record."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch

from liger_trainer.memory import selective, switches
from liger_trainer.memory.micro_batch_record import MicroBatchRecord
from liger_trainer.memory.offload import Offload
from liger_trainer.memory.plan import NOTHING, ActivationPlan, Measurement, RecordedCall, Sizes
from liger_trainer.memory.policy import LayerPolicy, allow_rebuilding
from liger_trainer.patching.core.saved_tensors import active_saved_tensor_hooks


class Phase(Enum):
    """The purpose of a micro-batch. Nothing is learned from one in the last two phases."""

    MEASURE = "every layer is recomputed, and what it holds is recorded"
    FOLLOW_PLAN = "layers keep what the plan says"
    FAILED = "a call has failed"
    UNFORESEEN = "a call was not measured like this, or the host was full: from here, layers are recomputed"


@dataclass
class MicroBatch:
    """One micro-batch while it runs."""

    sizes: Sizes
    accumulates: bool  # whether gradients are there already
    record: MicroBatchRecord
    phase: Phase = Phase.MEASURE
    long: bool = False  # whether rows are so long that it pays to keep the results of attention, if that is possible
    limit: int = 0  # bytes that the plan may fill
    measurement: Measurement | None = None  # the plan's
    plan: ActivationPlan = NOTHING
    offload: Offload | None = None
    policies: dict[int, LayerPolicy] = field(default_factory=dict)  # how each layer was called
    in_layer: bool = False  # whether a layer is running, which decides for the layers inside it

    @property
    def is_measured(self) -> bool:
        """Return whether layers are recorded: the plan keeps nothing, so each of them is recomputed."""
        return self.plan.is_empty

    def foresees(self, call: RecordedCall) -> bool:
        """Return whether the measurement covers `call`, the last one until now."""
        if self.measurement is None:
            return False
        number = sum(other.layer == call.layer for other in self.record.calls) - 1
        measured = self.measurement.layers.get(call.layer, [])
        return number < len(measured) and measured[number].size.covers(call.size)

    def fail(self) -> None:
        """Note that a call has failed."""
        if self.phase is not Phase.UNFORESEEN:  # which also says how the calls that follow are run
            self.phase = Phase.FAILED

    def record_call(self, switch: switches.Switch, hidden: torch.Tensor) -> RecordedCall:
        """Add a call of the layer of `switch` with the input `hidden` to the record."""
        casts = switch.casts if torch.is_autocast_enabled(hidden.device.type) else 0
        size = switches.size_of(hidden)
        call = RecordedCall(
            switch.layer, switch.group, size, self.record.interval, casts=casts, hidden_bytes=hidden.nbytes
        )
        self.record.calls.append(call)
        return call

    def runner(self, call: RecordedCall, policy: LayerPolicy, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs a layer as `function` does, in the forward pass and when it is recomputed."""
        measured = self.is_measured

        def run(*args: Any) -> Any:
            before = self.in_layer
            self.in_layer = True
            try:
                with ExitStack() as stack:
                    if measured and torch._C._current_graph_task_id() != -1:  # in a backward pass
                        stack.enter_context(self.record.recomputing(call))
                    elif measured and self.long:
                        stack.enter_context(selective.measuring(partial(setattr, call, "attention")))
                    hooks = active_saved_tensor_hooks() if policy.recomputes else None
                    if hooks is not None:
                        stack.enter_context(allow_rebuilding(hooks))
                    return function(*args)
            finally:
                self.in_layer = before

        return run
