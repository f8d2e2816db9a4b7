"""Runs `activation_checkpointing: auto` in one training: measures, chooses a plan, and sees what it took."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from liger_trainer._logging import logger
from liger_trainer.memory import keep_attention, light, offload, outcome, switches
from liger_trainer.memory.memory import GIB, Memory, is_out_of_memory, limit_of
from liger_trainer.memory.offload import Offload
from liger_trainer.memory.outcome import Outcome
from liger_trainer.memory.plan import NOTHING, Call, Link, Seen, Size, Sizes, choose, sizes_of

STAYS = 0.5  # of its hidden states: as many bytes of a layer on the host may stay on the GPU
LESS = 0.98  # of the limit, after the allocator has run out of what it had cached


class Ranks:
    """All processes of the training.

    They agree once in a micro-batch, through the host's network. The GPUs do not wait for that, and neither does the
    host wait for its GPU: it needs the other hosts only, which issue their work at the same pace.
    """

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo") if several else None

    @property
    def first(self) -> bool:
        return self.group is None or dist.get_rank() == 0

    def least(self, *numbers: int) -> tuple[int, ...]:
        """The least of the numbers that all processes give in each place. All have to call this, with as many."""
        if self.group is None:
            return numbers
        least = torch.tensor(numbers)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return tuple(least.tolist())

    def close(self) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None


class _MicroBatch:
    """One micro-batch while it runs."""

    def __init__(self, sizes: Sizes, adds: bool):
        self.sizes, self.adds = sizes, adds  # of the batch; whether gradients are there already
        self.long = (
            False  # whether rows are so long that it pays to keep the results of attention, and that is possible
        )
        self.base = 0  # bytes that were allocated when its first layer was called
        self.seen: Seen | None = None  # what it was planned by
        self.plan = NOTHING  # if it stays so, the micro-batch is measured
        self.calls: list[Call] = []
        self.moments: list[int] = []
        self.marks: list[Any] = []  # of the device's clock, at the start and the end of each call
        self.done: dict[int, str] = {}  # how each layer was called
        self.offload: Offload | None = None
        self.surprised = False  # whether a call was not one of those that were measured; all after it are checkpointed
        self.whole = True  # whether no call has failed
        self.inside = False  # whether a layer is running; the layers inside it are its own affair

    @property
    def size(self) -> Size | None:
        """The most that a layer is given."""
        return max((call.size for call in self.calls), key=lambda size: size.tokens, default=None)

    def expects(self, call: Call) -> bool:
        """Whether `call`, the last one until now, is covered by what was measured."""
        number = sum(other.layer == call.layer for other in self.calls) - 1
        measured = [] if self.seen is None else self.seen.layers.get(call.layer, [])
        return number < len(measured) and measured[number].size.covers(call.size)


class Chooser:
    """Decides for each layer what is kept: all activations, here or on the host, its attention, or nothing.

    A micro-batch that none before it covers is measured, with every layer checkpointed. What a layer would keep is seen
    when the backward pass computes it again. From then on as many layers keep something as fit. If a micro-batch has
    taken more than was predicted, as much is left free in the next ones.

    Args:
        memory (`Memory`): The device's.
        budget (`float`, *optional*): GiB; without it, what the device has, less a reserve.
        host_budget (`float`, *optional*): GiB of the host's memory in which activations may wait; without it, a part of
            what is free.
        lightly (`bool`): Whether layers may be checkpointed as in `light.py`.
        warm (`bool`): Whether the first micro-batch is like all others, and compiles no kernels.
    """

    def __init__(
        self, memory: Memory, budget: float | None, host_budget: float | None = None, lightly: bool = True,
        warm: bool = False,
    ):  # fmt: skip
        self.memory, self.budget, self.lightly, self._warm = memory, budget, lightly, warm
        self.outcome = Outcome(budget)
        self._transport = memory.transport(host_budget)
        self._room = 0 if self._transport is None else self._transport.host.room
        self._host_fails = False  # whether activations have stayed on the GPU that were to go to the host
        self._seen: list[Seen] = []
        self._limit = 0  # bytes
        self._ceiling: int | None = None  # a lower limit, once the allocator was short of memory
        self._retries = memory.retries()
        self._once: frozenset[int] = frozenset()  # the layers that the micro-batch before has computed once
        self._warned = False  # of a budget that is too small
        self._model: nn.Module | None = None
        self._parameters: list[nn.Parameter] = []
        self._learn: list[bool] = []  # of each parameter, whether it is trained
        self._samples: set[int] = set()  # layers that show what is kept without checkpointing when they run again
        self._ranks: Ranks | None = None
        self._now: _MicroBatch | None = None

    def end(self) -> None:
        """Leave the model as it was before the first micro-batch."""
        if self._model is not None:
            switches.remove(self._model)
        if self._ranks is not None:
            self._ranks.close()
        if self._transport is not None:
            self.outcome.host_bytes = self._transport.host.taken
            self._transport.host.release()
        self._model, self._parameters, self._now, self._seen = None, [], None, []

    # Running micro-batches

    def run(self, model: nn.Module, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `step(*args, **kwargs)`, which runs the forward and the backward pass of a micro-batch of `model`."""
        if self._ranks is None:  # only now the model is sharded and wrapped
            self._model, self._parameters, self._ranks = model, list(model.parameters()), Ranks()
            (self._room,) = self._ranks.least(self._room)
        learn = [parameter.requires_grad for parameter in self._parameters]
        if learn != self._learn:  # what layers keep depends on it
            switches.install(model, self._call)
            self._seen, self._learn, self._samples = [], learn, _middles(switches.switches_of(model))
        adds = any(parameter.grad is not None for parameter in self._parameters)
        self._now = now = _MicroBatch(sizes_of((args, kwargs)), adds)
        try:
            result = step(*args, **kwargs)
        except RuntimeError as error:
            if is_out_of_memory(error):
                took = min(self._limit, max(self.memory.peak(), *now.moments, 0))
                error.args = (outcome.out_of_memory(now.size, len(now.plan.once), took, str(error)),)
            raise
        finally:
            self._now = None
        if now.calls:
            self._look_back(now)
        return result

    def _call(self, switch: switches.Switch, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call the layer of `switch`, and keep its activations or not."""
        now, hidden = self._now, switches.hidden_of(function, args)
        if now is None or now.inside or hidden is None or not torch.is_grad_enabled():
            return switch.checkpointed(function, *args)
        size, number = switches.size_of(hidden), len(now.calls)
        if not number:
            now.sizes[None] = size
            long = switches.longest_of(function, args, hidden) >= keep_attention.LONG
            now.long = long and keep_attention.is_possible(switch.checkpointed)
            self._decide(now)
        casts = switch.casts if torch.is_autocast_enabled(hidden.device.type) else 0
        call = Call(switch.layer, switch.group, size, len(now.moments), casts=casts, given=hidden.nbytes)
        now.calls.append(call)
        now.done[call.layer] = way = self._way(now, call, switch)
        if now.offload is not None:
            now.offload.begins(number)
        self._mark(now)
        try:
            output = self._run(now, call, way, switch, function, args)
        except BaseException:
            now.whole = False
            raise
        self._mark(now)
        if now.offload is not None:
            now.offload.returned(number, switches.tensors_in(output))
        return output

    def _way(self, now: _MicroBatch, call: Call, switch: switches.Switch) -> str:
        """How a layer is called: "whole", "host", "attention" or "checkpointed"."""
        now.surprised = now.surprised or not (now.plan.is_empty or now.expects(call))
        if now.surprised and not self._several:  # several processes compute the same layers again, come what may
            return "checkpointed"
        if call.layer in now.plan.kept:
            return "whole"
        if call.layer in now.plan.on_host and now.offload is not None and offload.is_possible():
            return "host"
        if call.layer in now.plan.attention and keep_attention.is_possible(switch.checkpointed):
            return "attention"
        return "checkpointed"

    def _run(
        self, now: _MicroBatch, call: Call, way: str, switch: switches.Switch, function: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> Any:  # fmt: skip
        measured, given = now.plan.is_empty, switch.checkpointed
        lightly = self.lightly and way == "checkpointed" and light.device_of(given, args) is not None

        def run(*args: Any) -> Any:  # also when the backward pass computes the layer again
            again = torch._C._current_graph_task_id() != -1
            counts = measured and now.long and not again
            before, now.inside = now.inside, True
            try:
                with (
                    self._again(now, call) if measured and again and not lightly else nullcontext(),
                    keep_attention.counting(partial(setattr, call, "attention")) if counts else nullcontext(),
                ):
                    return function(*args)
            finally:
                now.inside = before

        if way == "whole":
            return run(*args)
        if way == "host":
            assert now.offload is not None
            hidden = switches.hidden_of(function, args)
            others = [x for x in switches.given(function, args) if x is not hidden]
            output = now.offload.call(len(now.calls) - 1, switch.module(), run, args, others)
            if now.offload.stays > STAYS * call.given and not self._host_fails:
                self._host_fails = now.surprised = True
                logger.warning(
                    "Activations that were to wait in the host's memory have stayed on the GPU. No more are sent."
                )
            return output
        if way == "attention":
            return keep_attention.checkpoint(given, run, args)
        if not lightly:
            return given(run, *args)
        around = partial(self._again, now, call) if measured else None
        return light.checkpoint(given, run, args, around, measured and call.layer in self._samples)

    @contextmanager
    def _again(self, now: _MicroBatch, call: Call) -> Iterator[None]:
        """Around a layer that is computed again, in a micro-batch that is measured."""
        if now is not self._now or call.last is not None:  # a backward pass that comes later, or a second one
            yield
            return
        now.moments.append(self.memory.peak())
        call.last, before = len(now.moments), self.memory.allocated()
        try:
            yield
        finally:
            call.extra = max(0, self.memory.allocated() - before)

    def _mark(self, now: _MicroBatch) -> None:
        if self._transport is not None and self._room and now.plan.is_empty:
            now.marks.append(self._transport.mark())

    # Choosing

    @property
    def _several(self) -> bool:
        return self._ranks is not None and self._ranks.group is not None

    def _decide(self, now: _MicroBatch) -> None:
        """Choose what a micro-batch keeps that is about to call its first layer."""
        self._limit = limit_of(self.budget, self.memory.capacity())
        if self._ceiling is not None:
            self._limit = min(self._limit, self._ceiling)
        self.memory.peak()  # from here
        now.base = self.memory.allocated()
        covering = [seen for seen in self._seen if seen.covers(now.sizes, now.adds, now.long)]
        link = self._link(covering)
        for seen in covering:
            plan = choose(seen, now.base, self._limit - seen.margin, now.sizes, now.long, link)
            if now.seen is None or plan.amount > now.plan.amount:
                now.seen, now.plan = seen, plan
        if self._several:
            self._agree(now)
        if now.plan.on_host and self._transport is not None:
            now.offload = Offload(self._transport.host, self._transport.stream, now.plan.lag, now.plan.ahead)

    def _link(self, covering: list[Seen]) -> Link | None:
        """The way to the host's memory. Several processes go at the slowest one's pace."""
        if self._transport is None or not self._room or self._ranks is None:
            return None
        pace = max((seen.pace(self._transport.rate) for seen in covering), default=0.0)
        pace = math.inf if self._host_fails else pace
        (least,) = self._ranks.least(-round(min(1000 * pace, 10**9)))
        return Link(self._room, -least / 1000)

    def _agree(self, now: _MicroBatch) -> None:
        """Compute those layers again that another process does: to do so may take part in communication."""
        assert self._ranks is not None and self._model is not None
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
        now.moments.append(self.memory.peak())
        peak, self.outcome.highest = max(now.moments), self.memory.highest
        before, self._retries = self._retries, self.memory.retries()
        if self._retries > before and now.plan.once and now.plan.once == self._once:
            self._ceiling = int(min(self._limit, peak) * LESS)
        self._once = now.plan.once
        self._note(now, peak)
        if not self._warm:
            self._warm = True
        elif now.surprised or not now.whole:
            self._seen = [seen for seen in self._seen if seen is not now.seen]
        elif now.plan.is_empty:
            self._measured(now, peak)
        elif now.seen is not None:
            now.seen.margin = max(now.seen.margin, peak - now.plan.peak)

    def _measured(self, now: _MicroBatch, peak: int) -> None:
        """After a micro-batch with every layer checkpointed."""
        if self.budget is not None and peak > self.budget * GIB and now.size is not None and not self._warned:
            self._warned = True
            logger.warning(outcome.over_budget(now.size, peak, self.budget))
        if all(call.last is None for call in now.calls):  # a loss without the model
            return
        for group in {call.group for call in now.calls}:
            self._correct([call for call in now.calls if call.group == group and call.last is not None], now.moments)
        seconds = 0.0
        if self._transport is not None and now.marks:  # of a forward pass, but for what happens once
            pairs = zip(now.marks[::2], now.marks[1::2], strict=True)
            seconds = median(self._transport.seconds(*pair) for pair in pairs) * len(now.calls)
        moments = [moment - now.base for moment in now.moments]
        seen = Seen(now.sizes, now.adds, now.long, moments, now.calls, seconds)
        smaller = [other for other in self._seen if seen.covers(other.sizes, other.adds, other.long)]
        seen.margin = max((other.margin for other in smaller), default=0)
        if smaller or not any(other.covers(now.sizes, now.adds, now.long) for other in self._seen):
            self._seen = [other for other in self._seen if other not in smaller] + [seen]

    def _correct(self, calls: list[Call], moments: list[int]) -> None:
        """Take what the samples among like `calls` have not kept from what the others would keep.

        A layer that keeps its activations leaves out what the backward pass computes again by itself. Only the samples
        did so when they ran again, and held less than they will.
        """
        samples = [call for call in calls if call.layer in self._samples]
        others = [call for call in calls if call.layer not in self._samples]
        if self.lightly and samples and others:
            less = max(0, min(call.extra for call in others) - max(call.extra for call in samples))
            for call in samples:
                moments[call.last or 0] += less
            for call in others:
                call.extra -= less

    def _note(self, now: _MicroBatch, peak: int) -> None:
        if now.seen is None or now.size is None:
            return
        counts = (sum(done == way for done in now.done.values()) for way in ("whole", "attention", "host"))
        changed = self.outcome.add(now.size, peak, len(now.done), *counts)
        if changed and self._ranks is not None and self._ranks.first:
            logger.info(self.outcome.line(self._limit))


def _middles(all_switches: list[switches.Switch]) -> set[int]:
    """The layer in the middle of each group of two and more."""
    groups: dict[Any, list[int]] = {}
    for switch in all_switches:
        groups.setdefault(switch.group, []).append(switch.layer)
    return {layers[len(layers) // 2] for layers in groups.values() if len(layers) > 1}
