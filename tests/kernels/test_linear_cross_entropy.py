import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from liger_triton import linear_cross_entropy, reference
from liger_triton._chunks import chunk_size, sum_dtype

# no size is a power of two, the last chunk is partial, a row is two blocks of 128
T = 13
H = 24
V = 211
CHUNK = 5
DTYPES = [torch.float32, torch.bfloat16]


def inputs(device, dtype=torch.float32, rows=T, ignored=True):
    """Return hidden, weight and bias that require gradients, and a target with ignored rows."""
    x = torch.randn(rows, H)
    w = torch.randn(V, H) / H**0.5
    b = torch.randn(V) * 0.3
    y = torch.randint(0, V, (rows,))
    if ignored:
        y[::4] = -100
    return *(t.to(device, dtype).requires_grad_() for t in (x, w, b)), y.to(device)


CASES = [
    pytest.param({}, id="plain"),
    pytest.param({"reduction": "sum", "label_smoothing": 0.2}, id="smoothing"),
    pytest.param({"reduction": "none", "softcap": 2.0}, id="softcap"),
    pytest.param({"logit_scale": -0.4, "softcap": 1.5, "z_loss": 0.01}, id="scale-softcap-z-loss"),
    pytest.param({"reduction": "none", "logit_scale": 1.5, "label_smoothing": 0.1, "z_loss": 0.05}, id="none-all"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", CASES)
def test_matches_float64(options, dtype, device, row_pass, check_close):
    x, w, b, y = inputs(device, dtype)
    check_close(
        lambda x, w, b: linear_cross_entropy(x, w, y, b, chunk_rows=CHUNK, **options),
        lambda x, w, b: reference.linear_cross_entropy(x, w, y, b, **options),
        [x, w, b],
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_token_weights(reduction, device, row_pass, check_close):
    """Weights by class equal F.cross_entropy's, including the mean over the sum of weights."""
    x, w, b, y = inputs(device)
    classes = torch.rand(V, device=device) + 0.1
    weights = torch.where(y == -100, torch.nan, classes[y.clamp(min=0)])  # values of ignored rows must not matter
    check_close(
        lambda x, w, b: linear_cross_entropy(x, w, y, b, token_weights=weights, reduction=reduction, chunk_rows=CHUNK),
        lambda x, w, b: F.cross_entropy(F.linear(x, w, b), y, weight=classes.double(), reduction=reduction),
        [x, w, b],
    )


def test_reference_is_f_cross_entropy(device):
    x, w, b, y = (t.double() if t.is_floating_point() else t for t in inputs(device))
    for reduction in ("mean", "sum", "none"):
        got = reference.linear_cross_entropy(x, w, y, b, reduction=reduction, label_smoothing=0.1, softcap=3.0)
        logits = 3.0 * torch.tanh(F.linear(x, w, b) / 3.0)
        want = F.cross_entropy(logits, y, reduction=reduction, label_smoothing=0.1)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lora(dtype, reduction, device, row_pass, check_close):
    """Adapters are fp32, as PEFT keeps them on a bf16 model, with their own input, as after dropout."""
    x, w, b, y = inputs(device, dtype)
    w.requires_grad_(False)
    a = (torch.randn(3, H, device=device) / H**0.5).requires_grad_()
    lb = (torch.randn(V, 3, device=device) / 2).requires_grad_()
    dropped = (x.detach() * (torch.rand(T, H, device=device) > 0.2)).requires_grad_()
    check_close(
        lambda x, w, a, lb, d: linear_cross_entropy(
            x, w, y, lora=(a, lb, 0.7), lora_input=d, reduction=reduction, chunk_rows=CHUNK
        ),
        lambda x, w, a, lb, d: reference.linear_cross_entropy(
            x, w, y, lora=(a, lb, 0.7), lora_input=d, reduction=reduction
        ),
        [x, w, a, lb, dropped],
    )


def test_leading_dimensions_and_strides(device, check_close):
    """hidden (B, S, H) is the slice [:, :-1], the weight is transposed, the labels are strided."""
    x = torch.randn(3, 8, H, device=device, requires_grad=True)
    w = torch.randn(H, V, device=device, requires_grad=True)
    y = torch.randint(0, V, (3, 8), device=device)[:, 1:]
    for reduction in ("mean", "none"):
        out = check_close(
            lambda x, w: linear_cross_entropy(x[:, :-1], w.t(), y, reduction=reduction),  # noqa: B023
            lambda x, w: reference.linear_cross_entropy(x[:, :-1], w.t(), y, reduction=reduction),  # noqa: B023
            [x, w],
        )
    assert out[0].shape == (3, 7)


def test_wide_vocabulary(device, check_close):
    """The vocabulary needs more than one block of the production size."""
    x = torch.randn(2, 3, device=device, requires_grad=True)
    w = torch.randn(9001, 3, device=device, requires_grad=True)
    y = torch.tensor([9000, 8191], device=device)
    check_close(
        lambda x, w: linear_cross_entropy(x, w, y), lambda x, w: reference.linear_cross_entropy(x, w, y), [x, w]
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_scaled_and_added_to_another_loss(reduction, device, check_close):
    x, w, b, y = inputs(device)

    def objective(head):
        def f(x, w, b):
            return (head(x, w, y, b, reduction=reduction) * 3.7).sum() + x.square().sum() + w.square().mean()

        return f

    check_close(objective(linear_cross_entropy), objective(reference.linear_cross_entropy), [x, w, b])


@pytest.mark.parametrize("frozen", [False, True])
def test_upstream_gradient_is_not_rounded(frozen, device):
    """With several chunks, a bf16 gradient is multiplied by the fp32 number, unrounded."""
    x, w, _, y = inputs(device, torch.bfloat16)
    w.requires_grad_(not frozen)
    reduction = "none" if frozen else "sum"
    factor = 0.1 if not frozen else torch.where(y == -100, 0.0, torch.rand(T, device=device))
    once, scaled = (linear_cross_entropy(x, w, y, reduction=reduction, chunk_rows=CHUNK) for _ in range(2))
    (plain,) = torch.autograd.grad(once.sum(), x)
    (got,) = torch.autograd.grad((scaled * factor).sum(), x)
    rows = factor.view(-1, 1) if frozen else torch.tensor(factor, device=device)
    assert torch.equal(got, (plain.float() * rows).bfloat16())


@pytest.mark.parametrize("chunk_rows", [CHUNK, None])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_backward(reduction, frozen, chunk_rows, device):
    """A kept graph may run again; a freed one may not."""
    x, w, b, y = inputs(device)
    if frozen:
        w, b = w.detach(), b.detach()
    loss = linear_cross_entropy(x, w, y, b, reduction=reduction, chunk_rows=chunk_rows).sum()
    loss.backward(retain_graph=True)
    first, x.grad = x.grad, None
    loss.backward()
    torch.testing.assert_close(x.grad, first, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_rows_ignored(reduction, device, row_pass):
    x, w, b, y = inputs(device)
    loss = linear_cross_entropy(x, w, torch.full_like(y, 7), b, ignore_index=7, reduction=reduction)
    assert torch.equal(loss, torch.zeros_like(loss)) and loss.requires_grad
    loss.sum().backward()
    for t in (x, w, b):
        assert torch.equal(t.grad, torch.zeros_like(t))
    weighted = linear_cross_entropy(x, w, y, b, token_weights=torch.zeros(T, device=device))
    assert weighted.item() == 0.0


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_all_rows_ignored_and_divided_by_their_number(reduction, device, row_pass):
    """0 / 0 is NaN with an infinite gradient. The inputs get gradient 0, as from F.cross_entropy."""
    x, w, b, y = inputs(device)
    loss = linear_cross_entropy(x, w, torch.full_like(y, -100), b, reduction=reduction).sum()
    (loss / torch.zeros((), device=device)).backward()
    for t in (x, w, b):
        assert torch.equal(t.grad, torch.zeros_like(t))


def test_no_rows(device, row_pass):
    x, w, b, y = inputs(device, rows=0)
    for reduction in ("mean", "none"):
        linear_cross_entropy(x, w, y, b, reduction=reduction).sum().backward()
        assert torch.equal(w.grad, torch.zeros_like(w)) and x.grad.shape == (0, H)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nan(reduction, device, row_pass):
    """A NaN in a row that counts reaches loss and gradient. In an ignored row it is never read."""
    x, w, b, y = inputs(device)
    y[3], y[4] = 1, -100
    with torch.no_grad():
        x[4] = torch.nan
    loss = linear_cross_entropy(x, w, y, b, reduction=reduction)
    loss.sum().backward()
    assert loss.isfinite().all() and w.grad.isfinite().all() and torch.equal(x.grad[4], torch.zeros_like(x.grad[4]))
    with torch.no_grad():
        x[3, 2] = torch.nan
    loss = linear_cross_entropy(x, w, y, b, reduction=reduction)
    loss.sum().backward()
    assert loss.isnan().sum() == 1 and w.grad.isnan().any() and x.grad[3].isnan().all()


@pytest.mark.parametrize("p", [0.9, 0.99, 0.999, 0.9999])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_confident_tokens(dtype, p, device, row_pass):
    """Where softmax is near 1, p - 1 cancels: the gradient is at least as accurate as PyTorch's in that dtype."""
    logits = torch.zeros(6, 40)
    y = torch.arange(6) * 6
    logits[torch.arange(6), y] = torch.tensor(39 * p / (1 - p)).log()
    x = torch.eye(6).to(device, dtype).requires_grad_()
    w, y = logits.t().to(device, dtype).contiguous(), y.to(device)  # F.linear(x, w) is logits, exactly
    want = x.detach().double().requires_grad_()
    F.cross_entropy(F.linear(want, w.double()), y, reduction="sum").backward()
    theirs = x.detach().requires_grad_()
    F.cross_entropy(F.linear(theirs, w).float(), y, reduction="sum").backward()
    linear_cross_entropy(x, w, y, reduction="sum").backward()
    error = (x.grad - want.grad).norm() / want.grad.norm()
    assert error <= max((theirs.grad - want.grad).norm() / want.grad.norm(), 4e-6) * 1.5  # 4e-6: exp(-13) on a GPU
    assert error <= (1e-5 if dtype == torch.float32 else 1e-2)


def test_common_offset(device, row_pass):
    """Adding 10000 to all logits changes nothing. They are sums of eighths, so fp32 holds them exactly either way."""
    x = torch.randint(-3, 4, (T, H), device=device).float().requires_grad_()
    w = (torch.randint(-3, 4, (V, H), device=device) / 8).requires_grad_()
    y = torch.randint(0, V, (T,), device=device)
    got = []
    for offset in (0.0, 10000.0):
        b = torch.full((V,), offset, device=device)
        loss = linear_cross_entropy(x, w, y, b, label_smoothing=0.1)
        got.append((loss.detach(), *torch.autograd.grad(loss, (x, w))))
    for plain, shifted in zip(*got, strict=True):
        assert (plain - shifted).norm() <= 1e-6 * plain.norm()


def test_weight_gradient_is_as_accurate_in_many_chunks_as_in_one_product(device):
    """In 32 bf16 chunks, the fp32 sum has the error of one product. The lean sum has more, so the test can fail."""
    x, w, b, y = inputs(device, torch.bfloat16, rows=32, ignored=False)
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    reference.linear_cross_entropy(x64, w64, y, reduction="sum").backward()

    def error(rows, accumulate="fp32"):
        w.grad = None
        linear_cross_entropy(x, w, y, reduction="sum", chunk_rows=rows, accumulate=accumulate).backward()
        assert w.grad.dtype == torch.bfloat16
        return ((w.grad.double() - w64.grad).norm() / w64.grad.norm()).item()

    one = error(32)
    assert one < 5e-3
    for rows in (15, 4, 1):
        assert error(rows) <= 1.05 * one
    assert error(1, "lean") > 1.5 * one


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_one_chunk_is_as_accurate_as_pytorch(reduction, with_bias, device, row_pass):
    """Uses bf16, one chunk, and an upstream gradient that is not a power of two.

    The weight's gradient is rounded with the gradient of the logits, as in PyTorch, so our errors are no larger.
    No fp32 sum is made for it.
    """
    x, w, b, y = inputs(device, torch.bfloat16, rows=64)
    if with_bias:  # 208 words: a bias is added before the logits are rounded where the vocabulary is a multiple of 16
        w = w[:208].detach().requires_grad_()
        b = b[:208]
        y = y.clamp(max=207)
    b = b.detach() if with_bias else None
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    b64 = None if b is None else b.double()
    factor = 0.0137 if reduction == "sum" else torch.rand(64, device=device)
    (reference.linear_cross_entropy(x64, w64, y, b64, reduction=reduction) * factor).sum().backward()

    def errors(head):
        x.grad = w.grad = None
        (head(x, w, y, b, reduction=reduction) * factor).sum().backward()
        return [(t.grad.double() - t64.grad).norm() / t64.grad.norm() for t, t64 in ((x, x64), (w, w64))]

    def plain(x, w, y, b, reduction):
        return F.cross_entropy(F.linear(x, w, b).float(), y, reduction=reduction)

    for ours, pytorch in zip(errors(linear_cross_entropy), errors(plain), strict=True):
        truncated = row_pass == "triton" and device == "cpu"  # Triton's interpreter truncates to bf16
        assert ours <= (1.6 if truncated else 1.05) * pytorch < 5e-3


def test_one_chunk_makes_no_sum(device, allocations):
    """The gradient of a bf16 weight is the only tensor of its size. Nothing from forward outlives backward."""
    x, w, _, y = inputs(device, torch.bfloat16, rows=16, ignored=False)
    with allocations() as seen:
        gc.collect()
        loss = linear_cross_entropy(x, w, y)
        tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
        held = [t for t in tensors if t.shape[:1] == (16,) and t.numel() >= 16 * V]
        del tensors
        assert len(held) == 1
        logits = weakref.ref(held.pop())
        loss.backward()
    assert logits() is None
    assert seen.products == (3 if device == "cpu" else 6)  # a GPU multiplies the last of 211 words apart
    assert sum(n >= V * H for n in seen.sizes) == 1


class _AliveAtRounding(TorchDispatchMode):
    """Record whether a tensor is still alive when an fp32 sum of the weight's size is rounded."""

    def __init__(self, tensor):
        super().__init__()
        self.tensor, self.found = weakref.ref(tensor), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (
            func.overloadpacket is torch.ops.aten._to_copy
            and args[0].shape == (V, H)
            and args[0].dtype == torch.float32
        ):
            self.found.append(self.tensor() is not None)
        return func(*args, **(kwargs or {}))


def test_kept_logits_are_gone_before_the_sum_is_rounded(device):
    """Otherwise they would add to the peak."""
    x, w, _, y = inputs(device, torch.bfloat16, ignored=False)
    gc.collect()
    loss = linear_cross_entropy(x, w, y, reduction="none", chunk_rows=9).sum()
    (logits,) = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape in [(9, V), (9, 256)]]
    seen = _AliveAtRounding(logits)
    del logits
    with seen:
        loss.backward()
    assert seen.found == [False]


def test_fp16_keeps_small_probabilities(device):
    """p / T would underflow in fp16 (2e-6 here, smallest step 6e-8), so it is never formed."""
    rows, vocab = 128, 4001
    x = (torch.randn(rows, 8, device=device) / 4).half().requires_grad_()
    w = (torch.randn(vocab, 8, device=device) / 4).half().requires_grad_()
    y = torch.zeros(rows, dtype=torch.long, device=device)  # one class: the others see only their p
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    (reference.linear_cross_entropy(x64, w64, y) * 2.0**15).backward()
    for chunk_rows in (64, rows):
        x.grad = w.grad = None
        (linear_cross_entropy(x, w, y, chunk_rows=chunk_rows) * 2.0**15).backward()
        for got, want in ((w.grad[1:], w64.grad[1:]), (x.grad, x64.grad)):
            assert (got - want).norm() <= 2e-3 * want.norm()


def test_products_and_memory(device, row_pass, allocations):
    """A chunk takes three products, two with a frozen weight, one without gradients.

    Uneven gradients take four, but not in the last chunk. No tensor has T x V elements. V x H elements appear once, or
    never with a frozen weight.
    """
    rows, chunks = 30, 2
    x, w, _, y = inputs(device, rows=rows, ignored=False)
    u = (torch.randn(2, H, device=device), torch.randn(V, 2, device=device).requires_grad_(), 1.0)

    def count(*args, **options):
        with allocations() as seen:
            loss = linear_cross_entropy(*args, chunk_rows=rows // chunks, **options)
            if loss.requires_grad:
                loss.sum().backward()
        assert max(seen.sizes) < rows * V
        return seen.products / chunks, sum(n >= V * H for n in seen.sizes)

    assert count(x, w, y) == (3, 1)
    assert count(x, w, y, label_smoothing=0.1, token_weights=torch.rand(rows, device=device)) == (3, 1)
    assert count(x, w.detach(), y) == (2, 0)
    assert count(x, w.detach(), y, reduction="none") == (2, 0)
    assert count(x, w, y, reduction="none") == (4 - 1 / chunks, 1)
    assert count(x.detach(), w, y) == (2, 1)
    with torch.no_grad():
        assert count(x, w, y) == (1, 0)
    products, dense = count(x, w.detach(), y, lora=u)
    assert dense == 0 and products == 2 + 3 + 2 / chunks  # u B^T, du and dB of each chunk; u and its gradient once


def test_autocast(device):
    """Mixed precision has bf16 hidden states and an fp32 weight: values equal F.linear's, gradients are fp32."""
    x, w, b, y = inputs(device, torch.bfloat16)
    w, b = (t.detach().float().requires_grad_() for t in (w, b))
    x64, w64, b64 = (t.detach().double().requires_grad_() for t in (x, w, b))
    reference.linear_cross_entropy(x64, w64, y, b64).backward()
    for reduction in ("mean", "none"):
        x.grad = w.grad = b.grad = None
        with torch.autocast(device, torch.bfloat16):
            loss = linear_cross_entropy(x, w, y, b, reduction=reduction, chunk_rows=CHUNK)
        assert loss.dtype == torch.float32
        (loss.sum() / (1 if reduction == "mean" else (y != -100).sum())).backward()
        for got, want in ((x, x64), (w, w64), (b, b64)):
            assert got.grad.dtype == got.dtype
            assert (got.grad - want.grad).norm() <= 1e-2 * want.grad.norm()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compile(dtype, reduction, device, check_compiled):
    x, w, b, y = inputs(device, dtype)
    a = torch.randn(3, H, device=device, requires_grad=True)
    lb = torch.randn(V, 3, device=device, requires_grad=True)
    check_compiled(
        lambda x, w, b, a, lb: linear_cross_entropy(
            x, w, y, b, lora=(a, lb, 0.5), reduction=reduction, chunk_rows=CHUNK
        ),
        [x, w, b, a, lb],
    )


def test_chunk_size():
    """Memory is bounded. On a GPU a chunk has a power of two rows, or all rows if one chunk saves the fp32 sum."""
    for rows, vocab, dtype, device in [
        (8192, 128256, torch.bfloat16, "cuda"),
        (32768, 151936, torch.bfloat16, "cuda"),
        (3, 32000, torch.float32, "cuda"),
        (2048, 49152, torch.float32, "cpu"),
        (5, 10**9, torch.float32, "cpu"),
        (0, 100, torch.float32, "cpu"),
        (10**6, 10**7, torch.bfloat16, "cuda"),
    ]:
        size = chunk_size(rows, vocab, dtype, device)
        most, least = (64, 4) if device == "cpu" else (640, 128 * dtype.itemsize)  # MiB; bytes a word
        assert size >= 1 and size * vocab * dtype.itemsize <= max(
            (640 if device == "cuda" else 64) << 20, vocab * least
        )
        assert size >= rows or device == "cpu" or size % 128 == 0
        if device == "cpu" and rows > size:
            assert rows % size == 0 or rows % size > size // 2  # no tiny last chunk
    bf16 = (torch.bfloat16, "cuda")
    of_sum = 128256 * 4096 * 4
    assert chunk_size(8192, 128256, *bf16) == 2048
    assert chunk_size(2500, 128256, *bf16) == 2500  # 612 MiB
    assert chunk_size(8192, 128256, *bf16, of_sum) == 4096
    assert chunk_size(8192, 128256, *bf16, of_sum, all_rows=True) == 8192
    assert chunk_size(8193, 128256, *bf16, of_sum, all_rows=True) == 4096
    assert chunk_size(8192, 6 * 128256, *bf16) == 384


@pytest.mark.gpu
def test_offsets_past_2_31():
    x = torch.randn(16400, 8, device="cuda").bfloat16()
    w = torch.randn(131072, 8, device="cuda").bfloat16()
    y = torch.randint(0, 131072, (16400,), device="cuda")
    x.requires_grad_()
    grads = []
    for rows in (16400, 2048):  # one chunk of 2.15e9 logits, and nine small ones
        loss = linear_cross_entropy(x, w, y, chunk_rows=rows)
        grads.append((loss, *torch.autograd.grad(loss, x)))
    for one, many in zip(*grads, strict=True):
        torch.testing.assert_close(one, many, rtol=1e-2, atol=1e-8)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_device_of_its_tensors():
    x, w, b, y = inputs("cuda:0")
    x1, w1, b1, y1 = (t.detach().to("cuda:1").requires_grad_(t.requires_grad) for t in (x, w, b, y))
    for args in ((x, w, y, b), (x1, w1, y1, b1)):
        linear_cross_entropy(*args).backward()
    torch.testing.assert_close(w.grad.cpu(), w1.grad.cpu(), rtol=0, atol=0)


def bad(**changes):
    """Return valid arguments of a call except for `changes`; a function changes the value."""
    x, w, b, y = inputs("cpu")
    args = {"hidden": x, "weight": w, "target": y, "bias": b} | {k: v for k, v in changes.items() if not callable(v)}
    return args | {k: v(args[k]) for k, v in changes.items() if callable(v)}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weight": lambda w: w[:, :-1]}, r"hidden is \(13, 24\), weight \(211, 23\)"),
        ({"target": lambda y: y[:-1]}, r"target \(12,\); expected hidden \(\.\.\., H\)"),
        ({"bias": lambda b: b[:-1]}, r"bias is \(210,\); expected \(211,\)"),
        ({"weight": lambda w: w.bfloat16()}, "hidden is torch.float32, weight torch.bfloat16; expected one dtype"),
        ({"bias": lambda b: b.half()}, "hidden is torch.float32, bias torch.float16"),
        ({"hidden": lambda x: x.long()}, "hidden is torch.int64; expected bfloat16, float16, float32 or float64"),
        ({"weight": lambda w: w.to("meta")}, "weight is on meta, hidden on cpu"),
        ({"target": lambda y: y.to("meta")}, "target is on meta, hidden on cpu"),
        ({"target": lambda y: y.float()}, r"target is torch.float32; expected class ids.*target.long\(\)"),
        ({"reduction": "avg"}, "reduction is 'avg'"),
        ({"accumulate": "bf16"}, "accumulate is 'bf16'"),
        ({"chunk_rows": 0}, "chunk_rows is 0; expected 1 or more"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
        ({"softcap": 0.0}, "softcap is 0.0; expected a positive number"),
        ({"logit_scale": float("nan")}, "logit_scale is nan"),
        ({"token_weights": torch.ones(4)}, r"token_weights is \(4,\)"),
        ({"token_weights": torch.ones(T, requires_grad=True)}, "requires_grad=True; expected"),
        ({"lora": (torch.ones(2, H), torch.ones(V, 3), 1.0)}, r"expected A \(r, 24\) and B \(211, r\)"),
        ({"lora": (torch.ones(2, H), torch.ones(V, 2))}, "lora has 2 entries"),
        ({"lora_input": torch.ones(T, H)}, "lora_input was given without lora"),
    ],
    ids=lambda v: ",".join(v) if isinstance(v, dict) else "",
)
def test_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**bad(**changes))


@pytest.mark.parametrize("wrong", [V, -1, 2**40])
def test_target_outside_the_vocabulary(wrong, device):
    x, w, b, y = inputs(device)
    y[5] = wrong
    with pytest.raises(IndexError, match=rf"target\[5\] is {wrong} .*expected 0 to 210, or -100"):
        linear_cross_entropy(x, w, y, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_where_a_gradient_is_summed(dtype):
    """Never in fp16: the sum over chunks is not yet divided by the number of rows, and would overflow."""
    like = torch.empty(0, dtype=dtype)
    assert sum_dtype(like, lean=False) == torch.float32
    assert sum_dtype(like, lean=True) == (torch.float32 if dtype == torch.float16 else dtype)
