"""From the record of a micro-batch to a plan, compared with a simulation of the layers' memory."""

import functools
import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from liger_trainer.memory.device_memory import GIB, RESERVE, limit_of
from liger_trainer.memory.plan import NOTHING, ActivationPlan, Link, Measurement, RecordedCall, Size, choose, sizes_of
from liger_trainer.memory.switches import Switch, longest_of, switches_of
from liger_trainer.varlen.rows import RowMask, Rows

SIZE, BASE = Size(4, 100), 1000


class Step:
    """A micro-batch of layers with made-up sizes. `run` walks through it and counts.

    Each layer holds its input from its call to its backward pass, and its activations while it runs. Its gradient stays
    at the end. The head takes its own memory.
    """

    def __init__(self, seed, layers=10, head=None):
        dice = random.Random(seed)
        self.layers = range(layers)
        self.given, self.gradient = dice.randint(1, 8), dice.choice([0, 3, 15])
        self.extra = [dice.choice([20, 40]) for _ in self.layers] if seed % 2 else [30] * layers
        self.attention = [dice.randint(1, 5) for _ in self.layers]
        self.head = dice.randint(0, 200) if head is None else head
        self.inside = dice.randint(0, 10)  # what a backward pass takes in addition

    def run(self, plan=NOTHING, share=1.0):
        """Return the record: moments and calls. The most bytes of each moment are above `BASE`."""
        now = 0
        most = 0
        moments = []
        calls = []

        def add(size):
            nonlocal now, most
            now += size
            most = max(most, now)

        def scaled(size):
            return round(size * share)

        n, flying = len(self.layers), []
        for i in self.layers:
            for due, size in list(flying):  # copies to wait for
                if due == i:
                    add(-size)
                    flying.remove((due, size))
            calls.append(RecordedCall(i, "layer", SIZE, 0, None, 0, 0, self.attention[i], self.given))
            add(scaled(self.given))
            add(scaled(self.extra[i]))
            if i in plan.on_host:
                flying.append((i + 1 + plan.offload_lag, scaled(self.extra[i])))
            elif i not in plan.kept:
                add(-scaled(self.extra[i]))
                add(scaled(self.attention[i]) if i in plan.attention else 0)
        add(scaled(self.head))
        add(-scaled(self.head))
        for i in reversed(self.layers):
            for number in plan.on_host:
                if number + plan.prefetch_depth == i:
                    add(scaled(self.extra[number]) + scaled(self.given))
            if i not in plan.not_recomputed:
                moments.append(most)
                most = now
                calls[i].last = len(moments)
                calls[i].extra = self.extra[i]
                add(scaled(self.extra[i]) - (scaled(self.attention[i]) if i in plan.attention else 0))
            add(self.inside + self.gradient)
            add(-self.inside - scaled(self.extra[i]) - scaled(self.given))
            if i in plan.on_host:
                add(-scaled(self.given))
        assert now == self.gradient * n and not flying
        moments.append(most)
        return Measurement({None: SIZE}, False, True, moments, calls)

    def plan(self, limit, sizes=None, long=False, link=None):
        return choose(self.run(), BASE, limit, sizes or {None: SIZE}, long, link)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_plan_takes_no_more_than_it_says(seed, long, host):
    """It also stays within the limit, for all sizes of batches, budgets and copy speeds."""
    step, kept = Step(seed), []
    least, most = (max(step.run(plan).peaks) for plan in (NOTHING, ActivationPlan(frozenset(range(10)))))
    for part in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        limit = BASE + round(least + part * (most - least))
        for sizes, share in (({None: SIZE}, 1.0), ({None: Size(1, 100)}, 0.25)):
            pace = random.Random(seed).uniform(0.5, 4)
            link = Link(10**6, pace) if host else None
            plan = step.plan(limit, sizes, long, link)
            real = BASE + max(step.run(plan, share).peaks)
            assert real <= plan.peak + 10 * (share < 1) and plan.peak <= limit  # each size is rounded
            kept += [len(plan.not_recomputed)] * (share == 1)
    assert kept == sorted(kept) and kept[-1] == 10, "more memory is more layers"


def test_the_layer_with_the_first_backward_pass_is_kept_first():
    """This holds even if the layer adds nothing, because gradients are the peak."""
    step = Step(0, head=0)
    step.gradient = 20
    plan = step.plan(BASE + max(step.run().peaks))
    assert plan.kept == set(range(10 - len(plan.kept), 10)) and 0 < len(plan.kept) < 10
    assert plan.peak == BASE + max(step.run().peaks)
    assert step.plan(plan.peak - 20).kept <= plan.kept, "a moment above the limit in any case must not count"
    assert step.plan(plan.peak - 20).kept


def test_attention_comes_before_whole_layers():
    step = Step(0, head=200)
    limit = BASE + max(step.run().peaks) + sum(step.attention) + step.extra[9] - step.attention[9]
    plan = step.plan(limit, long=True)
    assert plan.kept == {9} and plan.attention == set(range(9))
    assert not step.plan(limit, long=False).attention


def test_host_memory_is_for_what_does_not_fit():
    step = Step(0, layers=20, head=200)
    least = max(step.run().peaks)
    most = max(step.run(ActivationPlan(frozenset(range(20)))).peaks)
    link = Link(10**6, 2.0)
    assert not step.plan(BASE + most, link=link).on_host
    half = step.plan(BASE + (least + most) // 2, link=link)
    assert len(half.not_recomputed) > len(step.plan(BASE + (least + most) // 2).not_recomputed)
    numbers = sorted(half.on_host)
    assert all(b - a >= 2 for a, b in zip(numbers, numbers[1:], strict=False)), "copies keep up with the layers"
    assert len(step.plan(BASE + (least + most) // 2, link=link._replace(host_bytes_free=90)).on_host) == 2
    assert not step.plan(BASE + (least + most) // 2, link=link._replace(layers_per_copy=50.0)).on_host


def test_nothing_is_kept_for_what_the_batch_did_not_show():
    """An encoder keeps nothing if the decoder may get more than in the measured micro-batch."""
    step = Step(0)
    seen = step.run()
    for call in seen.calls[:5]:
        call.size = Size(4, 50)
    assert choose(seen, BASE, 10**6, seen.sizes, False).kept == {5, 6, 7, 8, 9}
    seen.sizes["labels",] = SIZE
    assert choose(seen, BASE, 10**6, seen.sizes, False).kept == set(range(10))


def test_casts_of_weights_do_not_shrink_with_the_batch():
    assert RecordedCall(0, "layer", SIZE, 0, 1, extra=30, casts=10).bytes(0.5) == 20
    assert RecordedCall(0, "layer", SIZE, 0, 1, extra=5, casts=10).bytes(0.5) == 5


def test_sizes_of_a_batch():
    batch = ({"input_ids": torch.zeros(2, 7), "images": [torch.zeros(5, 3, 4)]}, 3, torch.zeros(()), torch.zeros(9))
    sizes = sizes_of(batch)
    assert sizes == {(0, "input_ids"): Size(2, 7), (0, "images", 0): Size(5, 12), (3,): Size(1, 9)}
    seen = Measurement(sizes, False, True, [1], [])
    assert seen.covers(sizes | {(0, "input_ids"): Size(3, 4), (0, "images", 0): Size(0, 0)}, False, True)
    assert not seen.covers(sizes, True, True)
    assert not seen.covers({place: size for place, size in sizes.items() if "images" not in place}, False, True)
    assert not seen.covers(sizes | {(3,): Size(1, 10)}, False, True)


@pytest.mark.parametrize(
    "size, covers",
    [(Size(4, 100), True), (Size(8, 50), True), (Size(1, 200), True), (Size(2, 201), False), (Size(1, 400), False)],
)
def test_which_size_covers_which(size, covers):
    assert SIZE.covers(size) is covers
    assert not covers or SIZE.share(size) <= 1


def test_limits():
    assert limit_of(None, 100 * GIB) == int(100 * GIB * (1 - RESERVE))
    assert 59.8 * GIB < limit_of(60, 100 * GIB) < 60 * GIB
    assert limit_of(200, 100 * GIB) == limit_of(None, 100 * GIB), "a budget gives the device no more memory"


# Hooks and policies of layers


def rows_of(window):
    """The mask that layers get for rows packed into one; the longest has 20 tokens."""
    return RowMask(Rows([20, 7], torch.device("cpu")), window)


@pytest.mark.parametrize(
    ("mask", "longest"),
    [(None, 50), (torch.zeros(2, 1, 50, 50), 50), (rows_of(None), 20), (rows_of(5), 5), (rows_of(40), 20)],
    ids=["none", "dense", "rows", "window", "wide window"],
)
def test_how_many_tokens_a_token_attends_to(mask, longest):
    hidden = torch.zeros(2, 50, 3)
    by_name = functools.partial(checkpoint, attention_mask=mask)
    for function, args in ((by_name, (hidden,)), (checkpoint, (hidden, mask))):
        assert longest_of(function, args, hidden) == longest


def test_layers_of_which_other_weights_are_trained_are_of_one_kind():
    """Otherwise, choosing trained weights one by one would make as many kinds as layers."""
    layers = [torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)) for _ in range(3)]
    layers[0][1].requires_grad_(False)
    layers[1].requires_grad_(False)
    for layer in layers:
        layer._gradient_checkpointing_func = Switch(None, layer, None)
    first, frozen, last = switches_of(torch.nn.ModuleList(layers))
    assert first.group == last.group != frozen.group
    assert first.casts == 2 * sum(p.numel() for p in layers[0].parameters())
