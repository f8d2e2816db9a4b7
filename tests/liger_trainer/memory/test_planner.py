"""The planner, its recorder and the four policies, one by one. `test_auto*.py` train with them."""

import functools
from types import SimpleNamespace

import pytest
import torch
from memory_runs import Carries, CountedMemory, Host
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from liger_trainer.memory.device_memory import GIB, limit_of
from liger_trainer.memory.micro_batch import MicroBatch, Phase
from liger_trainer.memory.micro_batch_record import MicroBatchRecord
from liger_trainer.memory.offload import Offload
from liger_trainer.memory.plan import ActivationPlan, Measurement, Measurements, RecordedCall, Size
from liger_trainer.memory.planner import ActivationPlanner, Budget
from liger_trainer.memory.policy import CALLS, LayerCall, LayerPolicy
from liger_trainer.memory.switches import Switch

SIZE = Size(2, 8)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        x = self.linear(x).exp()
        return nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0].sin()


def switch_of(layer):
    return Switch(lambda *args: None, layer, functools.partial(checkpoint_of_torch, use_reentrant=False))


@pytest.fixture
def planner():
    return ActivationPlanner(CountedMemory(), None)


def micro_batch(plan, measured=SIZE):
    """A micro-batch that calls its one layer, number 7. That layer was measured with an input of size `measured`."""
    memory = CountedMemory()
    measurement = Measurement({None: SIZE}, False, False, [0, 0], [RecordedCall(7, "layer", measured, 0, 1, extra=10)])
    now = MicroBatch({None: SIZE}, False, MicroBatchRecord(memory, None), measurement=measurement, plan=plan)
    now.phase = Phase.MEASURE if plan.is_empty else Phase.FOLLOW_PLAN
    call = RecordedCall(7, "layer", SIZE, 0)
    now.record.calls.append(call)
    return now, call


@pytest.mark.parametrize(
    "plan, policy",
    [
        (ActivationPlan(), LayerPolicy.RECOMPUTE),
        (ActivationPlan(kept=frozenset({7})), LayerPolicy.KEEP),
        (ActivationPlan(attention=frozenset({7})), LayerPolicy.KEEP_ATTENTION),
        (ActivationPlan(on_host=frozenset({7})), LayerPolicy.TO_HOST),
        (ActivationPlan(kept=frozenset({8})), LayerPolicy.RECOMPUTE),
    ],
)
def test_a_layer_has_the_policy_of_the_plan(planner, plan, policy):
    now, call = micro_batch(plan)
    now.offload = Offload(Host(), None, 0, 1)
    assert planner.policy_of(now, call, switch_of(Layer())) is policy
    assert now.phase is (Phase.MEASURE if plan.is_empty else Phase.FOLLOW_PLAN)


def test_a_call_that_was_not_measured_is_recomputed_and_so_are_all_after_it(planner):
    now, call = micro_batch(ActivationPlan(kept=frozenset({7})), measured=Size(1, 8))
    assert planner.policy_of(now, call, switch_of(Layer())) is LayerPolicy.RECOMPUTE
    assert now.phase is Phase.UNFORESEEN
    now.fail()
    assert now.phase is Phase.UNFORESEEN, "which says how the calls after it are run"
    now.measurement.calls[0].size = SIZE
    assert planner.policy_of(now, call, switch_of(Layer())) is LayerPolicy.RECOMPUTE


@pytest.mark.parametrize("policy", LayerPolicy)
def test_each_policy_computes_the_same(policy):
    """It runs the layer again in the backward pass, or not, as `recomputes` says."""
    torch.manual_seed(0)
    layer = Layer()
    x = torch.randn(2, 8, 16, requires_grad=True)
    want = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    host = Host()
    layer.runs = 0
    call = LayerCall(switch_of(layer), layer, (x,), layer, 0, Offload(host, None, 0, 1))
    loss = CALLS[policy](call).square().sum()
    assert (host.taken > 0) == (policy is LayerPolicy.TO_HOST)
    got = torch.autograd.grad(loss, [x, *layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert layer.runs == (2 if policy.recomputes else 1)


def test_a_ceiling_lowers_the_limit_and_never_raises_it():
    assert Budget(2.0).limit(8 * GIB) == limit_of(2.0, 8 * GIB)
    assert Budget(2.0, ceiling=GIB).limit(8 * GIB) == GIB
    assert Budget(2.0, ceiling=4 * GIB).limit(8 * GIB) == limit_of(2.0, 8 * GIB)


def test_the_ceiling_falls_when_the_same_plan_is_short_of_memory_twice(planner):
    """A single shortage may be the allocator adapting to a new plan."""
    planner.memory.retries = lambda: planner.retried
    now, _ = micro_batch(ActivationPlan(kept=frozenset({7})))
    now.limit = 1000
    for planner.retried, ceiling in ((1, None), (1, None), (2, 784)):
        planner._lower_ceiling(now, peak=800)
        assert planner._budget.ceiling == ceiling


def test_a_larger_measurement_takes_the_place_of_smaller_ones_and_their_margin():
    def measured(length):
        return Measurement({None: Size(1, length)}, False, False, [0], [RecordedCall(7, "layer", Size(1, length), 0)])

    measurements = Measurements()
    small = measured(8)
    large = measured(16)
    measurements.add(small)
    small.margin = 5
    measurements.add(large)
    assert measurements.covering({None: Size(1, 4)}, False, False) == [large]
    assert large.margin == 5
    measurements.add(measured(12))
    assert measurements.covering({None: Size(1, 4)}, False, False) == [large], "one that is covered is not added"
    measurements.forget(large)
    assert not measurements.covering({None: Size(1, 4)}, False, False)


def test_the_recorder_measures_a_recomputed_layer_once_and_only_while_its_micro_batch_runs():
    memory = SimpleNamespace(now=100, allocated=lambda: memory.now, peak=lambda: memory.now + 1)
    record, first, late = (
        MicroBatchRecord(memory, Carries()),
        RecordedCall(1, "layer", SIZE, 0),
        RecordedCall(2, "layer", SIZE, 0),
    )
    record.start()
    for call in (first, late):
        record.calls.append(call)
        record.mark()
        record.mark()
    for grows in (30, 70):  # the second is another backward pass through the same layer
        with record.recomputing(first):
            memory.now += grows
    record.close()
    with record.recomputing(late):
        memory.now += 10
    assert record.end_last_interval() == 211
    measurement = record.measurement({None: SIZE}, False, False)
    assert (first.last, first.extra, late.last) == (1, 30, None)
    assert measurement.peaks == [1, 111]
    assert measurement.seconds == 1.0, "half a second for each of two calls"


def test_a_micro_batch_without_a_recomputed_layer_measures_nothing():
    memory = CountedMemory()
    record = MicroBatchRecord(memory, None)
    record.start()
    record.calls.append(RecordedCall(1, "layer", SIZE, 0))
    record.end_last_interval()
    assert record.measurement({None: SIZE}, False, False) is None
