import pytest
import torch

from liger_triton import reference, rms_norm

CASTS = ["llama", "gemma", "none"]  # "rstd" rounds a factor of whole rows, which shows in bf16: it has its own tests
DTYPES = [torch.float32, torch.bfloat16]


def inputs(shape, dtype, device, weight_dtype=None, weight=True):
    x = torch.randn(shape, device=device) * 3
    w = torch.randn(shape[-1], device=device)
    return x.to(dtype).requires_grad_(), w.to(weight_dtype or dtype).requires_grad_() if weight else None


def oracle(x, w):
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * w


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((3, 1152), id="one-row-tiles-with-tail"),
        pytest.param((2, 37, 5, 20), id="many-narrow-rows"),  # 370 rows in 3 tiles of 128, for 2 programs: one loops
        pytest.param((33, 128), id="head-dim"),
        pytest.param((4100,), id="one-row"),  # wider than a tile
    ],
)
def test_matches_float64(shape, cast, dtype, device, check_close):
    x, w = inputs(shape, dtype, device)
    check_close(lambda x, w: rms_norm(x, w, 1e-5, cast=cast), oracle, [x, w])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cast", CASTS)
def test_offset_and_missing_weight(cast, dtype, device, check_close):
    x, w = inputs((7, 40), dtype, device)

    # Weights of one binade and an offset of 1 make w + offset exact in bf16, which llama rounds it to
    w = (w.detach().sign() * 0.5).requires_grad_()
    check_close(lambda x, w: rms_norm(x, w, 1e-5, offset=1.0, cast=cast), lambda x, w: oracle(x, w + 1), [x, w])
    check_close(lambda x: rms_norm(x, None, 1e-5, cast=cast), lambda x: oracle(x, 1), [x])


@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("w_dtype", [*DTYPES, torch.float16, None], ids=str)
@pytest.mark.parametrize("cast", CASTS)
def test_dtype_equals_the_twin_s(cast, x_dtype, w_dtype, device):
    x, w = inputs((5, 40), x_dtype, device, w_dtype, weight=w_dtype is not None)
    got = rms_norm(x, w, 1e-6, cast=cast)
    want = reference.rms_norm(x, w, 1e-6, cast=cast)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    got.sum().backward()
    assert x.grad.dtype == x_dtype and (w is None or w.grad.dtype == w_dtype)


def test_casts_round_where_they_say(device):
    """With an fp32 weight, llama rounds before the product: dividing by the weight gives bf16 numbers."""
    x, _ = inputs((5, 64), torch.bfloat16, device)
    w = 2.0 ** torch.randint(-3, 3, (64,), device=device)  # powers of two: the division is exact
    llama, none = (rms_norm(x, w, 1e-6, cast=cast) / w for cast in ("llama", "none"))
    assert torch.equal(llama, llama.bfloat16().float())
    assert not torch.equal(none, none.bfloat16().float())
    assert rms_norm(x, w, 1e-6, cast="gemma").dtype == torch.bfloat16


def test_rstd_is_rounded_before_the_product(device):
    x = 2.0 ** torch.randint(-3, 3, (5, 63), device=device)  # powers of two: a product with one is exact
    x = x.bfloat16()
    rstd = (rms_norm(x, None, 1e-6, cast="rstd") / x).float()
    assert torch.equal(rstd, rstd[:, :1].expand_as(rstd)) and torch.equal(rstd, rstd.bfloat16().float())


@pytest.mark.parametrize("weight", [True, False])
def test_rstd_is_a_norm(weight, device, check_close):
    x, w = inputs((37, 5, 20), torch.float32, device, weight=weight)
    check_close(lambda x, w: rms_norm(x, w, 1e-5, cast="rstd"), lambda x, w: oracle(x, 1 if w is None else w), [x, w])


@pytest.mark.gpu
@pytest.mark.parametrize("cast", [*CASTS, "rstd"])
def test_bf16_is_bit_equal_to_the_twin(cast):
    """Only the order of the sum differs, so a few elements may round differently. A wrong cast changes a quarter."""
    x, w = inputs((64, 4096), torch.bfloat16, "cuda")
    got = rms_norm(x, w, 1e-6, cast=cast)
    want = reference.rms_norm(x, w, 1e-6, cast=cast)
    assert (got != want).float().mean() < 1e-3


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda t: t[:, ::2, :40], id="row-stride"),
        pytest.param(lambda t: t.transpose(0, 1)[..., 3:50], id="transposed"),
        pytest.param(lambda t: t.transpose(1, 2), id="column-stride"),
        pytest.param(lambda t: t[:1, :1].expand(4, 3, 64), id="expanded"),
    ],
)
def test_non_contiguous(view, device, check_close):
    x = view(torch.randn(3, 8, 64, device=device)).requires_grad_()
    w = torch.randn(2 * x.shape[-1], device=device)[::2].requires_grad_()
    check_close(lambda x, w: rms_norm(x, w, 1e-5), oracle, [x, w])


def test_non_contiguous_upstream(device, check_upstream_strides):
    check_upstream_strides(lambda x, w: rms_norm(x, w, 1e-5), inputs((4, 21), torch.float32, device))


def test_eps_counts(device, check_close):
    x, w = inputs((5, 24), torch.float32, device)
    check_close(
        lambda x, w: rms_norm(x, w, 0.5), lambda x, w: x * (x.pow(2).mean(-1, keepdim=True) + 0.5).rsqrt() * w, [x, w]
    )


def test_frozen_weight(device):
    x, w = inputs((4, 24), torch.float32, device)
    want = torch.autograd.grad(rms_norm(x, w, 1e-6).pow(3).sum(), x)[0]
    out = rms_norm(x, w.detach(), 1e-6)
    out.pow(3).sum().backward()
    torch.testing.assert_close(x.grad, want, rtol=0, atol=0)


def test_weight_gradient_is_deterministic(device):
    x, w = inputs((300, 20), torch.bfloat16, device)
    first, second = (torch.autograd.grad(rms_norm(x, w, 1e-6).float().sin().sum(), w)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_backward_leaves_the_upstream_gradient(device):
    x, w = inputs((5, 24), torch.float32, device)
    dy = torch.randn(5, 24, device=device)
    copy = dy.clone()
    rms_norm(x, w, 1e-6).backward(dy)
    assert torch.equal(dy, copy)


def test_second_backward_raises(device):
    x, w = inputs((5, 24), torch.float32, device)
    loss = rms_norm(x, w, 1e-6).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_raises(device, triton_only):
    """The kernels have no second derivative; it must not count as zero."""
    x, w = inputs((5, 24), torch.float32, device)
    with pytest.raises(RuntimeError, match="A second derivative was asked for"):
        torch.autograd.grad(rms_norm(x, w, 1e-6).pow(2).sum(), x, create_graph=True)


def test_nan_stays_in_its_row(device):
    x, w = inputs((5, 24), torch.float32, device)
    with torch.no_grad():
        x[2, 3] = float("nan")
    bad = rms_norm(x, w, 1e-6).isnan()
    assert bad[2].all() and bad.sum() == 24


def test_zeros_and_large_values(device):
    """A zero row gives 0 instead of NaN. The largest bf16 squares to inf in fp32 and gives 0, as in PyTorch."""
    x = torch.zeros(3, 24, device=device, dtype=torch.bfloat16)
    x[1], x[2] = 1e18, torch.finfo(torch.bfloat16).max
    w = torch.ones(24, device=device, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(x, w, 1e-6), reference.rms_norm(x, w, 1e-6))


@pytest.mark.parametrize("shape", [(0, 24), (3, 0, 24), (3, 0)], ids=str)
def test_empty(shape, device):
    x, w = inputs(shape, torch.float32, device)
    y = rms_norm(x, w, 1e-6)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape and torch.equal(w.grad, torch.zeros_like(w))


def test_float64_is_exact(device):
    x, w = inputs((4, 24), torch.float64, device)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6), (x, w))


@pytest.mark.parametrize("weight", [True, False], ids=["weight", "no-weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "twin"])
def test_compiles(dtype, weight, device, check_compiled):
    check_compiled(lambda x, w: rms_norm(x, w, 1e-6, cast="gemma"), inputs((2, 3, 24), dtype, device, weight=weight))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight": torch.ones(23)}, r"weight is \(23,\), x \(5, 24\); expected weight \(24,\)"),
        ({"weight": torch.ones(2, 24)}, r"weight is \(2, 24\)"),
        ({"weight": torch.ones(24, device="meta")}, "weight is on meta, x on cpu; move weight to cpu"),
        ({"weight": torch.ones(24, dtype=torch.int64)}, "weight is torch.int64"),
        ({"x": torch.ones(5, 24, dtype=torch.int64)}, r"x is \(5, 24\) torch.int64"),
        ({"x": torch.tensor(1.0)}, r"x is \(\)"),
        ({"cast": "gemma2"}, "cast is 'gemma2'; expected one of 'llama', 'gemma', 'none'"),
        ({"weight": None, "offset": 1.0}, "offset is 1.0, but weight is None"),
    ],
)
def test_bad_input(change, message):
    given = {"x": torch.ones(5, 24), "weight": torch.ones(24), "eps": 1e-6, "offset": 0.0, "cast": "llama"} | change
    with pytest.raises(ValueError, match=message):
        rms_norm(given.pop("x"), given.pop("weight"), given.pop("eps"), **given)


@pytest.mark.gpu
def test_offsets_past_int32():
    """Use 2**31 + 4096 elements. The last rows equal a call on those rows alone."""
    x = torch.randn(2**19 + 1, 4096, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    tail = x[-3:].detach().requires_grad_()
    y, y_tail = rms_norm(x, w, 1e-6), rms_norm(tail, w, 1e-6)
    assert torch.equal(y[-3:], y_tail)
    dy = torch.randn_like(y)
    y.backward(dy)
    y_tail.backward(dy[-3:])
    assert torch.equal(x.grad[-3:], tail.grad)


@pytest.mark.parametrize("given", [True, False], ids=["gradient like x", "contiguous gradient"])
def test_heads_of_a_projection_are_not_copied(given, device, triton_only):
    """Gemma 3 hands transposed queries (B, H, S, N) to their norm. The results equal contiguous rows."""
    x = torch.randn(2, 5, 3, 16, device=device).transpose(1, 2).requires_grad_()
    weight = torch.randn(16, device=device, requires_grad=True)
    dy = torch.randn(2, 5, 3, 16, device=device).transpose(1, 2)
    y = rms_norm(x, weight, 1e-6)
    assert y.stride() == x.stride()
    got = torch.autograd.grad(y, (x, weight), dy if given else dy.contiguous())
    assert got[0].stride() == x.stride()
    want = rms_norm(x.contiguous(), weight, 1e-6)
    torch.testing.assert_close(y, want, rtol=0, atol=0)
    for one, other in zip(got, torch.autograd.grad(want, (x, weight), dy), strict=True):
        torch.testing.assert_close(one, other)
