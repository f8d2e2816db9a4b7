import functools

import pytest
import torch
import torch.nn.functional as F

from liger_triton import geglu, reference, swiglu
from liger_triton.halves import halves, joined

DTYPES = [torch.float32, torch.bfloat16]


EXACT = functools.partial(geglu, approximate="none")
ACTIVATIONS = {swiglu: F.silu, geglu: functools.partial(F.gelu, approximate="tanh"), EXACT: F.gelu}
each_gate = pytest.mark.parametrize("gate", ACTIVATIONS, ids=["swiglu", "geglu", "exact-geglu"])


def oracle(gate):
    return lambda g, u: ACTIVATIONS[gate](g) * u


def inputs(shape, dtype, device, scale=1.0):
    return [(torch.randn(shape, device=device) * s).to(dtype).requires_grad_() for s in (scale, 1.0)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [pytest.param(1.0, id="unit"), pytest.param(30.0, id="saturated")])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((4, 1024), id="full-tiles"),
        pytest.param((3, 5, 1000), id="tail"),  # 15000 elements: 7 tiles of 2048 and a part
        pytest.param((7,), id="less-than-a-tile"),
    ],
)
@each_gate
def test_matches_float64(gate, shape, scale, dtype, device, check_close):
    check_close(gate, oracle(gate), inputs(shape, dtype, device, scale))


@pytest.mark.parametrize(
    "views",
    [
        pytest.param(lambda t: t.chunk(2, dim=-1), id="halves"),
        pytest.param(lambda t: t.unflatten(-1, (-1, 2)).unbind(-1), id="interleaved"),
        pytest.param(lambda t: (t[..., :100], t.transpose(0, 1).contiguous().transpose(0, 1)[..., :100]), id="mixed"),
    ],
)
@pytest.mark.parametrize("gate", [swiglu, geglu])
def test_views_of_one_projection(gate, views, device, check_close):
    """The gradient flows back into the fused projection. 2100 is more than a tile."""
    fused = torch.randn(3, 5, 4200, device=device, requires_grad=True)
    check_close(lambda t: gate(*views(t)), lambda t: oracle(gate)(*views(t)), [fused])


@each_gate
def test_non_contiguous_upstream(gate, device, check_upstream_strides):
    check_upstream_strides(gate, inputs((4, 21), torch.float32, device))


VARIANTS = {
    "gpt-oss": {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0},
    "deepseek-v4": {"limit": 10.0},
    "falcon-h1": {"gate_scale": 0.37},
    "all": {"limit": 0.8, "alpha": -0.6, "up_offset": -2.0, "gate_scale": 1.7},
}


def variant_oracle(gate, up, limit=None, alpha=1.0, up_offset=0.0, gate_scale=1.0):
    gate = gate * gate_scale
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + up_offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("parts", [None, "halves", "pairs"])
def test_variants(options, parts, dtype, device, check_close):
    """Many inputs are clamped. Gradients of parts of one tensor flow back into it."""

    def split(t):
        return t.chunk(2, -1) if parts == "halves" else (t[..., ::2], t[..., 1::2])

    if parts is None:
        given = [(10 * t).detach().requires_grad_() for t in inputs((3, 5, 1001), dtype, device)]
        check_close(lambda g, u: swiglu(g, u, **options), lambda g, u: variant_oracle(g, u, **options), given)
    else:
        fused = (10 * torch.randn(3, 5, 2002, device=device)).to(dtype).requires_grad_()
        check_close(lambda t: swiglu(*split(t), **options), lambda t: variant_oracle(*split(t), **options), [fused])


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_twin_of_variants(options):
    g, u = (10 * t.double() for t in inputs((4, 33), torch.float32, "cpu"))
    assert torch.equal(swiglu(g, u, **options), reference.swiglu(g, u, **options))
    torch.testing.assert_close(swiglu(g, u, **options), variant_oracle(g, u, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_at_the_limit_and_beyond(dtype, device):
    """Follows the installed torch.clamp.

    Nothing passes beyond the limit, on both sides of up. At the limit all or nothing passes (torch 2.15 changed that).
    NaN stays NaN.
    """
    values = torch.tensor([-8.0, -7.0, 0.5, 7.0, 8.0, float("nan")], dtype=dtype)
    gate, up = (t.flatten().to(device).requires_grad_() for t in torch.meshgrid(values, values, indexing="ij"))
    options = VARIANTS["gpt-oss"]
    got = swiglu(gate, up, **options)
    grads = torch.autograd.grad(got.sum(), (gate, up))
    wide = [t.detach().double().requires_grad_() for t in (gate, up)]  # eager would round each step
    want = variant_oracle(*wide, **options)
    rtol = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), want, equal_nan=True, rtol=rtol, atol=0.0)
    for a, b in zip(grads, torch.autograd.grad(want.sum(), wide), strict=True):
        known = ~got.isnan()
        torch.testing.assert_close(a[known].double(), b[known], rtol=rtol, atol=1e-5)
        assert a[known].count_nonzero() == b[known].count_nonzero() < known.sum()


def test_infinite_numbers_without_a_limit(device):
    """Nothing is clamped: NaN stays where PyTorch has NaN, and an infinite up passes its gradient."""
    gate = torch.tensor([float("inf"), 1.0, 1.0], device=device, requires_grad=True)
    up = torch.tensor([1.0, float("inf"), float("-inf")], device=device, requires_grad=True)
    options = {"alpha": 1.702, "up_offset": 1.0}
    got = torch.autograd.grad(swiglu(gate, up, **options).sum(), (gate, up))
    want = torch.autograd.grad(variant_oracle(gate, up, **options).sum(), (gate, up))
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("limit", [0.0, -7.0, float("nan")])
def test_bad_limit(limit, device):
    with pytest.raises(ValueError, match="limit is .*; expected a number above 0"):
        swiglu(*inputs((4, 24), torch.float32, device), limit=limit)


@each_gate
def test_halves_are_not_copied(gate, device, monkeypatch):
    fused = torch.randn(3, 4200, device=device)

    def refuse(*args, **kwargs):
        raise AssertionError("a half was copied")

    monkeypatch.setattr(torch.Tensor, "contiguous", refuse)
    monkeypatch.setattr(torch.Tensor, "clone", refuse)
    gate(*fused.chunk(2, dim=-1))


@each_gate
def test_backward_leaves_inputs_and_upstream_gradient(gate, device):
    """gate and up may be one tensor, and another branch may still read the upstream gradient."""
    g, _ = inputs((5, 24), torch.float32, device)
    dy, copies = torch.randn(5, 24, device=device), g.detach().clone()
    dy_copy = dy.clone()
    gate(g, g).backward(dy)
    assert torch.equal(dy, dy_copy) and torch.equal(g, copies)
    g64 = copies.double().requires_grad_()
    oracle(gate)(g64, g64).backward(dy.double())
    torch.testing.assert_close(g.grad.double(), g64.grad, rtol=1e-4, atol=1e-5)


@each_gate
def test_second_backward_raises(gate, device):
    loss = gate(*inputs((5, 24), torch.float32, device)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@each_gate
def test_extreme_gates(gate, device, triton_only):
    """Value and gradient are finite at both ends, even where the gate's square is inf in fp32. NaN stays NaN."""
    g = torch.tensor([-1e30, -200.0, 0.0, 200.0, 1e30, float("nan")], device=device, requires_grad=True)
    y = gate(g, torch.ones_like(g))
    y.sum().backward()
    torch.testing.assert_close(y[:5], torch.tensor([0, 0, 0, 200.0, 1e30], device=device), rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(g.grad[:5], torch.tensor([0, 0, 0.5, 1, 1], device=device), rtol=1e-6, atol=1e-30)
    assert y[5].isnan() and g.grad[5].isnan()


@each_gate
def test_empty(gate, device):
    g, u = inputs((0, 24), torch.float32, device)
    gate(g, u).sum().backward()
    assert g.grad.shape == u.grad.shape == (0, 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "twin"])
def test_compiles(dtype, device, check_compiled):
    for gate in (swiglu, EXACT):
        check_compiled(gate, inputs((2, 3, 24), dtype, device))
    fused = torch.randn(2, 3, 48, device=device).to(dtype).requires_grad_()
    # In eager the two gradients are parts of one tensor; here they need not be.
    check_compiled(lambda t: CLAMPED(*halves(t)), [fused])


@pytest.mark.parametrize(
    "up, message",
    [
        (torch.ones(4, 25), r"gate is \(4, 24\) .*, up is \(4, 25\) .*; expected floating-point tensors of one shape"),
        (torch.ones(4, 24, dtype=torch.bfloat16), "up is .* torch.bfloat16"),
        (torch.ones(4, 24, device="meta"), "on meta"),
    ],
)
@each_gate
def test_bad_input(gate, up, message):
    with pytest.raises(ValueError, match=message):
        gate(torch.ones(4, 24), up)


def test_bad_approximation():
    with pytest.raises(ValueError, match="approximate is 'erf'; expected one of 'tanh', 'none'"):
        geglu(torch.ones(4), torch.ones(4), approximate="erf")


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True], ids=["contiguous", "halves"])
@each_gate
def test_offsets_past_int32(gate, fused):
    """Use more than 2**31 elements. The last rows equal a call on those rows alone."""
    rows, n = 2**17 + 1, 16384
    g, u = (t.detach() for t in torch.randn(rows, 2 * n, device="cuda", dtype=torch.bfloat16).chunk(2, dim=-1))
    if not fused:
        g, u = g.contiguous(), u.contiguous()
    tails = [t[-3:].clone().requires_grad_() for t in (g, u)]
    g.requires_grad_()
    y, y_tail = gate(g, u), gate(*tails)
    assert torch.equal(y[-3:], y_tail)
    dy = torch.randn_like(y)
    y.backward(dy)
    y_tail.backward(dy[-3:])
    assert torch.equal(g.grad[-3:], tails[0].grad)


CLAMPED = functools.partial(swiglu, **VARIANTS["gpt-oss"])
GATES = [swiglu, CLAMPED, geglu, EXACT]


@pytest.mark.parametrize("gate", GATES, ids=["swiglu", "clamped-swiglu", "geglu", "exact-geglu"])
@pytest.mark.parametrize("shape", [(3, 5, 1000), (7,)], ids=str)
@pytest.mark.parametrize("layout", ["apart", "halves", "up-first"])
def test_gradients_over_the_inputs(layout, gate, shape, device, triton_only):
    """`reuse_inputs` changes only where the gradients lie. A kept graph is left alone."""
    leaves, dy = inputs(shape, torch.float32, device), torch.randn(shape, device=device)
    want = torch.autograd.grad(gate(*leaves), leaves, dy)

    seen = []
    if layout == "apart":
        g, u = (t * 1.0 for t in leaves)
    elif layout == "halves":
        g, u = torch.cat(leaves, dim=-1).chunk(2, dim=-1)
    else:
        u, g = torch.cat(leaves[::-1], dim=-1).chunk(2, dim=-1)
    for t in (g, u):
        t.register_hook(lambda grad: seen.append(grad.data_ptr()))
    y = gate(g, u, reuse_inputs=True)
    kept = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    assert not {g.data_ptr(), u.data_ptr()} & set(seen) and torch.equal(g, leaves[0])
    got = torch.autograd.grad(y, leaves, dy)
    assert sorted(seen[2:]) == sorted([g.data_ptr(), u.data_ptr()])
    for a, b, c in zip(want, kept, got, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize("gate_first", [True, False])
def test_gradients_of_halves_are_halves(gate_first, device, triton_only):
    x = torch.randn(3, 5, 48, device=device, requires_grad=True)
    a, b = x.chunk(2, dim=-1)
    seen = []
    for t in (a, b):
        t.register_hook(seen.append)
    swiglu(*((a, b) if gate_first else (b, a))).square().sum().backward()
    first, second = sorted(seen, key=lambda t: t.data_ptr())
    assert torch.equal(joined(first, second), x.grad)


@pytest.mark.parametrize(
    "first, second",
    [
        (torch.zeros(4, 6), torch.zeros(4, 6)),
        (torch.zeros(4, 12)[:, :6], torch.zeros(4, 12)[:, 6:]),
        (torch.zeros(4, 12).chunk(2, -1)[::-1]),
        (torch.zeros(4, 18)[:, :6], torch.zeros(4, 18)[:, 6:12]),
        (torch.zeros(4, 18).split(6, -1)[:2]),
        (torch.zeros(3, 4, 12).transpose(0, 1).chunk(2, -1)),
    ],
    ids=["apart", "two-tensors", "second-first", "of-two-wider", "thirds", "not-contiguous"],
)
def test_not_joined(first, second):
    assert joined(first, second) is None


def test_an_input_that_is_kept_elsewhere_is_not_written_over_in_silence(device, triton_only):
    leaf, up = inputs((7,), torch.float32, device)
    gate = leaf.exp()  # exp keeps its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        swiglu(gate, up * 1.0, reuse_inputs=True).sum().backward()


def test_one_tensor_for_both_is_not_written_over(device, triton_only):
    (leaf,) = inputs((4, 24), torch.float32, device)[:1]

    def gradient(reuse):
        x = leaf * 1.0
        return torch.autograd.grad(swiglu(x, x, reuse_inputs=reuse).square().sum(), leaf)[0]

    assert torch.equal(gradient(False), gradient(True))
