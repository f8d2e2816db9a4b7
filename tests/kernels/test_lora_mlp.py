import functools
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from liger_triton import lora_mlp

kernel = sys.modules["liger_triton.lora_mlp"]

DTYPES = [torch.float32, torch.bfloat16]
K = 24
INNER = 56
N = 40
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"), "gelu": F.gelu}
RANKS = (3, 5, 4)


def tensors(shape, dtype, device, adapter=None, ranks=RANKS, bias=False):
    """Return x, then weight (frozen), bias, A and B of gate, up and down. Rank 0 means no adapter."""
    found = [torch.randn(*shape, K, device=device).to(dtype).requires_grad_()]
    for (k, n), rank in zip(((K, INNER), (K, INNER), (INNER, N)), ranks, strict=True):
        found.append((torch.randn(n, k, device=device) / k**0.5).to(dtype))
        found.append(torch.randn(n, device=device).to(dtype).requires_grad_() if bias else None)
        for size, scale in (((rank, k), k**-0.5), ((n, rank), (rank + 1) ** -0.5)):
            t = (torch.randn(size, device=device) * scale).to(adapter or dtype).requires_grad_()
            found.append(t if rank else None)
    return found


def projections(flat):
    for k in range(0, 12, 4):
        weight, bias, a, b = flat[k : k + 4]
        yield weight, bias, None if a is None else (a, b, 0.5)


def ours(x, *flat, activation="silu"):
    return lora_mlp(x, *projections(flat), activation=activation)


def oracle(x, *flat, activation="silu"):
    def call(x, weight, bias, lora):
        y = F.linear(x, weight, bias)
        return y if lora is None else y + lora[2] * x @ lora[0].t() @ lora[1].t()

    gate, up, down = projections(flat)
    return call(ACTIVATIONS[activation](call(x, *gate)) * call(x, *up), *down)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("adapter", [None, torch.float32], ids=["adapters-alike", "adapters-fp32"])
@pytest.mark.parametrize("shape", [(16,), (3, 37)], ids=str)
def test_matches_float64_in_fp32(shape, adapter, activation, device, check_close):
    calls = (functools.partial(f, activation=activation) for f in (ours, oracle))
    check_close(*calls, tensors(shape, torch.float32, device, adapter, bias=True))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("adapter", [None, torch.float32], ids=["adapters-alike", "adapters-fp32"])
def test_no_further_from_float64_than_its_parts(adapter, activation, device):
    """In bf16 g, u and a are rounded, so any implementation's gradients are off. PyTorch's errors are the bound."""
    given = tensors((3, 37), torch.bfloat16, device, adapter)
    dy = torch.randn(3, 37, N, device=device).bfloat16()
    results = []
    for f, wide in ((ours, False), (oracle, True), (stock, False)):
        leaves = []
        for t in given:
            if t is not None:
                t = t.detach().to(torch.float64 if wide else t.dtype).requires_grad_(t.requires_grad)
            leaves.append(t)
        y = f(*leaves, activation=activation)
        results.append(
            [y, *torch.autograd.grad(y, [t for t in leaves if t is not None and t.requires_grad], dy.to(y.dtype))]
        )
    for got, exact, other in zip(*results, strict=True):
        assert (got.double() - exact).norm() <= 1.5 * (other.double() - exact).norm()


def stock(x, *flat, activation):
    """Compute it as PEFT's layers and transformers' MLP do."""

    def call(x, weight, bias, lora):
        y = F.linear(x, weight, bias)
        a, b, scaling = lora
        return (y + F.linear(F.linear(x.to(a.dtype), a), b) * scaling).to(y.dtype)

    gate, up, down = projections(flat)
    return call(ACTIVATIONS[activation](call(x, *gate)) * call(x, *up), *down)


@pytest.mark.parametrize("ranks", [(0, 0, 4), (3, 0, 0), (0, 5, 4), (3, 5, 0)], ids=str)
def test_projections_without_an_adapter(ranks, device, check_close):
    check_close(ours, oracle, tensors((9,), torch.float32, device, ranks=ranks))


@pytest.mark.parametrize("trained", [(0,), (3,), (8,), (12,), (1, 5, 9), (11, 12)], ids=str)
def test_only_gradients_that_are_wanted(trained, device, check_close):
    given = tensors((9,), torch.float32, device)
    given = [None if t is None else t.detach().requires_grad_(k in trained) for k, t in enumerate(given)]
    check_close(ours, oracle, given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_product_is_neither_kept_nor_made_apart(activation, dtype, device, triton_only):
    """Saved are x, g, u and rank-wide tensors. In backward dg, du and a overwrite u, g and da."""
    x, *flat = tensors((64,), dtype, device)
    kept = []

    def pack(t):
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = ours(x, *flat, activation=activation)
    known = {t.data_ptr() for t in (x, *flat) if t is not None}
    own = [t for t in kept if t.data_ptr() not in known]
    assert all(t.shape == (64, INNER) or min(t.shape) <= sum(RANKS[:2]) for t in own)
    assert sum(t.shape == (64, INNER) for t in own) == 2
    before = [t.clone() for t in own]
    y.sum().backward()
    changed = [not torch.equal(t, b) for t, b in zip(own, before, strict=True)]
    assert changed == [t.shape == (64, INNER) for t in own]


def test_a_gradient_of_none(device):
    """The operation after the MLP may return no gradient."""

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    x, *flat = tensors((5,), torch.float32, device)
    (Constant.apply(ours(x, *flat)).sum() + x.sum()).backward()
    assert torch.equal(x.grad, torch.ones_like(x)) and all(t is None or t.grad is None for t in flat)


def test_two_backward_passes(device):
    x, *flat = tensors((9,), torch.float32, device)
    leaves = [t for t in (x, *flat) if t is not None and t.requires_grad]
    y = ours(x, *flat)
    first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    for got, want in zip(torch.autograd.grad(y.sum(), leaves), first, strict=True):
        assert torch.equal(got, want)
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(reentrant, device, allocations):
    """Gradients are the same. Without reentrance, the down projection is not computed a second time."""
    x, *flat = tensors((9,), torch.float32, device)
    leaves = [t for t in (x, *flat) if t is not None and t.requires_grad]
    want = torch.autograd.grad(ours(x, *flat).square().mean(), leaves)
    with allocations() as plain:
        ours(x, *flat).square().mean().backward()
    for t in leaves:
        t.grad = None
    with allocations() as seen:
        checkpoint(ours, x, *flat, use_reentrant=reentrant).square().mean().backward()
    assert seen.products - plain.products == (8 if reentrant else 6)  # h and h_down, g and u of two each; y of two
    for got, w in zip(leaves, want, strict=True):
        torch.testing.assert_close(got.grad, w)


def test_a_second_derivative_raises(device):
    x, *flat = tensors((9,), torch.float32, device)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(ours(x, *flat).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_autocast(weight_dtype, device):
    x, *flat = tensors((9,), weight_dtype, device, torch.float32)
    leaves = [t for t in (x, *flat) if t is not None and t.requires_grad]
    results = []
    for f in (ours, functools.partial(stock, activation="silu")):
        with torch.autocast(device, dtype=torch.bfloat16):
            y = f(x, *flat)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype
        assert (got.double() - want.double()).norm() <= 0.02 * want.double().norm()


def test_without_gradients(device):
    x, *flat = tensors((2, 9), torch.float32, device)
    with torch.no_grad():
        y = ours(x, *flat)
    assert not y.requires_grad
    torch.testing.assert_close(y, oracle(x, *flat))


def test_empty(device):
    x, *flat = tensors((0,), torch.float32, device)
    ours(x, *flat).sum().backward()
    assert x.grad.shape == x.shape and not flat[2].grad.any()


def test_compiles(device):
    x, *flat = tensors((9,), torch.float32, device)
    torch._dynamo.reset()
    got = torch.compile(ours, fullgraph=True, backend="aot_eager")(x, *flat)
    torch.testing.assert_close(got, ours(x, *flat))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"activation": "relu"}, "activation is 'relu'; expected one of 'silu', 'gelu_tanh', 'gelu'"),
        ({"up": (torch.ones(55, K), None, None)}, r"up \(55, 24\), down \(40, 56\); expected \(I, K\)"),
        ({"down": (torch.ones(N, 55), None, None)}, r"down \(40, 55\); expected \(I, K\)"),
    ],
)
def test_bad_input(change, message):
    lora = (torch.ones(2, K), torch.ones(INNER, 2), 1.0)
    given = {
        "gate": (torch.ones(INNER, K), None, lora),
        "up": (torch.ones(INNER, K), None, None),
        "down": (torch.ones(N, INNER), None, None),
    }
    with pytest.raises(ValueError, match=message):
        lora_mlp(torch.ones(9, K), **(given | change))


@pytest.fixture
def slices(monkeypatch):
    """Compute every MLP in slices of eight rows."""
    monkeypatch.setattr(kernel, "SLICE_ABOVE", 0)
    monkeypatch.setattr(kernel, "SLICE_BYTES", 1)
    monkeypatch.setattr(kernel, "SLICE_UNIT", 8)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(16,), (3, 37), (0,), (8,)], ids=str)
def test_slices_match_float64(shape, activation, device, check_close, slices):
    calls = (functools.partial(f, activation=activation) for f in (ours, oracle))
    check_close(*calls, tensors(shape, torch.float32, device, bias=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_slices_without_adapters(autocast, device, check_close, slices):
    """All weights train. Under autocast they and their gradients are fp32."""
    given = tensors((21,), torch.float32, device, ranks=(0, 0, 0), bias=True)
    given = [None if t is None else t.detach().requires_grad_() for t in given]
    if not autocast:
        return check_close(ours, oracle, given)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        y = ours(*given)
    leaves = [t for t in given if t is not None]
    dy = torch.randn(y.shape, device=device)
    want = torch.autograd.grad(oracle(*given), leaves, dy)
    for got, w in zip(torch.autograd.grad(y, leaves, dy.to(y.dtype)), want, strict=True):
        assert got.dtype == torch.float32 and (got - w).norm() <= 0.02 * w.norm()


@pytest.mark.parametrize("trained", [(0,), (3,), (1, 8), (9,), (12,), (1, 5, 9), (11, 12)], ids=str)
def test_gradients_of_slices_that_are_wanted(trained, device, check_close, slices):
    given = tensors((21,), torch.float32, device, ranks=(3, 0, 4))
    given = [None if t is None else t.detach().requires_grad_(k in trained) for k, t in enumerate(given)]
    if any(t is not None and t.requires_grad for t in given):
        check_close(ours, oracle, given)


def test_slices_agree_with_one_slice(device, slices, monkeypatch):
    """Rows are independent. Only sums over rows, the adapters' gradients, are added in another order."""
    x, *flat = tensors((21,), torch.bfloat16, device, torch.float32)
    dy = torch.randn(21, N, device=device).bfloat16()
    leaves, found = [t for t in (x, *flat) if t is not None and t.requires_grad], []
    for above in (0, 1 << 30):
        monkeypatch.setattr(kernel, "SLICE_ABOVE", above)
        y = ours(x, *flat)
        found.append((y, *torch.autograd.grad(y, leaves, dy)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2 * want.abs().max().item())


def test_slices_keep_their_input_alone(device, slices):
    x, *flat = tensors((21,), torch.bfloat16, device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = ours(x, *flat)
    known = {t.data_ptr() for t in (x, *flat) if t is not None}
    assert all(t.data_ptr() in known for t in kept)
    leaves = [t for t in (x, *flat) if t is not None and t.requires_grad]
    first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(y.sum(), leaves)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_slices_in_a_checkpoint(reentrant, device, slices, monkeypatch):
    """Without reentrance, the forward and the backward pass each make the slices once."""
    x, *flat = tensors((21,), torch.float32, device)
    leaves, called = [t for t in (x, *flat) if t is not None and t.requires_grad], []
    want = torch.autograd.grad(ours(x, *flat).sum(), leaves)
    inner = kernel._inner
    monkeypatch.setattr(kernel, "_inner", lambda *given: called.append(1) or inner(*given))
    checkpoint(ours, x, *flat, use_reentrant=reentrant).sum().backward()
    assert len(called) == (9 if reentrant else 6)
    for leaf, w in zip(leaves, want, strict=True):
        torch.testing.assert_close(leaf.grad, w)


def test_sizes_of_slices():
    plan = kernel.MLPForm((types.SimpleNamespace(dtype=torch.bfloat16),) * 2, "silu", True)
    layers = [types.SimpleNamespace(weight=torch.empty(14336, 4096, device="meta"))]
    assert plan.slices(37449, layers) == [slice(37449)]
    long = plan.slices(131072, layers)
    assert len(long) == 14 and all(s.stop - s.start == 9472 for s in long[:-1])
    assert [s.start for s in long[1:]] == [s.stop for s in long[:-1]] and (long[0].start, long[-1].stop) == (0, 131072)
