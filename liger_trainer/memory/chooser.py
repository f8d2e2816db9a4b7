"""Runs `activation_checkpointing: auto` in one training: measures, plans, and learns from what each plan took."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from liger_trainer._logging import logger
from liger_trainer.instance.kept import hooks_in_force
from liger_trainer.memory import selective, summary, switches
from liger_trainer.memory.memory import GIB, is_out_of_memory, limit_of
from liger_trainer.memory.offload import Offload
from liger_trainer.memory.plan import NOTHING, Call, Link, Measurement, Plan, Size, Sizes, choose, sizes_of

_REAL_TOKENS = "real tokens"  # their place among the sizes of a batch
LESS = 0.98  # of the limit, after the allocator had to release its cache


class Ranks:
    """All processes of the training, which agree over the host's network, so that no GPU waits for another."""

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(timeout=timeout, backend="gloo") if self.several else None

    def least(self, *numbers: int) -> tuple[int, ...]:
        """Return the least that any process gives in each place. All processes call this with as many numbers."""
        if not self.several:
            return numbers
        least = torch.tensor(numbers)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return tuple(least.tolist())

    def close(self) -> None:
        if self.several:
            dist.destroy_process_group(self.group)


@dataclass
class _MicroBatch:
    """One micro-batch while it runs."""

    sizes: Sizes
    accumulates: bool  # whether gradients are there already
    long: bool = False  # whether rows are so long that it pays to keep the results of attention, if that is possible
    base: int = 0  # bytes that were allocated when its first layer was called
    measurement: Measurement | None = None  # from which it was planned
    plan: Plan = NOTHING  # if it stays so, the micro-batch is measured
    calls: list[Call] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)  # of the phases, see `plan.py`
    timestamps: list[Any] = field(default_factory=list)  # of the device, at the start and the end of each call
    ways: dict[int, str] = field(default_factory=dict)  # how each layer was called
    offload: Offload | None = None
    unforeseen: bool = False  # whether a call was not measured like this; it and all after it are checkpointed
    failed: bool = False  # whether a call has failed
    in_layer: bool = False  # whether a layer is running, which decides for the layers inside it

    @property
    def size(self) -> Size | None:
        """The largest input of a layer."""
        return max((call.size for call in self.calls), key=lambda size: size.tokens, default=None)

    def foresees(self, call: Call) -> bool:
        """Return whether the measurement covers `call`, the last one until now."""
        number = sum(other.layer == call.layer for other in self.calls) - 1
        measured = [] if self.measurement is None else self.measurement.layers.get(call.layer, [])
        return number < len(measured) and measured[number].size.covers(call.size)


class Chooser:
    """Decides for each layer what is kept: all activations, on the GPU or the host, its attention, or nothing.

    A micro-batch that no earlier one covers is measured, with every layer checkpointed. The bytes that a layer would
    keep are seen when the backward pass recomputes it. From then on as many layers keep something as fit. If a
    micro-batch takes more than planned, the next plans leave as much free.

    Args:
        memory (`GpuMemory`): The device's memory, or what counts like it.
        budget (`float`, *optional*): GiB of it. By default, all but a reserve.
        host_budget (`float`, *optional*): GiB of the host's memory for activations. By default, a part of what is free.
        warm (`bool`): Whether the first micro-batch is like all others, and compiles no kernels.
    """

    def __init__(
        self, memory: Any, budget: float | None, host_budget: float | None = None, warm: bool = False
    ):  # fmt: skip
        self.memory, self.budget, self._warm = memory, budget, warm
        self.summary = summary.CheckpointingSummary(budget)
        self._ranks = Ranks()
        self._transport = memory.transport(host_budget)
        self._measurements: list[Measurement] = []
        self._limit = 0  # bytes
        self._ceiling: int | None = None  # a lower limit, once the allocator was short of memory
        self._retries = memory.retries()
        self._once: frozenset[int] = frozenset()  # the layers that the last micro-batch has not recomputed
        self._warned = False  # of a budget that is too small
        self._model: nn.Module | None = None
        self._parameters: list[nn.Parameter] = []
        self._learn: list[bool] = []  # of each parameter, whether it is trained
        self._now: _MicroBatch | None = None

    def end(self) -> None:
        """Leave the model as it was before the first micro-batch."""
        if self._model is not None:
            switches.remove(self._model)
        self._ranks.close()
        if self._transport is not None:
            self.summary.host_bytes = self._transport.host.taken
            self._transport.host.release()
        self._model, self._parameters, self._now, self._measurements = None, [], None, []

    # Running micro-batches

    def run(
        self, model: nn.Module, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        tokens: int | None = None,
    ) -> Any:  # fmt: skip
        """Return `step(*args, **kwargs)`, which runs the forward and the backward pass of a micro-batch of `model`.

        `tokens` are those of the row that layers get in place of a padded batch, where that is known.
        """
        if self._model is None:  # only now the model is sharded and wrapped
            self._model, self._parameters = model, list(model.parameters())
        learn = [parameter.requires_grad for parameter in self._parameters]
        if learn != self._learn:  # what layers keep depends on it
            switches.install(model, self._call)
            self._measurements, self._learn = [], learn
        accumulates = any(parameter.grad is not None for parameter in self._parameters)
        sizes = sizes_of((args, kwargs))
        if tokens is not None:
            sizes[_REAL_TOKENS] = Size(1, tokens)
        self._now = now = _MicroBatch(sizes, accumulates)
        try:
            result = step(*args, **kwargs)
        except RuntimeError as error:
            if is_out_of_memory(error):
                took = min(self._limit, max(self.memory.peak(), *now.peaks, 0))
                error.args = (summary.out_of_memory(now.size, len(now.plan.once), took, str(error)),)
            raise
        finally:
            self._now = None
        if now.calls:
            self._look_back(now)
        return result

    def _call(self, switch: switches.Switch, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call the layer of `switch`, and keep its activations or not."""
        now, hidden = self._now, switches.hidden_of(function, args)
        if now is None or now.in_layer or hidden is None or not torch.is_grad_enabled():
            return switch.checkpointed(function, *args)
        size, number = switches.size_of(hidden), len(now.calls)
        if not number:
            now.sizes[None] = size
            long = switches.longest_of(function, args, hidden) >= selective.LONG
            now.long = long and selective.is_possible(switch.checkpointed)
            self._decide(now)
        casts = switch.casts if torch.is_autocast_enabled(hidden.device.type) else 0
        call = Call(switch.layer, switch.group, size, len(now.peaks), casts=casts, given=hidden.nbytes)
        now.calls.append(call)
        now.ways[call.layer] = way = self._way(now, call, switch)
        if now.offload is not None:
            now.offload.before_call(number)
        self._mark(now)
        try:
            output = self._run(now, call, way, switch, function, args)
        except BaseException:
            now.failed = True
            raise
        self._mark(now)
        if now.offload is not None:
            now.offload.after_call(number, switches.tensors_in(output))
        return output

    def _way(self, now: _MicroBatch, call: Call, switch: switches.Switch) -> str:
        """Return how a layer is called: "whole", "host", "attention" or "checkpointed"."""
        now.unforeseen = now.unforeseen or not (now.plan.is_empty or now.foresees(call))
        if now.unforeseen and not self._ranks.several:  # several processes recompute the same layers, come what may
            return "checkpointed"
        if call.layer in now.plan.kept:
            return "whole"
        if call.layer in now.plan.on_host and now.offload is not None and hooks_in_force() is None:
            return "host"
        if call.layer in now.plan.attention and selective.is_possible(switch.checkpointed):
            return "attention"
        return "checkpointed"

    def _run(
        self, now: _MicroBatch, call: Call, way: str, switch: switches.Switch, function: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> Any:  # fmt: skip
        measured = now.plan.is_empty

        def run(*args: Any) -> Any:  # also when the backward pass recomputes the layer
            before, now.in_layer = now.in_layer, True
            try:
                with ExitStack() as stack:
                    if measured and torch._C._current_graph_task_id() != -1:
                        stack.enter_context(self._recomputing(now, call))
                    elif measured and now.long:
                        stack.enter_context(selective.measuring(partial(setattr, call, "attention")))
                    if way not in ("whole", "host") and (hooks := hooks_in_force()) is not None:
                        stack.enter_context(_rebuilding(*hooks))
                    return function(*args)
            finally:
                now.in_layer = before

        if way == "whole":
            return run(*args)
        if way == "host":
            assert now.offload is not None
            hidden = switches.hidden_of(function, args)
            others = [x for x in switches.inputs_of(function, args) if x is not hidden]
            output = now.offload.call(len(now.calls) - 1, switch.module(), run, args, others)
            now.unforeseen = now.unforeseen or now.offload.host.is_full  # it has taken less than it should
            return output
        if way == "attention":
            return selective.checkpoint(switch.checkpointed, run, args)
        return switch.checkpointed(run, *args)

    @contextmanager
    def _recomputing(self, now: _MicroBatch, call: Call) -> Iterator[None]:
        """Return a context in which a layer is recomputed, in a micro-batch that is measured."""
        if now is not self._now or call.last is not None:  # a backward pass that comes later, or a second one
            yield
            return
        now.peaks.append(self.memory.peak())
        call.last, before = len(now.peaks), self.memory.allocated()
        try:
            yield
        except BaseException as stop:  # by which PyTorch leaves a layer that has made all that was kept
            traceback.clear_frames(stop.__traceback__)
            raise
        finally:
            call.extra = max(0, self.memory.allocated() - before)

    def _mark(self, now: _MicroBatch) -> None:
        if self._transport is not None and now.plan.is_empty:
            now.timestamps.append(self._transport.mark())

    # Choosing

    def _decide(self, now: _MicroBatch) -> None:
        """Plan a micro-batch that is about to call its first layer."""
        self._limit = limit_of(self.budget, self.memory.capacity())
        if self._ceiling is not None:
            self._limit = min(self._limit, self._ceiling)
        self.memory.peak()  # from here
        now.base = self.memory.allocated()
        covering = [each for each in self._measurements if each.covers(now.sizes, now.accumulates, now.long)]
        link = self._link(covering)
        for each in covering:
            plan = choose(each, now.base, self._limit - each.margin, now.sizes, now.long, link)
            if now.measurement is None or plan.amount > now.plan.amount:
                now.measurement, now.plan = each, plan
        if self._ranks.several:
            self._agree(now)
        if now.plan.on_host and self._transport is not None:
            now.offload = Offload(self._transport.host, self._transport.stream, now.plan.lag, now.plan.ahead)

    def _link(self, covering: list[Measurement]) -> Link | None:
        """Return the link to the host's memory, at the pace of the slowest process."""
        room, pace = 0, 0.0
        if self._transport is not None:
            room = 0 if self._transport.host.is_full else self._transport.host.room
            pace = max((each.pace(self._transport.rate) for each in covering), default=0.0)
        room, least = self._ranks.least(room, -round(min(1000 * pace, 10**9)))
        return Link(room, -least / 1000) if room else None

    def _agree(self, now: _MicroBatch) -> None:
        """Recompute all layers that another process recomputes, since that may communicate."""
        assert self._model is not None
        layers, plan = [switch.layer for switch in switches.switches_of(self._model)], now.plan
        flags = [layer in plan.once for layer in layers] + [layer in plan.attention | plan.kept for layer in layers]
        agreed = self._ranks.least(*flags)
        once = {layer for layer, yes in zip(layers, agreed[: len(layers)], strict=True) if yes}
        attention = {layer for layer, yes in zip(layers, agreed[len(layers) :], strict=True) if yes}
        now.plan = replace(
            plan, kept=plan.kept & once, on_host=plan.on_host & once, attention=frozenset(attention - once)
        )

    # Looking back

    def _look_back(self, now: _MicroBatch) -> None:
        """Learn from a micro-batch that is over."""
        now.peaks.append(self.memory.peak())
        peak, self.summary.highest = max(now.peaks), self.memory.highest
        before, self._retries = self._retries, self.memory.retries()
        if self._retries > before and now.plan.once and now.plan.once == self._once:
            self._ceiling = int(min(self._limit, peak) * LESS)
        self._once = now.plan.once
        self._note(now, peak)
        if not self._warm:
            self._warm = True
        elif now.unforeseen or now.failed:
            self._measurements = [each for each in self._measurements if each is not now.measurement]
        elif now.plan.is_empty:
            self._measure(now, peak)
        elif now.measurement is not None:
            now.measurement.margin = max(now.measurement.margin, peak - now.plan.peak)

    def _measure(self, now: _MicroBatch, peak: int) -> None:
        """Add the measurement of a micro-batch with every layer checkpointed."""
        if self.budget is not None and peak > self.budget * GIB and now.size is not None and not self._warned:
            self._warned = True
            logger.warning(summary.over_budget(now.size, peak, self.budget))
        if all(call.last is None for call in now.calls):  # a loss without the model
            return
        seconds = 0.0
        if self._transport is not None and now.timestamps:  # the median, without what happens once
            pairs = zip(now.timestamps[::2], now.timestamps[1::2], strict=True)
            seconds = median(self._transport.seconds(*pair) for pair in pairs) * len(now.calls)
        peaks = [each - now.base for each in now.peaks]
        new = Measurement(now.sizes, now.accumulates, now.long, peaks, now.calls, seconds)
        smaller = [each for each in self._measurements if new.covers(each.sizes, each.accumulates, each.long)]
        new.margin = max((each.margin for each in smaller), default=0)
        if smaller or not any(each.covers(now.sizes, now.accumulates, now.long) for each in self._measurements):
            self._measurements = [each for each in self._measurements if each not in smaller] + [new]

    def _note(self, now: _MicroBatch, peak: int) -> None:
        if now.measurement is None or now.size is None:
            return
        counts = (sum(done == way for done in now.ways.values()) for way in ("whole", "attention", "host"))
        changed = self.summary.add(now.size, peak, len(now.ways), *counts)
        if changed and (not self._ranks.several or dist.get_rank() == 0):
            logger.info(self.summary.log_line(self._limit))


def _rebuilding(keep: Callable[..., Any], value_of: Callable[..., Any]) -> saved_tensors_hooks:
    """Return a context in which `rebuild.py` rebuilds what it would without checkpointing, though hooks are there.

    So what a recomputed layer holds is what it would keep.
    """
    marked = partial(keep)
    marked.keeps_values = True  # type: ignore[attr-defined]
    return saved_tensors_hooks(marked, value_of)
