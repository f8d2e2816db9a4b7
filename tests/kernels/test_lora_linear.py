import importlib

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from liger_triton import linear_logprobs, lora_linear, reference

low_rank_file = importlib.import_module("liger_triton._low_rank")
DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = 40, 72  # K, N


def oracle(x, weight, bias, a, b, scaling=0.5, source=None):
    return F.linear(x, weight, bias) + scaling * ((x if source is None else source) @ a.t()) @ b.t()


def inputs(shape, dtype, device, rank=5, widths=WIDTHS, adapter=None, bias=True):
    """Return x, weight (frozen), bias, A, B. The adapter's result is as large as the weight's."""
    k, n = widths
    x = torch.randn(*shape, k, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(n, k, device=device) / k**0.5).to(dtype)
    b = torch.randn(n, device=device).to(dtype).requires_grad_() if bias else None
    a_and_b = [
        (torch.randn(size, device=device) * scale).to(adapter or dtype).requires_grad_()
        for size, scale in (((rank, k), k**-0.5), ((n, rank), 2 * rank**-0.5))
    ]
    return [x, weight, b, *a_and_b]


def ours(x, weight, bias, a, b, scaling=0.5):
    return lora_linear(x, weight, bias, lora=(a, b, scaling))


@pytest.mark.parametrize("adapter", [None, torch.float32], ids=["adapters-alike", "adapters-fp32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape, rank",
    [
        pytest.param((64,), 16, id="full-tiles"),
        pytest.param((3, 37), 5, id="tails"),
        pytest.param((1,), 1, id="one-row"),
        pytest.param((2, 19), 70, id="two-products"),  # wider than FUSED_RANK
    ],
)
def test_matches_float64(shape, rank, dtype, adapter, device, check_close):
    check_close(ours, oracle, inputs(shape, dtype, device, rank, adapter=adapter))


def test_several_programs_of_columns(device, monkeypatch, check_close):
    """With four multiprocessors and two row blocks, each half of the columns has its own programs."""
    monkeypatch.setattr(low_rank_file, "multiprocessors", lambda device: 4)
    check_close(ours, oracle, inputs((600,), torch.bfloat16, device, 3, (24, 200)))


@pytest.mark.parametrize("parts", [1, 2])
def test_the_gradients_of_one_read(parts, device, triton_only):
    """Compare (dy sb, dy^T h) of the kernel with float64. Sums over row and column blocks are fp32."""
    dy, h, sb = (torch.randn(s, device=device).bfloat16() for s in ((530, 136), (530, 7 * parts), (136, 7 * parts)))
    whole = torch.full((530, parts, 10), 3.0, device=device, dtype=torch.bfloat16)
    out = whole[..., 2:9] if parts == 2 else whole[:, 0, 2:9]
    db = low_rank_file.low_rank_gradients(dy, h, sb, out, parts, 0.5, 0.25)
    dh, want = dy.double() @ sb.double(), dy.double().t() @ h.double()
    if parts == 2:
        dh, want = dh[:, :7] + dh[:, 7:], want[:, :7] + want[:, 7:]
        torch.testing.assert_close(out.double().sum(1), dh / 2, rtol=1e-4, atol=1e-4)
    else:
        torch.testing.assert_close(out.double(), dh / 2, rtol=1e-2, atol=1e-3)
    assert db.dtype == torch.float32
    torch.testing.assert_close(db.double(), want / 4, rtol=1e-4, atol=1e-4)
    assert (whole[..., :2] == 3).all() and (whole[..., 9:] == 3).all()  # columns of other layers are unchanged


def test_fp32_adapters_lose_nothing_to_16_bits(device):
    """Without autocast PEFT computes the adapter in fp32. Our gradients are as close to float64."""
    x, weight, _, a, b = inputs((50,), torch.bfloat16, device, adapter=torch.float32, bias=False)
    dy = torch.randn(50, WIDTHS[1], device=device).bfloat16()
    got = torch.autograd.grad(ours(x, weight, None, a, b), (a, b), dy)
    leaves = [t.detach().double().requires_grad_() for t in (x, weight, a, b)]
    want = torch.autograd.grad(oracle(leaves[0], leaves[1], None, *leaves[2:]), leaves[2:], dy.double())
    for g, w in zip(got, want, strict=True):
        assert (g.double() - w).norm() <= 1e-5 * w.norm()


@pytest.mark.parametrize("under_autocast", [False, True])
def test_an_adapter_far_below_the_rounding_of_the_output_is_kept(under_autocast, device):
    """As in the first steps of a training, when B is small.

    PEFT adds the adapter's result to an output that is rounded already, and loses most of it. Ours rounds the sum.
    """
    x, weight, _, a, b = inputs((200,), torch.bfloat16, device, 16, (64, 320), adapter=torch.float32, bias=False)
    b = b.detach() / 4000
    with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16, enabled=under_autocast):
        got = ours(x, weight, None, a, b)
        of_peft = F.linear(x, weight) + 0.5 * F.linear(F.linear(x, a.bfloat16()), b.bfloat16())
    x, weight, a, b = (t.detach().double() for t in (x, weight, a, b))
    base, small = x @ weight.t(), 0.5 * x @ a.t() @ b.t()

    def part_kept(y):
        return ((y.double() - base) * small).sum() / small.square().sum()

    assert 0.8 < part_kept(got) < 1.2
    assert part_kept(of_peft) < 0.6


def test_small_gradients_of_fp32_adapters_on_fp16_survive(device):
    """Runs without autocast. Two fp16 numbers would keep one digit of a gradient of 1e-7."""
    x, weight, _, a, b = inputs((50,), torch.float16, device, adapter=torch.float32, bias=False)
    b.data *= 1e-3
    dy = (1e-4 * torch.randn(50, WIDTHS[1], device=device)).half()
    got = torch.autograd.grad(ours(x, weight, None, a, b), (a, b), dy)
    leaves = [t.detach().double().requires_grad_() for t in (x, weight, a, b)]
    want = torch.autograd.grad(oracle(leaves[0], leaves[1], None, *leaves[2:]), leaves[2:], dy.double())
    for g, w in zip(got, want, strict=True):
        assert (g.double() - w).norm() <= 1e-5 * w.norm()


@pytest.mark.parametrize("scaling", [1 / 64, -0.003, 0.0])
def test_a_small_scaling_in_fp16(scaling, device):
    """Runs under autocast. In fp16, B times the scaling would lose most of its digits."""
    x, weight, _, a, b = inputs((50,), torch.float16, device, adapter=torch.float32, bias=False)
    b.data *= 1e-3
    with torch.autocast(torch.device(device).type, dtype=torch.float16):
        got = torch.autograd.grad(ours(x, weight, None, a, b, scaling).sum(), (a, b))
    leaves = [t.detach().double().requires_grad_() for t in (x, weight, a, b)]
    want = torch.autograd.grad(oracle(leaves[0], leaves[1], None, *leaves[2:], scaling).sum(), leaves[2:])
    for g, w in zip(got, want, strict=True):
        assert (g.double() - w).norm() <= 2e-3 * w.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_adapter_has_an_input_of_its_own(dtype, device, check_close):
    source = torch.randn(3, 7, WIDTHS[0], device=device).requires_grad_()  # as PEFT's dropout gives it: in fp32

    def dropped(x, weight, bias, a, b, source):
        return lora_linear(x, weight, bias, lora=(a, b, 0.5), lora_input=source.to(dtype))

    tensors = [*inputs((3, 7), dtype, device), source]
    check_close(dropped, lambda *t: oracle(*t[:5], source=t[5]), tensors)


def test_a_trained_weight_gets_its_gradient(device, check_close):
    tensors = inputs((9,), torch.float32, device)
    check_close(ours, oracle, [tensors[0], tensors[1].requires_grad_(), *tensors[2:]])


@pytest.mark.parametrize("trained", [(0,), (3,), (4,), (0, 3), (0, 4)], ids=str)
def test_only_gradients_that_are_wanted(trained, device, check_close):
    tensors = [t.detach().requires_grad_(k in trained) for k, t in enumerate(inputs((9,), torch.float32, device))]
    check_close(ours, oracle, tensors)


def test_a_frozen_weight_costs_two_large_products(device, allocations):
    """Only y and dx are large products; others have the rank. No tensor has the size of the weight."""
    x, weight, _, a, b = inputs((31,), torch.float32, device, 5, (40, 72), bias=False)
    with allocations() as seen:
        ours(x, weight, None, a, b).square().mean().backward()
    assert seen.products == 2 + 6  # x W^T and dy W; h and h B^T; dh, dB, dh A and dA
    assert weight.numel() not in seen.sizes


def test_x_itself_and_what_is_of_the_rank_are_all_that_is_kept(device):
    x, weight, _, a, b = inputs((2, 31), torch.bfloat16, device, 5, adapter=torch.float32, bias=False)
    kept = []

    def pack(t):
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ours(x, weight, None, a, b)
    assert any(t is x for t in kept)
    known = {t.data_ptr() for t in (x, weight, a, b)}
    # h, A and s B in two parts
    assert [tuple(t.shape) for t in kept if t.data_ptr() not in known] == [(62, 10), (10, 40), (72, 10)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(reentrant, device, allocations):
    """Gradients are the same. Without reentrance, the last large product of a checkpoint is not repeated."""
    x, weight, _, a, b = inputs((31,), torch.float32, device, bias=False)
    want = torch.autograd.grad(ours(x, weight, None, a, b).square().mean(), (x, a, b))
    with allocations() as seen:
        y = checkpoint(ours, x, weight, None, a, b, use_reentrant=reentrant)
        forward = seen.products
        y.square().mean().backward()
    assert seen.products - forward == 5 + (3 if reentrant else 1)
    for got, w in zip((x.grad, a.grad, b.grad), want, strict=True):
        torch.testing.assert_close(got, w)


def test_two_backward_passes(device):
    x, weight, bias, a, b = inputs((9,), torch.float32, device)
    y = ours(x, weight, bias, a, b)
    first = torch.autograd.grad(y.sum(), (x, a, b, bias), retain_graph=True)
    for got, want in zip(torch.autograd.grad(y.sum(), (x, a, b, bias)), first, strict=True):
        assert torch.equal(got, want)
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_a_changed_input_raises(device):
    x, weight, _, a, b = inputs((9,), torch.float32, device, bias=False)
    y = ours(x * 1, weight, None, a, b)
    with torch.no_grad():
        a.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_second_derivative_raises(device):
    x, weight, _, a, b = inputs((9,), torch.float32, device, bias=False)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(ours(x, weight, None, a, b).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_lie_apart(dtype, device, check_close):
    x, weight, bias, a, b = inputs((4, 6), dtype, device)
    wide = torch.randn(6, 4, 2 * WIDTHS[0], device=device).to(dtype).requires_grad_()
    check_close(
        lambda w, *rest: ours(w.transpose(0, 1)[..., 3 : 3 + WIDTHS[0]], *rest),
        lambda w, *rest: oracle(w.transpose(0, 1)[..., 3 : 3 + WIDTHS[0]], *rest),
        [wide, weight, bias, a, b],
    )


def test_non_contiguous_upstream(device, check_upstream_strides):
    x, weight, bias, a, b = inputs((4, 6), torch.float32, device)
    check_upstream_strides(lambda x, a, b: ours(x, weight, bias, a, b), (x, a, b))


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_autocast(weight_dtype, device):
    """Results have the autocast dtype, gradients the tensors' dtypes. One part is enough: PEFT's layer rounds there."""
    x, weight, bias, a, b = inputs((9,), weight_dtype, device, adapter=torch.float32)
    dy = torch.randn(9, WIDTHS[1], device=device).bfloat16()
    results = []
    for layer in (ours, lambda *t: reference.lora_linear(*t[:3], lora=(*t[3:], 0.5))):
        with torch.autocast(device, dtype=torch.bfloat16):
            y = layer(x, weight, bias, a, b)
        results.append([y, *torch.autograd.grad(y, (x, bias, a, b), dy)])
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype
        assert (got.double() - want.double()).norm() <= 0.01 * want.double().norm()


def test_no_gradient_no_graph(device):
    x, weight, bias, a, b = inputs((9,), torch.float32, device)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y = ours(x, weight, bias, a, b)
            assert not y.requires_grad
            torch.testing.assert_close(y, oracle(x, weight, bias, a, b))


def test_empty(device):
    x, weight, bias, a, b = inputs((0,), torch.bfloat16, device)
    ours(x, weight, bias, a, b).sum().backward()
    assert x.grad.shape == x.shape and not a.grad.any() and not b.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["torch", "twin"])
def test_compiles(dtype, device):
    tensors = inputs((9,), dtype, device)
    leaves = [t for t in tensors if t.requires_grad]
    torch._dynamo.reset()
    got = torch.compile(ours, fullgraph=True, backend="aot_eager")(*tensors)
    want = ours(*tensors)
    torch.testing.assert_close(got, want)
    for g, w in zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True):
        torch.testing.assert_close(g, w)


def test_nan_reaches_the_output(device):
    x, weight, bias, a, b = inputs((3,), torch.float32, device)
    with torch.no_grad():
        a[0, 0] = torch.nan
    assert ours(x, weight, bias, a, b).isnan().all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight": torch.ones(72, 41)}, r"weight is \(72, 41\), x \(9, 40\); expected weight \(N, 40\)"),
        ({"weight": torch.ones(72, 40).bfloat16()}, "weight is torch.bfloat16, x torch.float32; convert"),
        ({"bias": torch.ones(40)}, r"bias is \(40,\); expected \(72,\)"),
        ({"lora": (torch.ones(4, 40), torch.ones(72, 5), 1.0)}, r"expected A \(r, 40\) and B \(72, r\)"),
        ({"lora": (torch.ones(4, 40, device="meta"), torch.ones(72, 4), 1.0)}, "lora A is torch.float32 on meta"),
        ({"lora_input": torch.ones(9, 41)}, r"lora_input is \(9, 41\), x \(9, 40\)"),
        ({"x": torch.ones(9, 40, dtype=torch.int64)}, "x is .* torch.int64"),
        ({"lora": None}, "lora is None"),
    ],
)
def test_bad_input(change, message):
    given = {
        "x": torch.ones(9, 40),
        "weight": torch.ones(72, 40),
        "bias": None,
        "lora_input": None,
        "lora": (torch.ones(4, 40), torch.ones(72, 4), 1.0),
    }
    with pytest.raises(ValueError, match=message):
        lora_linear(**(given | change))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rank_0(dtype, device):
    """The layer runs alone. A and B get empty gradients."""
    x = torch.randn(5, 24, device=device, dtype=dtype)
    w = torch.randn(16, 24, device=device, dtype=dtype)
    a, b = (torch.zeros(s, device=device, requires_grad=True) for s in ((0, 24), (16, 0)))
    x.requires_grad_()
    y = lora_linear(x, w, lora=(a, b, 2.0))
    torch.testing.assert_close(y, torch.nn.functional.linear(x, w))
    dx, da, db = torch.autograd.grad(y.sum(), (x, a, b))
    torch.testing.assert_close(dx, w.sum(0).expand(5, -1), rtol=2e-2, atol=2e-2)
    assert da.shape == (0, 24) and db.shape == (16, 0)
    z = linear_logprobs(x, w, torch.zeros(5, dtype=torch.int64, device=device), lora=(a.to(dtype), b.to(dtype), 2.0))
    torch.testing.assert_close(z.log_probs, y.float().log_softmax(-1)[:, 0], rtol=1e-2, atol=1e-2)
