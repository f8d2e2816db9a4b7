"""Measuring a micro-batch, on a memory whose sizes are written down."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from liger_trainer.checkpointing.measure import Order, Recording
from liger_trainer.checkpointing.plan import Size
from liger_trainer.checkpointing.switches import Switch, longest_of, size_of

SIZE = Size(2, 50)
WHOLE, ATTENTION, INPUT, GRADIENT = 30, 7, 4, 11


class WrittenMemory:
    """What tensors take up is what a test writes down."""

    def __init__(self):
        self.now = self.most = self.highest = 0

    def add(self, size):
        self.now += size
        self.most, self.highest = max(self.most, self.now), max(self.highest, self.now)

    def allocated(self):
        return self.now

    def start_peak(self):
        self.most = self.now

    def peak(self):
        return self.most


class Layers:
    """Layers of one class whose calls are written down; `gives_back` is what the first one frees besides."""

    def __init__(self, memory, count, gives_back=0):
        self.memory, self.gives_back, self.kept = memory, gives_back, []
        self.modules = [torch.nn.Linear(3, 3) for _ in range(count)]
        self.switches = [Switch(None, module, functools.partial(self.checkpoint, i)) for i, module in enumerate(self)]

    def __iter__(self):
        return iter(self.modules)

    def checkpoint(self, number, run, *args, context_fn=None):
        if context_fn is not None:
            self.kept.append((number, "attention"))
        return self.returns(number, INPUT + (ATTENTION if context_fn is not None else 0))

    def run(self, number):
        self.kept.append((number, "whole"))
        return self.returns(number, INPUT + WHOLE)

    def returns(self, number, size):
        if number == 0:
            self.memory.add(-self.gives_back)
        self.memory.add(size)
        return torch.ones(2, 50, 3, requires_grad=True) * 1

    def order(self):
        order = Order()
        for switch in self.switches:
            order.add(switch, SIZE)
        return order

    def record(self, before, long=True):
        """All layers forward, and then backward, last first.

        Each has computed again by then what it has not kept, gives all of it back, and leaves a gradient.
        """
        recording = Recording(self.memory, before, long)
        outputs = []
        for number, switch in enumerate(self.switches):
            start = self.memory.now
            out = recording.call(switch, switch.checkpointed, functools.partial(self.run, number), (), SIZE)
            outputs.append((out, self.memory.now - start))
        for out, held in reversed(outputs):
            out.sum().backward()
            self.memory.add(INPUT + WHOLE - held)
            self.memory.add(GRADIENT - INPUT - WHOLE)
        return recording, recording.profile()


def test_the_samples_are_the_last_calls_as_the_micro_batch_before_has_shown_them():
    layers = Layers(WrittenMemory(), 5)
    recording, profile = layers.record(layers.order())
    assert sorted(layers.kept) == [(3, "attention"), (4, "whole")] and recording.samples == 2
    assert [(c.extra, c.attention) for c in profile.calls] == [(WHOLE, ATTENTION)] * 5
    assert profile.long


def test_the_moments_are_those_with_every_layer_checkpointed():
    layers, plain = (Layers(WrittenMemory(), 5) for _ in range(2))
    _, profile = layers.record(layers.order())
    _, without = plain.record(Order())
    assert profile.moments == without.moments
    assert not plain.kept and {c.extra for c in without.calls} == {None}


def test_what_is_measured_adds_nothing_to_a_peak_of_the_backward_pass():
    layers, plain = (Layers(WrittenMemory(), 40) for _ in range(2))
    layers.record(layers.order())
    plain.record(Order())
    assert layers.memory.highest == plain.memory.highest, "the samples are gone when gradients are there"


@pytest.mark.parametrize("gives_back", [-100, 100])
def test_one_call_of_another_size_does_not_count(gives_back):
    """Where FSDP2's hooks run within the call, the first layer frees the embedding, which is no layer's size."""
    layers = Layers(WrittenMemory(), 5, gives_back)
    _, profile = layers.record(layers.order())
    assert {c.extra for c in profile.calls} == {WHOLE}


def test_too_few_layers():
    for count, expected in ((1, (None, None)), (2, (WHOLE, None)), (3, (WHOLE, ATTENTION))):
        layers = Layers(WrittenMemory(), count)
        _, profile = layers.record(layers.order())
        assert {(c.extra, c.attention) for c in profile.calls} == {expected}


def test_short_rows_have_no_sample_of_attention():
    layers = Layers(WrittenMemory(), 5)
    _, profile = layers.record(layers.order(), long=False)
    assert layers.kept == [(4, "whole")] and not profile.long
    assert {(c.extra, c.attention) for c in profile.calls} == {(WHOLE, None)}


def test_a_layer_that_is_called_again_and_again():
    layers = Layers(WrittenMemory(), 1)
    layers.switches = layers.switches * 4
    _, profile = layers.record(layers.order())
    assert {(c.extra, c.attention) for c in profile.calls} == {(WHOLE, ATTENTION)}


def test_two_sizes_are_two_groups():
    order, layers = Order(), Layers(WrittenMemory(), 2)
    first, second = layers.switches
    groups = [order.add(switch, size) for size in (SIZE, Size(1, 9)) for switch in (first, second)]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert order.last(groups[0]) == order.last(groups[2]) == (second.layer, None)


class RowMask:
    """As that of `liger_trainer.varlen`."""

    def __init__(self, longest, window):
        self.rows, self.window = type("Rows", (), {"longest": longest}), window


@pytest.mark.parametrize(
    ("mask", "longest"),
    [(None, 50), (torch.zeros(2, 1, 50, 50), 50), (RowMask(20, None), 20), (RowMask(20, 5), 5), (RowMask(20, 40), 20)],
    ids=["none", "dense", "rows", "window", "wide window"],
)
def test_how_many_tokens_a_token_attends_to(mask, longest):
    hidden = torch.zeros(2, 50, 3)
    by_name = functools.partial(checkpoint, attention_mask=mask)
    for function, args in ((by_name, (hidden,)), (checkpoint, (hidden, mask))):
        assert longest_of(function, args, size_of(function, args)) == longest
