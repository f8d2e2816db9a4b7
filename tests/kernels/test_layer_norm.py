import pytest
import torch
import torch.nn.functional as F

from liger_triton import layer_norm, reference

DTYPES = [torch.float32, torch.bfloat16]


def inputs(shape, dtype, device, weight=True, bias=True, parameter_dtype=None):
    """Return inputs with mean 2 in x, so that a mean that is not subtracted shows."""
    x = (torch.randn(shape, device=device) * 3 + 2).to(dtype).requires_grad_()
    parameters = (
        torch.randn(shape[-1], device=device).to(parameter_dtype or dtype).requires_grad_() if given else None
        for given in (weight, bias)
    )
    return x, *parameters


def oracle(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight, bias", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((3, 1152), id="one-row-tiles-with-tail"),
        pytest.param((2, 185, 20), id="many-narrow-rows"),  # 370 rows in 3 tiles of 128, for 2 programs: one loops
        pytest.param((4100,), id="one-row"),  # wider than a tile
    ],
)
def test_matches_float64(shape, weight, bias, dtype, device, check_close):
    check_close(lambda x, w, b: layer_norm(x, w, b, 1e-5), oracle, inputs(shape, dtype, device, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_offset(dtype, device, check_close):
    """Weights are around zero, as in Nemotron. Numbers of one binade plus 1 are exact in bf16."""
    x, w, b = inputs((7, 41), dtype, device)
    w = (w.detach().sign() * 0.5).requires_grad_()
    check_close(lambda x, w, b: layer_norm(x, w, b, 1e-5, offset=1.0), lambda x, w, b: oracle(x, w + 1, b), [x, w, b])


def test_offset_is_added_in_the_dtype_of_the_weight(device):
    x = torch.randn(4, 32, device=device)
    w = torch.full((32,), 2.0**-10, device=device, dtype=torch.bfloat16)
    assert torch.equal(layer_norm(x, w, None, 1e-5, offset=1.0), layer_norm(x, w + 1, None, 1e-5))
    assert torch.equal(w + 1, torch.ones_like(w)), "2**-10 is lost"
    with pytest.raises(ValueError, match="offset is 1.0, but weight is None"):
        layer_norm(x, None, None, 1e-5, offset=1.0)


def test_is_coheres(device):
    """CohereLayerNorm computes in fp32, allows an fp32 weight, has no bias, and returns the dtype of x."""
    x, w, _ = inputs((5, 40), torch.bfloat16, device, bias=False, parameter_dtype=torch.float32)
    centred = x.float() - x.float().mean(-1, keepdim=True)
    want = (w * (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5))).to(x.dtype)
    got = layer_norm(x, w, None, 1e-5)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=8e-3, atol=1e-5)  # one bf16 step


@pytest.mark.parametrize("parameter_dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_equals_the_twin_s(dtype, parameter_dtype, device):
    x, w, b = inputs((5, 40), dtype, device, parameter_dtype=parameter_dtype)
    got, want = layer_norm(x, w, b, 1e-5), reference.layer_norm(x, w, b, 1e-5)
    assert got.dtype == want.dtype == dtype
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    got.sum().backward()
    assert (x.grad.dtype, w.grad.dtype, b.grad.dtype) == (dtype, parameter_dtype, parameter_dtype)


def test_large_mean_keeps_the_variance(device):
    """With mean 1000 and deviation 0.1, E[x^2] - E[x]^2 in fp32 would lose the variance."""
    x = 1000 + 0.1 * torch.randn(4, 100, device=device)
    want = F.layer_norm(x.double(), (100,), None, None, 1e-5)
    assert (layer_norm(x, None, None, 1e-5) - want).norm() / want.norm() < 1e-3


def test_non_contiguous(device, check_close):
    """Rows have gaps, or the input needs a copy."""
    x = torch.randn(6, 4, 30, device=device) + 1
    w, b = (torch.randn(30, device=device)[::2].requires_grad_() for _ in range(2))
    for view in (x[..., 15:], x.transpose(0, 1)[..., ::2]):
        check_close(lambda x, w, b: layer_norm(x, w, b, 1e-5), oracle, [view.detach().requires_grad_(), w, b])


def test_non_contiguous_upstream(device, check_upstream_strides):
    check_upstream_strides(lambda x, w, b: layer_norm(x, w, b, 1e-5), inputs((4, 21), torch.float32, device))


@pytest.mark.parametrize("frozen", [0, 1], ids=["weight", "bias"])
def test_frozen_parameter(frozen, device, check_close):
    given = list(inputs((5, 24), torch.float32, device))
    given[1 + frozen] = given[1 + frozen].detach()
    check_close(lambda x, w, b: layer_norm(x, w, b, 1e-5), oracle, given)


def test_backward_leaves_the_upstream_gradient(device):
    dy = torch.randn(5, 24, device=device)
    copy = dy.clone()
    layer_norm(*inputs((5, 24), torch.float32, device), 1e-5).backward(dy)
    assert torch.equal(dy, copy)


def test_second_backward_raises(device):
    loss = layer_norm(*inputs((5, 24), torch.float32, device), 1e-5).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_nan_stays_in_its_row(device):
    x, w, b = inputs((5, 24), torch.float32, device)
    with torch.no_grad():
        x[2, 3] = float("nan")
    bad = layer_norm(x, w, b, 1e-5).isnan()
    assert bad[2].all() and bad.sum() == 24


def test_constant_row_is_the_bias(device):
    x, w, b = inputs((5, 24), torch.float32, device)
    torch.testing.assert_close(layer_norm(torch.full_like(x, 2.0), w, b, 1e-5), b.expand(5, 24))


def test_empty(device):
    x, w, b = inputs((0, 24), torch.float32, device)
    layer_norm(x, w, b, 1e-5).sum().backward()
    assert x.grad.shape == (0, 24) and torch.equal(b.grad, torch.zeros_like(b))


@pytest.mark.parametrize("weight, bias", [(True, True), (False, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "twin"])
def test_compiles(dtype, weight, bias, device, check_compiled):
    check_compiled(lambda x, w, b: layer_norm(x, w, b, 1e-5), inputs((2, 3, 24), dtype, device, weight, bias))


@pytest.mark.parametrize(
    "weight, bias, message",
    [
        (torch.ones(23), None, r"weight is \(23,\), x \(5, 24\); expected weight \(24,\) or None"),
        (None, torch.ones(1, 24), r"bias is \(1, 24\)"),
        (None, torch.ones(24, device="meta"), "bias is on meta, x on cpu; move bias to cpu"),
    ],
)
def test_bad_input(weight, bias, message):
    with pytest.raises(ValueError, match=message):
        layer_norm(torch.ones(5, 24), weight, bias, 1e-5)


@pytest.mark.gpu
def test_offsets_past_int32():
    """Use 2**31 + 4096 elements. The last rows equal a call on those rows alone."""
    x = torch.randn(2**19 + 1, 4096, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w, b = (torch.randn(4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    tail = x[-3:].detach().requires_grad_()
    y, y_tail = layer_norm(x, w, b, 1e-5), layer_norm(tail, w, b, 1e-5)
    assert torch.equal(y[-3:], y_tail)
    dy = torch.randn_like(y)
    y.backward(dy)
    y_tail.backward(dy[-3:])
    assert torch.equal(x.grad[-3:], tail.grad)
