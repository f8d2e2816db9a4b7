"""The life of `activation_checkpointing: auto` in one training: measure, choose, and run again what did not fit."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer._logging import logger
from liger_trainer.checkpointing import outcome, switches
from liger_trainer.checkpointing.agreement import Ranks
from liger_trainer.checkpointing.choose import Carrier, choose
from liger_trainer.checkpointing.measure import Order, Recording
from liger_trainer.checkpointing.memory import GIB, Memory, limit_of
from liger_trainer.checkpointing.micro_batch import MicroBatch
from liger_trainer.checkpointing.offload import Offload
from liger_trainer.checkpointing.outcome import Outcome
from liger_trainer.checkpointing.plan import NOTHING, NOWHERE, Count, Plan, Profile, Size, Spread
from liger_trainer.checkpointing.redo import Before, forget_gradients, has_gradients, is_out_of_memory

LESS = 0.98  # of the peak of a plan that ran out of memory: what plans may fill from then on
MEASURE = Count(-1, -1, -1)  # instead of numbers of layers: each is checkpointed, and the micro-batch is measured


class Chooser:
    """Decides for each call of a layer what is kept: all activations, here or on the host, its attention, or nothing.

    In the first optimizer step every layer is checkpointed, since the states of the optimizer are not there yet. After
    that a micro-batch is measured, again with every layer checkpointed, if it is larger than those before. What was
    measured is kept apart for micro-batches that add to gradients and for those that make them and need more memory.

    Args:
        model (`nn.Module`): Is about to be trained, with checkpointing.
        memory (`Memory`): The device's.
        budget (`float`, *optional*): GiB; without it, what the device has, less a reserve.
        why_not_again (`str`, *optional*): Why a micro-batch cannot be run again when it runs out of memory.
        keeps_gradients (`bool`): Whether the gradients of all weights exist together, at the end of a micro-batch.
        host_budget (`float`, *optional*): GiB of the host's memory in which activations may wait; without it, a part of
            what is free.
    """

    def __init__(
        self, model: nn.Module, memory: Memory, budget: float | None, why_not_again: str | None = None,
        keeps_gradients: bool = True, host_budget: float | None = None,
    ):  # fmt: skip
        self.model, self.memory, self.budget, self.why_not_again = model, memory, budget, why_not_again
        self.keeps_gradients = keeps_gradients
        self.outcome = Outcome(budget)
        self._transport = memory.transport(host_budget)
        self._profiles: dict[bool, Profile] = {}  # for micro-batches that add to gradients, and that do not
        self._outgrown: set[bool] = set()  # which of them have turned out to be too small for a call
        self._caps: dict[Size, Count] = {}  # the most that is kept from this size on, which ran out of memory
        self._order = Order()  # of the last micro-batch without a plan
        self._limit = self._base = 0  # what may be allocated, and what was when the micro-batch began
        self._ceiling: int | None = None  # bytes: a lower limit, once a plan has run out of memory
        self._window: list[Before] = []  # the micro-batches since the last optimizer step
        self._began = self._stepped = False  # whether there was a micro-batch, and an optimizer step
        self._warned = False  # of a budget that is too small
        self._shared: bool | None = None  # whether a weight was used by several calls, as soon as that was seen
        self._learn: list[bool] = []  # of each parameter, whether it is trained
        self._now: MicroBatch | None = None
        self._parameters: list[nn.Parameter] | None = None
        self._ranks: Ranks | None = None
        self._carrier: Carrier | None = None
        self.inputs_on_host = False  # of checkpointed layers

    def _begin(self) -> list[nn.Parameter]:
        """What cannot be done before the model is sharded and wrapped, as it is in its first micro-batch."""
        switches.install(self.model, self._call)
        self._ranks = Ranks()
        self._parameters = list(self.model.parameters())  # a callback may train others later
        self._carrier = None
        if self._transport is not None:
            self._carrier = Carrier(self._transport.host.room, self._transport.rate)
        return self._parameters

    def _look_at_parameters(self, parameters: list[nn.Parameter]) -> None:
        """Begin anew, as with the first step, when others are trained. What layers keep depends on that."""
        learn = [parameter.requires_grad for parameter in parameters]
        if self._learn and learn != self._learn:
            switches.install(self.model, self._call)
            self._began = self._stepped = False
            self._profiles, self._outgrown = {}, set()
        self._learn = learn

    @property
    def forgets_casts(self) -> bool:
        """Whether autocast forgets the weights of a layer in 16 bits when it has been called.

        It remembers them for whoever uses these weights again in the forward pass, who here is nobody. So layers that
        are computed again do not hold them until its end, and what others hold of them is part of what is measured.
        """
        return self._shared is False

    def end(self) -> None:
        """Leave the model as it was before the first micro-batch."""
        switches.remove(self.model)
        if self._ranks is not None:
            self._ranks.close()
        if self._transport is not None:
            self.outcome.host_bytes = self._transport.host.taken
            self._transport.host.release()
        self._window, self._parameters, self._now = [], None, None

    def _call(self, switch: switches.Switch, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._now is None or self._now.inside or not torch.is_grad_enabled():
            return switch.checkpointed(function, *args)
        return self._now.call(switch, function, args)

    # Running micro-batches

    def run(self, trainer: Any, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `step(*args, **kwargs)`, which runs the forward and the backward pass of a micro-batch."""
        self._look_at_parameters(self._parameters or self._begin())
        if not has_gradients(self._parameters or ()):
            self._stepped, self._window = self._began, []
        self._began = True
        if self.why_not_again is None:
            self._window.append(Before.of(trainer, args, kwargs))
        try:
            return self._until_it_fits(trainer, step, args, kwargs)
        except BaseException:
            self._now = None
            del self._window[-1:]  # a trainer that catches the error goes on without this micro-batch
            raise

    def _until_it_fits(
        self, trainer: Any, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # fmt: skip
        again = False
        while True:
            try:
                if again:
                    args, kwargs = self._go_back(trainer, step)
                return self._attempt(step, args, kwargs)
            except RuntimeError as error:
                failed, self._now = self._now, None
                if not is_out_of_memory(error):
                    raise
                reason = self._retreat(failed, str(error))
                if reason is not None:
                    error.args = (reason,)
                    raise
            # The error is gone, and with it the frames that held the tensors of the micro-batch
            again = True

    def _attempt(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        adds = has_gradients(self._parameters or ())
        self._now = now = MicroBatch(self, adds)
        result = step(*args, **kwargs)
        self._now = None
        if now.order is not None:
            self._order = now.order
        if now.recording is not None and now.recording.is_whole:
            self._order = now.recording.order
            new, old = now.recording.profile(), self._profiles.get(adds)
            self._profiles[adds] = new if old is None else old.merged(new)
            self._outgrown.discard(adds)
            self._find_limit()
            self.outcome.highest = self.memory.highest
        elif now.outgrew:
            self._outgrown.add(adds)
        elif now.offload is not None and now.plan is not None and now.size is not None:
            self._profiles[adds] = self._profiles[adds].with_seen(now.offload.seen, now.size)
        again = len(set(now.called)) < len(now.called)
        if now.called and not self._shared and (again or now.plan is None):
            self._shared = switches.share_weights(self.model, now.called)
            self._outgrown |= self._profiles.keys() if self._shared else set()  # measured while casts were forgotten
        return result

    def _go_back(self, trainer: Any, step: Callable[..., Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Undo all micro-batches since the last optimizer step, and run all but the last of them again."""
        forget_gradients(self._parameters or ())
        self.memory.release()
        for before in self._window[:-1]:
            self._attempt(step, *before.restore(trainer))
        return self._window[-1].restore(trainer)

    def _retreat(self, failed: MicroBatch | None, error: str) -> str | None:
        """Plan for more checkpointing after a lack of memory. Returns the error's text if that is not possible."""
        size, kept = (None, NOTHING) if failed is None else (failed.size, failed.keeps)
        if self.why_not_again is not None:
            return outcome.cannot_redo(self.why_not_again, size, kept, error)
        if size is None or (kept == NOTHING and (self._transport is None or self.inputs_on_host)):
            return outcome.too_large(size, self._tokens_that_fit(), error)
        self._caps[size] = NOTHING
        if kept == NOTHING:
            self._put_inputs_on_host()
        elif failed is not None and failed.plan is not None:
            others = Count(0, kept.attention, kept.on_host) if kept.whole else _half(kept)
            self._caps[size] = others._replace(whole=kept.whole // 2)
            self._ceiling = int(failed.plan.peak * LESS)
            self._find_limit()
        self.outcome.run_again += 1
        logger.warning(outcome.run_again(size, self._caps.get(size, NOTHING), self.inputs_on_host))
        return None

    def _put_inputs_on_host(self) -> None:
        """Have checkpointed layers keep nothing on the GPU from now on, and forget what was measured without that."""
        self.inputs_on_host = self.outcome.inputs_on_host = True
        self._profiles, self._caps = {}, {}

    # Choosing

    def decide(self, now: MicroBatch) -> tuple[Plan | None, Recording | None]:
        """The plan of a micro-batch that is about to call its first layer, or the recording by which it is measured.

        If both are None, every layer is checkpointed.
        """
        size = now.size
        if size is None or not self._stepped:
            self._agree(NOTHING, NOWHERE)
            return None, None
        profile, plan = self._profiles.get(now.adds), None
        self._base = self.memory.allocated()
        caps = [most for least, most in self._caps.items() if size.covers(least)]
        cap = Count(*map(min, zip(*caps, strict=True))) if caps else None
        if profile is not None and profile.covers(size) and now.adds not in self._outgrown:
            if profile.long or not now.long:
                plan = choose(profile, self._base, self._limit, size, cap, now.long, self._carrier)
            if plan is not None and plan.peak > self._limit and self._carrier is not None and not self.inputs_on_host:
                self._put_inputs_on_host()
                plan = None
        wanted = plan.count if plan is not None else NOTHING if cap == NOTHING else MEASURE
        spread = NOWHERE if plan is None else plan.spread
        agreed, alike = self._agree(wanted, spread)
        if profile is None or plan is None or agreed[0] == MEASURE:
            measured = agreed[0] == MEASURE and cap != NOTHING
            recording = Recording(self.memory, self._order, now.long, self._transport) if measured else None
            return None, recording
        if agreed != (wanted, spread):
            plan = choose(profile, self._base, self._limit, size, long=now.long, agreed=agreed)
        if agreed[0].on_host and not alike:  # elsewhere than this process has planned
            plan = self._fitting(plan, profile, size, cap, now.long)
        self._note(size, profile, plan)
        return plan, None

    def _agree(self, wanted: Count, spread: Spread) -> tuple[tuple[Count, Spread], bool]:
        """What all processes can do, and whether all of them want just that."""
        assert self._ranks is not None  # there is one since `_begin`
        numbers = (*wanted, -spread.start, -spread.lag)
        found = self._ranks.least(*numbers, *(-number for number in numbers))
        least, most = found[: len(numbers)], tuple(-number for number in found[len(numbers) :])
        whole, attention, on_host, start, lag = least
        return (Count(whole, attention, on_host), Spread(max(on_host, 0), -start, -lag)), least == most

    def _fitting(self, plan: Plan, profile: Profile, size: Size, cap: Count | None, long: bool) -> Plan:
        """`plan` if it fits in all processes, or else the one without the host that does."""
        assert self._ranks is not None
        without = choose(profile, self._base, self._limit, size, cap, long)
        fits = plan.peak <= max(self._limit, self._base + profile.peak)
        every, whole, attention = self._ranks.least(fits, len(without.kept), len(without.attention))
        if every:
            return plan
        agreed = Count(whole, attention), NOWHERE
        return choose(profile, self._base, self._limit, size, long=long, agreed=agreed)

    def offload(self, plan: Plan | None) -> Offload | None:
        """What carries activations of a micro-batch to the host and back; None if there is nothing to carry."""
        if self._transport is None or not (self.inputs_on_host or (plan is not None and plan.on_host)):
            return None
        return Offload(self._transport.host, self._transport.stream, NOWHERE if plan is None else plan.spread)

    def covers(self, now: MicroBatch, size: Size | None, number: int) -> bool:
        """Whether what was measured covers call `number` of a micro-batch, which is given `size`."""
        return size is not None and self._profiles[now.adds].covers(size, number)

    def _find_limit(self) -> None:
        self._limit = limit_of(self.budget, self.memory.capacity())
        if self._ceiling is not None:
            self._limit = min(self._limit, self._ceiling)

    def _note(self, size: Size, profile: Profile, plan: Plan) -> None:
        layers = len(profile.calls)
        larger = self.outcome.add(size, layers, plan)
        if self._ranks is None or not self._ranks.first:
            return
        if larger:
            logger.info(outcome.chosen(size, layers, plan, self._limit))
        if self.budget is not None and plan.peak > self.budget * GIB and not self._warned:
            self._warned = True
            logger.warning(outcome.over_budget(size, plan.peak, self.budget, self._tokens_that_fit()))

    def _tokens_that_fit(self) -> int | None:
        """About how many tokens a micro-batch may have with every layer checkpointed, if one was measured."""
        profile = self._profiles.get(False) or self._profiles.get(True)
        if profile is None or not profile.calls:
            return None
        adds = profile is not self._profiles.get(False)
        trained = [p for p in self._parameters or () if p.requires_grad]
        grown = 0 if adds or not self.keeps_gradients else sum(p.numel() * p.element_size() for p in trained)
        activations = max(1, profile.peak - min(grown, profile.peak // 2))
        left = self._limit - self._base - (profile.peak - activations)
        return max(0, int(profile.calls[0].size.tokens * left / activations))


def _half(kept: Count) -> Count:
    return Count(*(number // 2 for number in kept))
