"""Calls with activations on the host are bit-equal to plain calls, whatever else happens."""

import copy
import gc
import weakref

import pytest
import torch
from memory_runs import GPU, CountedMemory, Host, same
from tiny_models import collate, ragged_rows, tiny_model
from torch import nn

from liger_trainer import apply_liger
from liger_trainer.memory import rebuild, switches
from liger_trainer.memory.offload import Offload


def offload_of(host, lag=0, ahead=1):
    return Offload(host, torch.cuda.Stream() if GPU else None, lag, ahead)


def on_device(module):
    return module.to(GPU) if GPU else module


def randn(*shape, **options):
    return torch.randn(*shape, device=GPU, **options)


class Layer(nn.Module):
    """A layer with a weight, a frozen weight as a buffer, views, and a result that its operation keeps."""

    def __init__(self, width=16):
        super().__init__()
        self.inner, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("frozen", torch.randn(width, width) / 4)
        self.norm = nn.LayerNorm(width)

    def forward(self, x, scale=None):
        q, k, v = self.inner(self.norm(x) @ self.frozen).chunk(3, -1)
        y = torch.softmax(q @ k.mT, -1) @ v
        y = torch.tanh(y) * torch.sigmoid(y)
        return x + self.out(y if scale is None else y * scale)


def run(layers, x, call, backward=1, scale=None):
    for layer in layers:
        layer.zero_grad()
    x = x.detach().requires_grad_()
    y = x * 2
    for number, layer in enumerate(layers):
        y = call(number, layer, y, scale)
    loss = y.square().sum()
    for _ in range(backward - 1):
        loss.backward(retain_graph=True)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for layer in layers for p in layer.parameters())]


def plain(number, layer, x, scale):
    return layer(x, scale)


def through(carried, numbers=(0, 1, 2, 3)):
    def call(number, layer, x, scale):
        carried.before_call(number)
        if number in numbers:
            given = [] if scale is None else [scale]
            y = carried.call(number, layer, lambda x: layer(x, scale), (x,), given)
        else:
            y = layer(x, scale)
        carried.after_call(number, [y])
        return y

    return call


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return [on_device(Layer()) for _ in range(6)]


@pytest.mark.diagonal
@pytest.mark.parametrize("backward", [1, 2])
@pytest.mark.parametrize("lag, ahead", [(0, 1), (1, 1), (2, 2), (9, 9)])
@pytest.mark.parametrize("numbers", [(0,), (0, 2, 4), (0, 1, 2, 3, 4, 5)])
def test_the_same_bits(numbers, lag, ahead, backward, layers):
    host, x = Host(), randn(2, 5, 16)
    got = run(layers, x, through(offload_of(host, lag, ahead), numbers), backward)
    assert same(got, run(layers, x, plain, backward))
    assert host.asked
    gc.collect()
    assert host.in_use == 0, "all of it has come back"


def test_weights_buffers_and_what_all_are_given_stay(layers):
    host = Host()
    x = randn(2, 5, 16)
    scale = randn(2, 5, 16)
    got = run(layers, x, through(offload_of(host)), scale=scale)
    assert same(got, run(layers, x, plain, scale=scale))
    tokens, width = 10, 16
    largest = 4 * tokens * 3 * width  # q, k and v, which are one tensor
    assert largest in host.asked
    weights = {p.nbytes for layer in layers for p in (*layer.parameters(), *layer.buffers())}
    assert not weights & set(host.asked), "or it was a weight"
    of_one = host.asked[: len(host.asked) // 4]
    assert of_one.count(4 * tokens * width) <= 8  # x, three results, and what autograd keeps for the products


def test_a_view_of_a_weight_stays():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))

        def forward(self, x, scale=None):
            return torch.tanh(x @ self.weight.t()) @ self.weight.view(16, 16)

    torch.manual_seed(0)
    layers = [on_device(Tied()) for _ in range(4)]
    host = Host()
    x = randn(2, 5, 16)
    got = run(layers, x, through(offload_of(host)))
    assert same(got, run(layers, x, plain))
    assert layers[0].weight.nbytes not in host.asked


def test_nothing_is_left_on_the_device(layers):
    """While the last layer runs, the first holds nothing there."""
    host, seen = Host(), []
    carried = offload_of(host)

    class Watched(Layer):
        def forward(self, x, scale=None):
            y = torch.exp(x)
            seen.append(weakref.ref(y.untyped_storage()))
            return y

    layers[0] = on_device(Watched())
    call = through(carried)
    x = randn(2, 5, 16, requires_grad=True)
    y = call(0, layers[0], x * 2, None)
    y = y + 1
    assert seen[0]() is not None
    carried.before_call(1)
    assert seen[0]() is None
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.exp(2 * x.detach()))


def test_a_full_host_does_no_harm(layers):
    host, x = Host(room=1 << 16), randn(2, 5, 16)
    big = randn(64, 5, 16)
    assert same(run(layers, big, through(offload_of(host))), run(layers, big, plain))
    assert host.taken == 1 << 16
    assert same(run(layers, x, through(offload_of(Host(room=0)))), run(layers, x, plain))


@pytest.mark.parametrize("when", ["in the layer", "after it", "when it has left"])
def test_a_tensor_changed_in_place_raises(when):
    """It raises as in autograd, instead of returning a gradient of other values."""
    tensors = []

    class Kept(nn.Module):
        def forward(self, x, scale=None):
            y = x * 1
            tensors.append(y)
            z = y.square()
            if when == "in the layer":
                y.add_(1)
            return z

    host = Host()
    carried, x = offload_of(host, lag=1), randn(2, 5, 16, requires_grad=True)
    call = through(carried, (0,))
    y = call(0, Kept(), x, None)
    if when == "after it":
        tensors[0].add_(1)
    carried.before_call(1)
    carried.before_call(2)
    if when == "when it has left":
        tensors[0].add_(1)
        y.sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach())
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_values_at_the_end_of_the_layer_count():
    """Changes that a hook makes behind autograd's back count, as long as they happen within the layer."""

    class Changed(nn.Module):
        def forward(self, x, scale=None):
            y = x * 1
            z = y.square()
            y.data.mul_(3)
            return z

    grads = []
    for numbers in ((), (0,)):
        carried = offload_of(Host())
        x = torch.ones(2, 5, 16, device=GPU, requires_grad=True)
        y = through(carried, numbers)(0, Changed(), x, None)
        carried.before_call(1)
        y.sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads) and grads[0][0, 0, 0] == 6


@pytest.mark.parametrize("way", ["no backward", "exception", "forward fails"])
def test_nothing_is_left_behind(way, layers):
    host, x = Host(), randn(2, 5, 16, requires_grad=True)

    def forward(carried):
        y, call = x * 2, through(carried)
        for number, layer in enumerate(layers):
            if way == "forward fails" and number == 3:
                raise ValueError
            y = call(number, layer, y, None)
        if way == "exception":
            y.register_hook(lambda _: (_ for _ in ()).throw(ValueError()))
            y.sum().backward()

    try:
        forward(offload_of(host, lag=1))
    except ValueError:
        assert way != "no backward"
    assert host.in_use == 0, "without the garbage collector, which may come too late for the memory of a GPU"
    assert same(run(layers, x, through(offload_of(host))), run(layers, x, plain))


@pytest.mark.skipif(GPU is not None, reason="it counts CPU tensors")
def test_a_fetch_that_ran_out_of_memory_can_be_repeated(layers):
    """If the error is caught and backward runs again, it gets the values instead of what the memory held before."""
    x, failures = randn(2, 5, 16), 0
    want = run(layers, x, plain)[1]
    for room in range(12_000, 32_000, 1000):
        call = through(offload_of(Host()), (0, 1, 2))
        inputs = x.clone().requires_grad_()
        with CountedMemory() as memory:
            y = inputs * 2
            for number, layer in enumerate(layers):
                y = call(number, layer, y, None)
            loss = y.square().sum()
            memory.size = memory.now + room
            try:
                loss.backward(retain_graph=True)
            except torch.OutOfMemoryError:
                failures += 1
            memory.size = inputs.grad = None
            loss.backward()
        assert torch.equal(inputs.grad, want)
    assert failures


def test_a_leaf_that_learns_stays_where_it_is(layers):
    """`enable_input_require_grads` makes the output of an embedding a leaf. Its gradient arrives."""
    host, grads = Host(), []
    for call in (through(offload_of(host)), plain):
        x = randn(2, 5, 16, generator=torch.Generator(GPU or "cpu").manual_seed(1)).requires_grad_()
        call(0, layers[0], x, None).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


# A patched model recomputes norms and gates in the backward pass, even with the rest on the host


def grads_of(model, batch, decide):
    switches.install(model, decide)
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    switches.remove(model)
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def deciding(carried):
    number = iter(range(100))

    def decide(switch, function, args):
        i = next(number)
        carried.before_call(i)
        rest = [x for x in switches.inputs_of(function, args) if x is not switches.hidden_of(function, args)]
        output = carried.call(i, switch.module(), function, args, rest)
        carried.after_call(i, [output])
        return output

    return decide


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "cohere2", "qwen3_moe"])
def test_a_patched_model_computes_norms_and_gates_again(model_type, monkeypatch):
    model = on_device(tiny_model(model_type, num_hidden_layers=4).train())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = {name: x.to(model.device) for name, x in collate(ragged_rows(4)).items()}
    asked = {}
    made, get = [], rebuild._Rebuilt.get
    monkeypatch.setattr(rebuild._Rebuilt, "get", lambda self, shape: made.append(1) or get(self, shape))
    for above in (1000, 0):
        apply_liger(model, {"rebuild_above_mib": above})
        want = grads_of(copy.deepcopy(model), batch, lambda switch, function, args: function(*args))
        host = Host()
        made.clear()
        got = grads_of(model, batch, deciding(offload_of(host)))
        assert same(got, want)
        asked[above] = sum(host.asked)
        if above:
            assert not made
    assert made and asked[0] < asked[1000], "what is computed again does not go to the host"


@pytest.mark.skipif(GPU is None, reason="it needs a GPU")
@pytest.mark.parametrize("slow", ["compute", "copies"])
def test_streams_wait_for_each_other(slow, layers):
    """If one of the two streams is busy, the other would otherwise read what is not there yet."""
    carried, x = offload_of(Host(1 << 28), lag=1), randn(64, 64, 16)
    layers = [copy.deepcopy(layer) for layer in layers for _ in range(2)]
    want = run(layers, x, plain)
    call = through(carried, tuple(range(12)))

    def slowly(number, layer, x, scale):
        with torch.cuda.stream(carried.stream if slow == "copies" else torch.cuda.current_stream()):
            torch.cuda._sleep(5_000_000)
        return call(number, layer, x, scale)

    torch.cuda.empty_cache()
    for _ in range(3):
        assert same(run(layers, x, slowly), want)
