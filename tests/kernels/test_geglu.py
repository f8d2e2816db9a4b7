import pytest
import torch
import torch.nn.functional as F

from liger_triton import geglu

DTYPES = [torch.float32, torch.bfloat16]
APPROXIMATIONS = ["tanh", "none"]


def oracle(gate, up, approximate="tanh"):
    return F.gelu(gate, approximate=approximate) * up


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
@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_matches_float64(shape, scale, approximate, dtype, device, check_close):
    check_close(
        lambda g, u: geglu(g, u, approximate=approximate),
        lambda g, u: oracle(g, u, approximate),
        inputs(shape, dtype, device, scale),
    )


@pytest.mark.parametrize(
    "halves",
    [
        pytest.param(lambda t: t.chunk(2, dim=-1), id="halves"),
        pytest.param(lambda t: t.unflatten(-1, (-1, 2)).unbind(-1), id="interleaved"),
        pytest.param(lambda t: (t[..., :100], t.transpose(0, 1).contiguous().transpose(0, 1)[..., :100]), id="mixed"),
    ],
)
def test_views_of_one_projection(halves, device, check_close):
    """The gradient runs back into the fused projection; 2100 is more than a tile."""
    fused = torch.randn(3, 5, 4200, device=device, requires_grad=True)
    check_close(lambda t: geglu(*halves(t)), lambda t: oracle(*halves(t)), [fused])


def test_non_contiguous_upstream(device, check_upstream_strides):
    check_upstream_strides(geglu, inputs((4, 21), torch.float32, device))


def test_halves_are_not_copied(device, monkeypatch):
    fused = torch.randn(3, 4200, device=device)

    def refuse(*args, **kwargs):
        raise AssertionError("a half was copied")

    monkeypatch.setattr(torch.Tensor, "contiguous", refuse)
    monkeypatch.setattr(torch.Tensor, "clone", refuse)
    geglu(*fused.chunk(2, dim=-1))


def test_backward_leaves_inputs_and_upstream_gradient(device):
    """gate and up may be one tensor, and another branch may still read the upstream gradient."""
    g, _ = inputs((5, 24), torch.float32, device)
    dy, copies = torch.randn(5, 24, device=device), g.detach().clone()
    dy_copy = dy.clone()
    geglu(g, g).backward(dy)
    assert torch.equal(dy, dy_copy) and torch.equal(g, copies)
    g64 = copies.double().requires_grad_()
    oracle(g64, g64).backward(dy.double())
    torch.testing.assert_close(g.grad.double(), g64.grad, rtol=1e-4, atol=1e-5)


def test_second_backward_raises(device):
    loss = geglu(*inputs((5, 24), torch.float32, device)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_extreme_gates(approximate, device, triton_only):
    """Finite at both ends, in value and gradient, where the square of the gate is inf in fp32 too; NaN stays NaN."""
    g = torch.tensor([-1e30, -200.0, 0.0, 200.0, 1e30, float("nan")], device=device, requires_grad=True)
    y = geglu(g, torch.ones_like(g), approximate=approximate)
    y.sum().backward()
    torch.testing.assert_close(y[:5], torch.tensor([0, 0, 0, 200.0, 1e30], device=device), rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(g.grad[:5], torch.tensor([0, 0, 0.5, 1, 1], device=device), rtol=1e-6, atol=1e-30)
    assert y[5].isnan() and g.grad[5].isnan()


def test_empty(device):
    g, u = inputs((0, 24), torch.float32, device)
    geglu(g, u).sum().backward()
    assert g.grad.shape == u.grad.shape == (0, 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "twin"])
def test_compiles(dtype, device, check_compiled):
    check_compiled(lambda g, u: geglu(g, u, approximate="none"), inputs((2, 3, 24), dtype, device))


@pytest.mark.parametrize(
    "up, message",
    [
        (torch.ones(4, 25), r"gate is \(4, 24\) .*, up is \(4, 25\) .*; expected floating-point tensors of one shape"),
        (torch.ones(4, 24, dtype=torch.bfloat16), "up is .* torch.bfloat16"),
        (torch.ones(4, 24, device="meta"), "on meta"),
    ],
)
def test_bad_input(up, message):
    with pytest.raises(ValueError, match=message):
        geglu(torch.ones(4, 24), up)


def test_bad_approximation():
    with pytest.raises(ValueError, match="approximate is 'erf'; expected one of 'tanh', 'none'"):
        geglu(torch.ones(4), torch.ones(4), approximate="erf")


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True], ids=["contiguous", "halves"])
def test_offsets_past_int32(fused):
    """More than 2**31 elements: the last rows are those of the same call on their own."""
    rows, n = 2**17 + 1, 16384
    g, u = (t.detach() for t in torch.randn(rows, 2 * n, device="cuda", dtype=torch.bfloat16).chunk(2, dim=-1))
    if not fused:
        g, u = g.contiguous(), u.contiguous()
    tails = [t[-3:].clone().requires_grad_() for t in (g, u)]
    g.requires_grad_()
    y, y_tail = geglu(g, u), geglu(*tails)
    assert torch.equal(y[-3:], y_tail)
    dy = torch.randn_like(y)
    y.backward(dy)
    y_tail.backward(dy[-3:])
    assert torch.equal(g.grad[-3:], tails[0].grad)
