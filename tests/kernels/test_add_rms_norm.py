import pytest
import torch

from liger_triton import add_rms_norm, reference, rms_norm

DTYPES = [torch.float32, torch.bfloat16]


def inputs(shape, dtype, device, residual_dtype=None, weight=True):
    x = torch.randn(shape, device=device) * 3
    residual = torch.randn(shape, device=device)
    w = torch.randn(shape[-1], device=device).to(dtype).requires_grad_() if weight else None
    return x.to(dtype).requires_grad_(), residual.to(residual_dtype or dtype).requires_grad_(), w


def oracle(x, residual, w):
    s = x + residual
    y = s * (s.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    return (y if w is None else y * w), s


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cast", ["llama", "gemma", "none"])
@pytest.mark.parametrize(
    "shape, weight",
    [
        pytest.param((3, 1152), True, id="one-row-tiles-with-tail"),
        pytest.param(
            (2, 185, 20), True, id="many-narrow-rows"
        ),  # 370 rows in 3 tiles of 128, for 2 programs: one loops
        pytest.param((5, 40), False, id="no-weight"),
    ],
)
def test_matches_float64(shape, weight, cast, dtype, device, check_close):
    """Give both outputs random upstream gradients: the gradient of the sum has two parts."""
    check_close(
        lambda x, r, w: add_rms_norm(x, r, w, 1e-5, cast=cast), oracle, inputs(shape, dtype, device, weight=weight)
    )


@pytest.mark.parametrize("used", [0, 1], ids=["only-norm-used", "only-sum-used"])
def test_one_output_used(used, device, check_close):
    check_close(
        lambda x, r, w: add_rms_norm(x, r, w, 1e-5)[used] + 0 * w,
        lambda x, r, w: oracle(x, r, w)[used] + 0 * w,
        [t.requires_grad_() for t in inputs((5, 40), torch.float32, device)],
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual_dtype", DTYPES, ids=str)
def test_dtypes_and_values_equal_an_addition_then_a_norm(dtype, residual_dtype, device):
    """The norm reads the rounded sum, so both results are bit-equal to an addition followed by rms_norm."""
    x, residual, w = inputs((5, 40), dtype, device, residual_dtype)
    y, s = add_rms_norm(x, residual, w, 1e-6, offset=1.0, cast="gemma")
    if device == "cuda":  # the interpreter truncates the sum to bf16, PyTorch rounds it
        torch.testing.assert_close(s, x + residual, rtol=0, atol=0)
    torch.testing.assert_close(y, rms_norm(s.detach(), w, 1e-6, offset=1.0, cast="gemma"), rtol=0, atol=0)
    for got, want in zip((y, s), reference.add_rms_norm(x, residual, w, 1e-6, offset=1.0, cast="gemma"), strict=True):
        assert got.dtype == want.dtype
    (y.sum() + s.sum()).backward()
    assert (x.grad.dtype, residual.grad.dtype, w.grad.dtype) == (dtype, residual_dtype, dtype)


def test_offset(device, check_close):
    def shifted(x, r, w):
        return oracle(x, r, w + 1)

    check_close(
        lambda x, r, w: add_rms_norm(x, r, w, 1e-5, offset=1.0), shifted, inputs((5, 40), torch.float32, device)
    )


def test_non_contiguous(device, check_close):
    """Row strides of 30, 25 and 21, and inputs that need a copy."""
    x, residual = (torch.randn(4, 6, stride, device=device)[..., :21].requires_grad_() for stride in (30, 25))
    w = torch.randn(42, device=device)[::2].requires_grad_()
    check_close(lambda x, r, w: add_rms_norm(x, r, w, 1e-5), oracle, [x, residual, w])
    x = torch.randn(6, 4, 30, device=device).transpose(0, 1)[..., :21].requires_grad_()
    residual = torch.randn(4, 21, 6, device=device).transpose(1, 2).requires_grad_()
    check_close(lambda x, r, w: add_rms_norm(x, r, w, 1e-5), oracle, [x, residual, w])


def test_non_contiguous_upstream(device, check_upstream_strides):
    check_upstream_strides(lambda x, r, w: add_rms_norm(x, r, w, 1e-5), inputs((4, 21), torch.float32, device))


def test_x_and_residual_may_be_one_tensor(device):
    x, _, w = inputs((5, 40), torch.float32, device)
    y, s = add_rms_norm(x, x, w, 1e-5)
    (y.sin().sum() + s.cos().sum()).backward()
    x64 = x.detach().double().requires_grad_()
    y, s = oracle(x64, x64, w.detach().double())
    (y.sin().sum() + s.cos().sum()).backward()
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-4, atol=1e-5)


def test_backward_leaves_the_upstream_gradients(device):
    x, residual, w = inputs((5, 24), torch.float32, device)
    upstream = [torch.randn(5, 24, device=device) for _ in range(2)]
    copies = [t.clone() for t in upstream]
    torch.autograd.backward(add_rms_norm(x, residual, w, 1e-6), upstream)
    assert all(torch.equal(a, b) for a, b in zip(upstream, copies, strict=True))


def test_sum_changed_in_place_is_noticed(device):
    """Backward reads the sum; a caller who overwrites it must get an error, not a wrong gradient."""
    x, residual, w = inputs((5, 24), torch.float32, device)
    y, s = add_rms_norm(x, residual, w, 1e-6)
    with torch.no_grad():
        s.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_backward_raises(device):
    y, _ = add_rms_norm(*inputs((5, 24), torch.float32, device), 1e-6)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_nan_stays_in_its_row(device):
    x, residual, w = inputs((5, 24), torch.float32, device)
    with torch.no_grad():
        residual[2, 3] = float("nan")
    y, s = add_rms_norm(x, residual, w, 1e-6)
    assert y.isnan()[2].all() and y.isnan().sum() == 24 and s.isnan().sum() == 1


def test_empty(device):
    x, residual, w = inputs((0, 24), torch.float32, device)
    y, s = add_rms_norm(x, residual, w, 1e-6)
    (y.sum() + s.sum()).backward()
    assert y.shape == s.shape == residual.grad.shape == (0, 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "twin"])
def test_compiles(dtype, device, check_compiled):
    check_compiled(lambda x, r, w: add_rms_norm(x, r, w, 1e-6), inputs((2, 3, 24), dtype, device))


@pytest.mark.parametrize(
    "residual, message",
    [
        (torch.ones(24), r"residual is \(24,\) .* x \(5, 24\) .*; expected floating-point tensors of one shape"),
        (torch.ones(5, 24, device="meta"), "on meta"),
        (torch.ones(5, 24, dtype=torch.int64), "torch.int64"),
    ],
)
def test_bad_residual(residual, message):
    with pytest.raises(ValueError, match=message):
        add_rms_norm(torch.ones(5, 24), residual, torch.ones(24), 1e-6)


def test_bad_weight():
    with pytest.raises(ValueError, match=r"weight is \(23,\)"):
        add_rms_norm(torch.ones(5, 24), torch.ones(5, 24), torch.ones(23), 1e-6)
    with pytest.raises(ValueError, match="cast is 'x'"):
        add_rms_norm(torch.ones(5, 24), torch.ones(5, 24), torch.ones(24), 1e-6, cast="x")


@pytest.mark.gpu
def test_offsets_past_int32():
    """Use 2**31 + 4096 elements. The last rows equal a call on those rows alone."""
    x, residual = (torch.randn(2**19 + 1, 4096, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    w = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    tails = [t[-3:].detach().requires_grad_() for t in (x, residual)]
    out, out_tail = add_rms_norm(x, residual, w, 1e-6), add_rms_norm(*tails, w, 1e-6)
    assert all(torch.equal(a[-3:], b) for a, b in zip(out, out_tail, strict=True))
    dy = torch.randn_like(x)
    torch.autograd.backward(out, [dy, dy])
    torch.autograd.backward(out_tail, [dy[-3:], dy[-3:]])
    assert torch.equal(x.grad[-3:], tails[0].grad) and torch.equal(residual.grad[-3:], tails[1].grad)
