"""Runs `activation_checkpointing: auto` in one training: measures, plans, and learns from what each plan took.

Each micro-batch runs in one `Phase`. `ActivationPlanner.run` begins it and looks back at its end; between them, each
layer asks for its policy in `call_layer`. `micro_batch_record.py` measures, `plan.py` makes plans, and `policy.py`
carries them out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from liger_trainer._logging import logger
from liger_trainer.memory import selective, summary, switches
from liger_trainer.memory.device_memory import GIB, DeviceMemory, is_out_of_memory, limit_of
from liger_trainer.memory.micro_batch import MicroBatch, Phase
from liger_trainer.memory.micro_batch_record import MicroBatchRecord
from liger_trainer.memory.offload import Offload
from liger_trainer.memory.plan import (
    ActivationPlan,
    Link,
    Measurement,
    Measurements,
    RecordedCall,
    Size,
    Sizes,
    choose,
    sizes_of,
)
from liger_trainer.memory.policy import CALLS, LayerCall, LayerPolicy
from liger_trainer.memory.ranks import Ranks
from liger_trainer.patching.core.saved_tensors import active_saved_tensor_hooks

_REAL_TOKENS = "real tokens"  # their place among the sizes of a batch
LESS = 0.98  # of the limit, after the allocator had to release its cache


@dataclass(frozen=True)
class Budget:
    """The memory that may be filled."""

    gib: float | None  # memory_budget; None: all but a reserve
    ceiling: int | None = None  # bytes, once the allocator was short of memory
    is_reported: bool = False  # whether a warning has said that it is exceeded with every layer recomputed

    def limit(self, capacity: int) -> int:
        """Return how many bytes a plan may fill on a device of `capacity` bytes."""
        limit = limit_of(self.gib, capacity)
        return limit if self.ceiling is None else min(limit, self.ceiling)


@dataclass(frozen=True)
class WatchedModel:
    """The model with the layers that ask for their policies."""

    model: nn.Module
    parameters: tuple[nn.Parameter, ...]
    trained: tuple[bool, ...] = ()  # of each parameter; empty until switches are in the model

    def trained_now(self) -> tuple[bool, ...]:
        """Return whether each parameter is trained."""
        return tuple(parameter.requires_grad for parameter in self.parameters)

    def has_gradients(self) -> bool:
        """Return whether the next micro-batch adds to gradients."""
        return any(parameter.grad is not None for parameter in self.parameters)


@dataclass(frozen=True)
class LastMicroBatch:
    """The values that the next micro-batch is compared with."""

    retries: int  # how often the allocator has released its cache until then
    not_recomputed: frozenset[int] = frozenset()  # its layers


class ActivationPlanner:
    """Decides for each layer what is kept: all activations, on the GPU or the host, its attention, or nothing.

    A micro-batch that no earlier one covers is measured, with every layer checkpointed. The bytes that a layer would
    keep are seen when the backward pass recomputes it. From then on as many layers keep something as fit. If a
    micro-batch takes more than planned, the next plans leave as much free.

    Args:
        memory (`DeviceMemory`): The device's memory, or what counts like it.
        budget (`float`, *optional*): GiB of it. By default, all but a reserve.
        host_budget (`float`, *optional*): GiB of the host's memory for activations. By default, a part of what is free.
        warm (`bool`): Whether the first micro-batch is like all others, and compiles no kernels.
        timeout (`timedelta`, *optional*): How long ranks wait for each other. By default, as long as PyTorch lets them.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        budget: float | None,
        host_budget: float | None = None,
        warm: bool = False,
        timeout: timedelta | None = None,
    ):
        self.memory = memory
        self.summary = summary.CheckpointingSummary(budget)
        self._budget = Budget(budget)
        self._ranks = Ranks(timeout)
        self._transport = memory.transport(host_budget)
        self._measurements = Measurements()
        self._last = LastMicroBatch(memory.retries())
        self._is_warm = warm
        self._watched: WatchedModel | None = None
        self._now: MicroBatch | None = None

    def end(self) -> None:
        """Leave the model as it was before the first micro-batch."""
        if self._watched is not None:
            switches.remove(self._watched.model)
        self._ranks.close()
        if self._transport is not None:
            self.summary.host_bytes = self._transport.host.taken
            self._transport.host.release()
        self._watched = self._now = None
        self._measurements = Measurements()

    # A micro-batch

    def run(
        self,
        model: nn.Module,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tokens: int | None = None,
    ) -> Any:
        """Return `step(*args, **kwargs)`, which runs the forward and the backward pass of a micro-batch of `model`.

        `tokens` counts the row that layers get in place of a padded batch, if that is known.
        """
        now = self._begin(model, sizes_of((args, kwargs)), tokens)
        self._now = now
        try:
            result = step(*args, **kwargs)
        except RuntimeError as error:
            if is_out_of_memory(error):
                peak = max(self.memory.peak(), *now.record.peaks, 0)
                kept = len(now.plan.not_recomputed)
                error.args = (summary.out_of_memory(now.record.size, kept, min(now.limit, peak), str(error)),)
            raise
        finally:
            self._now = None
            now.record.close()
        if now.record.calls:
            self._look_back(now)
        return result

    def _begin(self, model: nn.Module, sizes: Sizes, tokens: int | None) -> MicroBatch:
        """Return a micro-batch that has not begun, and watch the layers of `model`."""
        if self._watched is None:  # only now the model is sharded and wrapped
            self._watched = WatchedModel(model, tuple(model.parameters()))
        trained = self._watched.trained_now()
        if trained != self._watched.trained:  # what layers keep depends on it
            switches.install(model, self.call_layer)
            self._measurements = Measurements()
            self._watched = replace(self._watched, trained=trained)
        if tokens is not None:
            sizes[_REAL_TOKENS] = Size(1, tokens)
        return MicroBatch(sizes, self._watched.has_gradients(), MicroBatchRecord(self.memory, self._transport))

    # A layer

    def call_layer(self, switch: switches.Switch, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call the layer of `switch` by the policy that is chosen for it."""
        now = self._now
        hidden = switches.hidden_of(function, args)
        if now is None or now.in_layer or hidden is None or not torch.is_grad_enabled():
            return switch.checkpointed(function, *args)
        number = len(now.record.calls)
        if number == 0:
            longest = switches.longest_of(function, args, hidden)
            now.long = longest >= selective.LONG and selective.is_possible(switch.checkpointed)
            now.sizes[None] = switches.size_of(hidden)
            self._plan(now)
        call = now.record_call(switch, hidden)
        policy = now.policies[call.layer] = self.policy_of(now, call, switch)
        run = now.runner(call, policy, function)
        layer = LayerCall(switch, function, args, run, number, now.offload)
        if now.offload is not None:
            now.offload.before_call(number)
        if now.is_measured:
            now.record.mark()
        try:
            output = CALLS[policy](layer)
        except BaseException:
            now.fail()
            raise
        if now.is_measured:
            now.record.mark()
        if now.offload is not None:
            if policy is LayerPolicy.TO_HOST and now.offload.host.is_full:  # it has taken less than it should
                now.phase = Phase.UNFORESEEN
            now.offload.after_call(number, switches.tensors_in(output))
        return output

    def policy_of(self, now: MicroBatch, call: RecordedCall, switch: switches.Switch) -> LayerPolicy:
        """Return what becomes of the activations of `call`."""
        plan = now.plan
        if now.phase is not Phase.UNFORESEEN and not (plan.is_empty or now.foresees(call)):
            now.phase = Phase.UNFORESEEN
        if now.phase is Phase.UNFORESEEN and not self._ranks.several:
            return LayerPolicy.RECOMPUTE  # several processes recompute the same layers, come what may
        if call.layer in plan.kept:
            return LayerPolicy.KEEP
        if call.layer in plan.on_host and now.offload is not None and active_saved_tensor_hooks() is None:
            return LayerPolicy.TO_HOST
        if call.layer in plan.attention and selective.is_possible(switch.checkpointed):
            return LayerPolicy.KEEP_ATTENTION
        return LayerPolicy.RECOMPUTE

    # Planning

    def _plan(self, now: MicroBatch) -> None:
        """Plan a micro-batch that is about to call its first layer."""
        now.limit = self._budget.limit(self.memory.capacity())
        now.record.start()
        covering = self._measurements.covering(now.sizes, now.accumulates, now.long)
        link = self._link(covering)
        for measurement in covering:
            limit = now.limit - measurement.margin
            plan = choose(measurement, now.record.base, limit, now.sizes, now.long, link)
            if now.measurement is None or plan.amount > now.plan.amount:
                now.measurement = measurement
                now.plan = plan
        if self._ranks.several:
            now.plan = self._agree(now.plan)
        if not now.plan.is_empty:
            now.phase = Phase.FOLLOW_PLAN
        if now.plan.on_host and self._transport is not None:
            now.offload = Offload(
                self._transport.host, self._transport.stream, now.plan.offload_lag, now.plan.prefetch_depth
            )

    def _link(self, covering: list[Measurement]) -> Link | None:
        """Return the link to the host's memory, at the pace of the slowest process."""
        room = 0
        pace = 0.0
        if self._transport is not None:
            room = 0 if self._transport.host.is_full else self._transport.host.room
            rate = self._transport.rate
            pace = max((each.layers_per_copy(rate) for each in covering), default=0.0)
        # Ranks agree on whole numbers and on the least of each, hence thousandths of a pace, negated
        room, least = self._ranks.least(room, -round(min(1000 * pace, 10**9)))
        return Link(room, -least / 1000) if room else None

    def _agree(self, plan: ActivationPlan) -> ActivationPlan:
        """Return `plan` with all layers recomputed that another process recomputes, since that may communicate."""
        assert self._watched is not None
        layers = [switch.layer for switch in switches.switches_of(self._watched.model)]
        once_here = [layer in plan.not_recomputed for layer in layers]
        attention_here = [layer in plan.attention | plan.kept for layer in layers]
        agreed = self._ranks.least(*once_here, *attention_here)
        once = {layer for layer, yes in zip(layers, agreed[: len(layers)], strict=True) if yes}
        attention = {layer for layer, yes in zip(layers, agreed[len(layers) :], strict=True) if yes}
        return replace(plan, kept=plan.kept & once, on_host=plan.on_host & once, attention=frozenset(attention - once))

    # Looking back

    def _look_back(self, now: MicroBatch) -> None:
        """Learn from a micro-batch that is over."""
        peak = now.record.end_last_interval()
        self.summary.highest = self.memory.highest
        self._lower_ceiling(now, peak)
        self._note(now, peak)
        was_warm = self._is_warm
        self._is_warm = True
        if not was_warm:  # it has compiled kernels, so its time and its memory say nothing about the next ones
            return
        if now.phase is Phase.MEASURE:
            self._learn(now, peak)
        elif now.phase is Phase.FOLLOW_PLAN:
            assert now.measurement is not None
            now.measurement.margin = max(now.measurement.margin, peak - now.plan.peak)
        elif now.measurement is not None:
            self._measurements.forget(now.measurement)

    def _lower_ceiling(self, now: MicroBatch, peak: int) -> None:
        """Fill less from now on if the same plan as before has left the allocator short of memory."""
        retries = self.memory.retries()
        kept = now.plan.not_recomputed
        if retries > self._last.retries and kept and kept == self._last.not_recomputed:
            self._budget = replace(self._budget, ceiling=int(min(now.limit, peak) * LESS))
        self._last = LastMicroBatch(retries, kept)

    def _learn(self, now: MicroBatch, peak: int) -> None:
        """Add the measurement of a micro-batch with every layer checkpointed."""
        budget = self._budget.gib
        size = now.record.size
        if budget is not None and size is not None and peak > budget * GIB and not self._budget.is_reported:
            self._budget = replace(self._budget, is_reported=True)
            logger.warning(summary.over_budget(size, peak, budget))
        measurement = now.record.measurement(now.sizes, now.accumulates, now.long)
        if measurement is not None:
            self._measurements.add(measurement)

    def _note(self, now: MicroBatch, peak: int) -> None:
        """Count a planned micro-batch in the summary, and log the plan of a new largest one."""
        size = now.record.size
        if now.measurement is None or size is None:
            return
        policies = list(now.policies.values())
        changed = self.summary.add(
            size,
            peak,
            layers=len(policies),
            kept=policies.count(LayerPolicy.KEEP),
            attention=policies.count(LayerPolicy.KEEP_ATTENTION),
            on_host=policies.count(LayerPolicy.TO_HOST),
        )
        if changed and self._ranks.is_first:
            logger.info(self.summary.log_line(now.limit))
