"""A gated MLP of a width that is no multiple of 16 bytes, beside float64."""

import pytest
import torch
import torch.nn.functional as F

from liger_triton import aligned_mlp
from liger_triton.aligned_mlp import wide_of

TOKENS, K, WIDTH, N = (3, 11), 24, 44, 16  # 44 is 48 in 16 bits
ACTIVATIONS = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip


def inputs(device, dtype=torch.float32, biases=(True, True, True), sizes=(K, WIDTH, N), tokens=TOKENS):
    k, width, n = sizes
    x = torch.randn(*tokens, k, device=device).to(dtype)
    weights = [torch.randn(shape, device=device).div(shape[1] ** 0.5) for shape in ((width, k), (width, k), (n, width))]
    given = [x]
    for weight, biased in zip(weights, biases, strict=True):
        given += [weight.to(dtype), torch.randn(weight.shape[0], device=device).to(dtype) if biased else None]
    return [t if t is None else t.requires_grad_() for t in given]


def ours(x, *tensors, activation="silu"):
    gate, up, down = zip(tensors[::2], tensors[1::2], strict=True)
    return aligned_mlp(x, gate, up, down, activation=activation)


def plain(x, gw, gb, uw, ub, dw, db, activation="silu"):
    return F.linear(ACTIVATIONS[activation](F.linear(x, gw, gb)) * F.linear(x, uw, ub), dw, db)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biases", [(True, True, True), (False, False, False), (True, False, True)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_matches_float64(activation, biases, dtype, device, check_close):
    """In fp32 44 is a multiple of 16 bytes already, 43 is not."""
    sizes = (K, 43 if dtype == torch.float32 else WIDTH, N)
    check_close(
        lambda *given: ours(*given, activation=activation), lambda *given: plain(*given, activation=activation),
        inputs(device, dtype, biases, sizes),
    )  # fmt: skip


@pytest.mark.parametrize("width", [1, 8, 9, 1030])
def test_widths(width, device, check_close):
    check_close(ours, plain, inputs(device, sizes=(K, width, N)))


def test_what_is_not_trained_has_no_gradient(device):
    for trained in range(7):
        given = [t.detach().requires_grad_(i == trained) for i, t in enumerate(inputs(device))]
        ours(*given).sum().backward()
        want = [t.detach().requires_grad_(t.requires_grad) for t in given]
        plain(*want).sum().backward()
        assert [t.grad is None for t in given] == [t.grad is None for t in want]
        torch.testing.assert_close(given[trained].grad, want[trained].grad, rtol=1e-4, atol=1e-5)


def test_without_gradients(device):
    given = inputs(device)
    with torch.no_grad():
        torch.testing.assert_close(ours(*given), plain(*given), rtol=1e-5, atol=1e-5)
    assert not ours(*(t.detach() for t in given)).requires_grad


def test_a_kept_graph_is_walked_twice(device):
    given = inputs(device)
    out = ours(*given)
    upstream = torch.randn_like(out)
    first = torch.autograd.grad(out, given, upstream, retain_graph=True)
    for one, two in zip(first, torch.autograd.grad(out, given, upstream), strict=True):
        assert torch.equal(one, two)


def test_autocast_with_fp32_weights(device):
    dtype = torch.bfloat16
    given = inputs(device)
    with torch.autocast(device.type if isinstance(device, torch.device) else device, dtype):
        got = ours(*given)
        want = plain(*given)
    assert got.dtype == want.dtype == dtype
    upstream = torch.randn_like(got)
    pairs = zip(*(torch.autograd.grad(y, given, upstream) for y in (got, want)), strict=True)
    for mine, theirs in ((got, want), *pairs):
        assert mine.dtype == theirs.dtype and (mine - theirs).norm() <= 0.03 * theirs.norm()


def test_gradients_accumulate(device):
    given = inputs(device)
    for _ in range(2):
        ours(*given).sum().backward()
    want = [t.detach().requires_grad_() for t in given]
    (2 * plain(*want)).sum().backward()
    for mine, theirs in zip(given, want, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_does_not_repeat_the_last_product(device, monkeypatch):
    import importlib

    module, calls = importlib.import_module("liger_triton.aligned_mlp"), []
    product = module._product
    monkeypatch.setattr(module, "_product", lambda *given: calls.append(1) or product(*given))
    given = inputs(device)
    torch.utils.checkpoint.checkpoint(ours, *given, use_reentrant=False).sum().backward()
    assert len(calls) == 3
    want = [t.detach().requires_grad_() for t in given]
    plain(*want).sum().backward()
    for mine, theirs in zip(given, want, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_wide_of():
    assert [wide_of(n, torch.bfloat16) for n in (1, 8, 3420)] == [8, 8, 3424] and wide_of(5, torch.float32) == 8


@pytest.mark.parametrize("change", [{"x": torch.ones(2, K + 1)}, {"down": (torch.ones(N, 3), None)}])
def test_what_does_not_fit_is_an_error(change):
    x, gw, gb, uw, ub, dw, db = inputs("cpu")
    with pytest.raises(ValueError, match="expected"):
        aligned_mlp(**({"x": x, "gate": (gw, gb), "up": (uw, ub), "down": (dw, db)} | change))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_at_the_size_of_a_tower(dtype, device, check_close):
    check_close(ours, plain, inputs(device, dtype, sizes=(1280, 3420, 1280), tokens=(2048,)))
