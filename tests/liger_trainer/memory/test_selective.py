"""Layers recomputed without their attention are bit-equal to layers recomputed whole or not at all."""

import contextlib
import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from memory_runs import CountedMemory
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from liger_trainer.memory import selective

ROWS = 2
HEADS = 3
LENGTH = 24
WIDTH = 8
PLAIN = functools.partial(checkpoint, use_reentrant=False)


class Counting(TorchDispatchMode):
    """Counts the forward passes of attention."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in selective.FUSED
        return func(*args, **(kwargs or {}))


class Layer(torch.nn.Module):
    """Attention, followed by random numbers."""

    def __init__(self, attend=F.scaled_dot_product_attention, change=None):
        super().__init__()
        torch.manual_seed(3)
        self.into = torch.nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.out = torch.nn.Linear(HEADS * WIDTH, 7)
        self.attend, self.change = attend, change

    def forward(self, x):
        q = self.into(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        attended = self.attend(q, q * 2, q + 1, is_causal=True)
        if self.change is not None:
            self.change(attended)
        return F.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.4)


CALLS = {
    "none": lambda layer, x: layer(x),
    "full": PLAIN,
    "kept": lambda layer, x: selective.checkpoint(PLAIN, layer, (x,)),
}


def run(way, layer, backward=1, calls=1, autocast=False):
    """Output, gradients, and how often attention ran."""
    torch.manual_seed(5)
    x = torch.randn(ROWS, LENGTH, HEADS * WIDTH, requires_grad=True)
    layer.zero_grad()
    with Counting() as counting:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = sum(CALLS[way](layer, x) for _ in range(calls))
        for left in reversed(range(backward)):
            out.square().sum().backward(retain_graph=left > 0)
    after = torch.rand(())
    return [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters()), after], counting.count


def same_bits(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("backward", [1, 2])
def test_the_same_bits_and_attention_runs_once(backward):
    none, full, kept = (run(way, Layer(), backward) for way in ("none", "full", "kept"))
    assert same_bits(full[0], none[0]) and same_bits(kept[0], none[0])
    assert (none[1], full[1], kept[1]) == (1, 1 + backward, 1)


@pytest.mark.parametrize("calls", [1, 2])
def test_under_autocast(calls):
    """Autocast casts a weight only in the first call. PyTorch's contexts raise when the second call runs again."""
    full, kept = (run(way, Layer(), calls=calls, autocast=True) for way in ("full", "kept"))
    assert same_bits(kept[0], full[0]) and (full[1], kept[1]) == (2 * calls, calls)


def test_two_calls_of_attention_in_a_layer():
    def attend(q, k, v, **options):
        first = F.scaled_dot_product_attention(q, k, v, **options)
        return F.scaled_dot_product_attention(k, first, v, **options)

    none, kept = (run(way, Layer(attend)) for way in ("none", "kept"))
    assert same_bits(kept[0], none[0]) and kept[1] == none[1] == 2


def test_attention_of_several_operations_runs_again():
    def attend(q, k, v, is_causal):
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v

    none, kept = (run(way, Layer(attend)) for way in ("none", "kept"))
    assert same_bits(kept[0], none[0]) and kept[1] == 0


@pytest.fixture
def with_dropout():
    """A CPU attention that draws random numbers, like those on GPUs."""
    name = "liger_tests::attention"

    @torch.library.custom_op(name, mutates_args=())
    def attention(q: torch.Tensor, dropout_p: float = 0.0) -> torch.Tensor:
        return q * (torch.rand_like(q) >= dropout_p)

    attention.register_autograd(
        lambda ctx, gradient: (gradient * ctx.mask, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "mask", output != 0),
    )
    selective.FUSED.add(name)
    yield attention
    selective.FUSED.discard(name)


@pytest.mark.parametrize("by_name", [False, True])
def test_attention_that_draws_random_numbers_draws_them_again(with_dropout, by_name):
    """Otherwise the dropout after it would draw others."""

    def attend(q, k, v, is_causal):
        return with_dropout(q, dropout_p=0.5) if by_name else with_dropout(q, 0.5)

    full, kept = (run(way, Layer(attend)) for way in ("full", "kept"))
    assert same_bits(kept[0], full[0]) and kept[1] == full[1] == 2


def test_results_that_are_changed_in_place_are_computed_again():
    layer = Layer(change=lambda attended: attended.mul_(1.5))
    full, kept = (run(way, layer) for way in ("full", "kept"))
    assert same_bits(kept[0], full[0]) and kept[1] == full[1] == 2


def test_compiled_functions_and_other_checkpoints_inside():
    compiled = torch.compile(lambda x: (x * 2).sin(), backend="aot_eager")

    def attend(q, k, v, **options):
        attended = checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False, **options)
        return compiled(attended)

    none, kept = (run(way, Layer(attend)) for way in ("none", "kept"))
    assert same_bits(kept[0], none[0])


def test_nothing_is_left_after_a_backward_pass_nor_without_one():
    noted, alias = [], selective._alias

    def note(x):
        kept = alias(x)
        noted.append(weakref.ref(kept))
        return kept

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(selective, "_alias", note)
            x = torch.randn(ROWS, LENGTH, HEADS * WIDTH, requires_grad=True)
            for backward in (False, True):
                out = CALLS["kept"](Layer(), x)
                assert noted.pop()() is not None
                out.sum().backward() if backward else None
                run("kept", Layer())
                assert noted.pop()() is None
    finally:
        gc.enable()


def test_only_the_result_of_attention_is_kept():
    layer, held = Layer(), {}
    x = torch.randn(ROWS, LENGTH, HEADS * WIDTH, requires_grad=True)
    with CountedMemory() as memory:
        for way in ("full", "kept", "full", "kept"):  # in the first two, gradients are made too
            before = memory.allocated()
            out = CALLS[way](layer, x)
            held[way] = memory.allocated() - before
            out.sum().backward()
            del out
            gc.collect()
    heads = ROWS * HEADS * LENGTH
    assert held["kept"] - held["full"] == 4 * heads * (WIDTH + 1)  # and one number for each token and head


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        ({"use_reentrant": False}, True),
        ({"use_reentrant": False, "preserve_rng_state": True}, True),
        ({"use_reentrant": True}, False),
        ({}, False),
        ({"use_reentrant": False, "debug": True}, False),
        ({"use_reentrant": False, "context_fn": contextlib.nullcontext}, False),
    ],
    ids=str,
)
def test_only_plain_checkpointing_can_be_selective(options, possible):
    assert selective.is_possible(functools.partial(checkpoint, **options)) is possible
    assert not selective.is_possible(lambda *args: checkpoint(*args, **options)), "a function of somebody else"
