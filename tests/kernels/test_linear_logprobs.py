import pytest
import torch
import torch.nn.functional as F

from liger_triton import LogProbs, linear_head, linear_logprobs, reference

T = 23
H = 24
V = 211
CHUNK = 5
DTYPES = [torch.float32, torch.bfloat16]
FIELDS = LogProbs._fields


def inputs(device, dtype=torch.float32):
    x = torch.randn(T, H)
    w = torch.randn(V, H) / H**0.5
    b = torch.randn(V) * 0.3
    y = torch.randint(0, V, (T,))
    y[::4] = -100
    return *(t.to(device, dtype).requires_grad_() for t in (x, w, b)), y.to(device)


CASES = [
    pytest.param({}, id="plain"),
    pytest.param({"temperature": 0.7, "softcap": 2.0}, id="temperature-softcap"),
    pytest.param({"temperature": 1.8, "logit_scale": 0.5, "label_smoothing": 0.1}, id="temperature-scale-smoothing"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", CASES)
def test_matches_float64(options, dtype, device, row_pass, check_close):
    """Compare values and gradients of log_probs and entropy for random upstream gradients."""
    x, w, b, y = inputs(device, dtype)
    options = options | {"outputs": ("log_probs", "entropy")}
    check_close(
        lambda x, w, b: tuple(linear_logprobs(x, w, y, b, chunk_rows=CHUNK, **options)[:2]),
        lambda x, w, b: tuple(reference.linear_logprobs(x, w, y, b, **options)[:2]),
        [x, w, b],
    )


@pytest.mark.parametrize("options", CASES)
def test_every_field(options, device, row_pass):
    x, w, b, y = inputs(device)
    with torch.no_grad():  # some targets that are the first largest logit, one that only ties with an earlier one
        z = F.linear(x, w, b)
        y[1], y[2] = z[1].argmax(), z[2].argmax()
        w[150], b[150] = w[20], b[20]
        x[3], y[3] = 3 * w[20] / w[20].norm() ** 2 * 4, 150
        x[5], y[5] = x[3], 20
    got = linear_logprobs(x, w, y, b, outputs=FIELDS, chunk_rows=CHUNK, **options)
    want = reference.linear_logprobs(x.double(), w.double(), y, b.double(), outputs=FIELDS, **options)
    for name, value, ref in zip(FIELDS, got, want, strict=True):
        assert value.shape == y.shape and torch.equal(value[y == -100], torch.zeros_like(value[y == -100])), name
        assert value.dtype == (torch.bool if name == "is_top1" else torch.float32)
        assert value.requires_grad == (name in ("log_probs", "entropy"))
        torch.testing.assert_close(value.double(), ref.double(), rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023
    assert got.is_top1[[1, 2, 3, 5]].tolist() == [True, True, False, True]
    some = linear_logprobs(x, w, y, b, outputs=("mean_logits",))
    assert [v is None for v in some] == [True, True, True, False, True]


def test_fields_equal_trl_s(device, row_pass):
    """TRL's trainers read these fields. TRL's own computation gives the same numbers."""
    kernel = pytest.importorskip("trl.kernels").ChunkedLogProbFunction
    x, w, b, y = inputs(device)
    y = y.clamp(min=0)
    ours = linear_logprobs(x, w, y, b, temperature=0.8, softcap=4.0, logit_scale=1.5, outputs=FIELDS)
    names = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    theirs = kernel.apply(x, w, b, y, 0.8, 64, 4.0, 1.5, names)
    grads = []
    for fields in (ours, theirs):
        grads.append(torch.autograd.grad((fields[0] * torch.arange(T, device=device) - fields[1]).sum(), (x, w, b)))
    for a, c in zip([*ours, *grads[0]], [*theirs, *grads[1]], strict=True):
        assert a.dtype == c.dtype
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-5)


def test_label_smoothing_is_the_trainers(device):
    """The mean of -log_probs is transformers' LabelSmoother: (1 - e) * nll + e * mean_v(-log p_v)."""
    x, w, b, y = inputs(device)
    log_p = F.linear(x, w, b).double().log_softmax(-1)
    kept = y != -100
    nll = -log_p[kept, y[kept]].mean()
    want = 0.9 * nll + 0.1 * -log_p[kept].mean()
    got = -linear_logprobs(x, w, y, b, label_smoothing=0.1).log_probs.sum() / kept.sum()
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_uniform_grad(dtype, device, row_pass, check_close):
    """The promise is kept: a sum times any number. Ignored rows may get any gradient."""
    x, w, b, y = inputs(device, dtype)
    factor = torch.where(y == -100, torch.arange(T, device=device), -0.37)
    check_close(
        lambda x, w, b: (linear_logprobs(x, w, y, b, uniform_grad=True, chunk_rows=CHUNK)[0] * factor).sum(),
        lambda x, w, b: (reference.linear_logprobs(x, w, y, b)[0] * factor).sum(),
        [x, w, b],
    )


def test_broken_promise_is_never_silently_wrong(device, row_pass):
    x, w, b, y = inputs(device)
    uneven = torch.ones(T, device=device)
    uneven[6] = 1.0001
    (linear_logprobs(x, w, y, b, uniform_grad=True).log_probs * uneven).sum().backward()
    assert x.grad[y != -100].isnan().all() and w.grad.isnan().all() and b.grad.isnan().all()

    out = linear_logprobs(x, w, y, b, uniform_grad=True, outputs=("log_probs", "entropy"))
    with pytest.raises(RuntimeError, match="The entropy received a gradient, but uniform_grad=True"):
        (out.log_probs.sum() + out.entropy.sum()).backward()

    out = linear_logprobs(x, w, y, b, uniform_grad=True)
    out.log_probs.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.log_probs.sum().backward()


def test_broken_promise_when_compiled(device):
    x, w, b, y = inputs(device)

    def f(x, w, b, k):
        out = linear_logprobs(x, w, y, b, uniform_grad=True, outputs=("log_probs", "entropy"))
        return out.log_probs.sum() + k * out.entropy.sum()

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for k, broken in ((torch.zeros((), device=device), False), (torch.ones((), device=device), True)):
        grads = torch.autograd.grad(compiled(x, w, b, k), (x, w, b))
        assert all(g.isnan().any().item() == broken for g in grads)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("field", ["log_probs", "entropy"])
def test_lora(field, frozen, device, row_pass, check_close):
    """Adapters train, or only the hidden states, with uneven upstream gradients."""
    x, w, b, y = inputs(device)
    w, b = w.detach(), b.detach()
    a = (torch.randn(3, H, device=device) / H**0.5).requires_grad_(not frozen)
    lb = (torch.randn(V, 3, device=device) / 2).requires_grad_(not frozen)

    def call(fn):
        return lambda x, w, b, a, lb: getattr(fn(x, w, y, b, lora=(a, lb, 0.7), outputs=("log_probs", field)), field)

    check_close(call(linear_logprobs), call(reference.linear_logprobs), [x, w, b, a, lb])


def test_products(device, allocations):
    """A chunk takes 4 products, 3 with the promise or if it is last, 2 with a frozen weight, 1 without gradients."""
    x, w, _, y = inputs(device)

    def count(*args, chunk_rows=T, **options):
        with allocations() as seen:
            out = linear_logprobs(*args, chunk_rows=chunk_rows, **options)
            if out.log_probs.requires_grad:
                out.log_probs.sum().backward()
        return seen.products

    y = y.clamp(min=0)
    assert count(x, w, y) == 3
    assert count(x, w, y, chunk_rows=CHUNK) == 4 * 5 - 1
    assert count(x, w, y, uniform_grad=True) == 3
    assert count(x, w, y, uniform_grad=True, chunk_rows=CHUNK) == 3 * 5
    assert count(x, w.detach(), y) == 2
    assert count(x, w.detach(), y, outputs=("log_probs", "entropy"), chunk_rows=CHUNK) == 3 * 5 - 1
    assert count(x.detach(), w.detach(), y) == 1


def test_all_rows_ignored(device, row_pass):
    x, w, b, y = inputs(device)
    for uniform in (False, True):
        out = linear_logprobs(x, w, torch.full_like(y, -100), b, outputs=FIELDS, uniform_grad=uniform)
        assert all(torch.equal(v, torch.zeros_like(v)) for v in out)
        for g in torch.autograd.grad(out.log_probs.sum(), (x, w, b)):
            assert torch.equal(g, torch.zeros_like(g))


def test_leading_dimensions(device, check_close):
    x, w, b, y = inputs(device)
    x = x.detach()[:22].view(2, 11, H).requires_grad_()
    y = y[:22].view(2, 11)
    out = check_close(
        lambda x, w: linear_logprobs(x, w, y).log_probs,
        lambda x, w: reference.linear_logprobs(x, w, y).log_probs,
        [x, w],
    )
    assert out[0].shape == (2, 11)
    found = linear_logprobs(x, w, y, outputs=("log_probs", "entropy"))
    assert not found.log_probs._is_view() and not found.entropy._is_view()  # a write into a view drops FSDP2's gather


@pytest.mark.parametrize("uniform", [False, True])
def test_compile(uniform, device, check_compiled):
    x, w, b, y = inputs(device)
    outputs = ("log_probs",) if uniform else ("log_probs", "entropy")

    def f(x, w, b):
        out = linear_logprobs(x, w, y, b, outputs=(*outputs, "is_top1"), uniform_grad=uniform, chunk_rows=CHUNK)
        return out.log_probs.sum() if uniform else (out.log_probs, out.entropy)

    check_compiled(f, [x, w, b])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"outputs": ("log_probs", "entropie")}, "outputs has 'entropie'; expected names out of log_probs, entropy,"),
        ({"outputs": "entropy"}, r"outputs is the string 'entropy'; expected a tuple of names: \('entropy',\)"),
        ({"temperature": 0.0}, "temperature is 0.0; expected a positive number"),
        ({"softcap": -2.0}, "softcap is -2.0"),
        ({"chunk_rows": -3}, "chunk_rows is -3"),
        ({"accumulate": "half"}, "accumulate is 'half'"),
    ],
)
def test_errors(options, message):
    x, w, b, y = inputs("cpu")
    with pytest.raises(ValueError, match=message):
        linear_logprobs(x, w, y, b, **options)


@pytest.mark.parametrize("all_count", [False, True], ids=["some", "all"])
def test_targets_that_the_host_knows_are_not_read_from_the_device(all_count, device, row_pass, monkeypatch):
    """Values and gradients are bit-equal. Another number of targets raises."""
    x, w, b, y = inputs(device)
    y = y.abs() if all_count else y
    host = y.cpu().clone()
    looked_at = []
    check = linear_head.check_target_range
    monkeypatch.setattr(linear_head, "check_target_range", lambda t, *rest: looked_at.append(t) or check(t, *rest))

    def run():
        for t in (x, w, b):
            t.grad = None
        found = linear_logprobs(x, w, y, b, outputs=("log_probs", "entropy"), chunk_rows=CHUNK)
        found.log_probs.sum().backward()
        return [found.log_probs, found.entropy, x.grad, w.grad, b.grad]

    wanted = run()
    with linear_head.targets_on_host(host):
        got = run()
    assert all(torch.equal(g, t) for g, t in zip(got, wanted, strict=True))
    assert all(t.data_ptr() == y.data_ptr() for t in looked_at[: len(looked_at) // 2])
    assert all(t.data_ptr() == host.data_ptr() for t in looked_at[len(looked_at) // 2 :])

    with (
        linear_head.targets_on_host(host[1:]),
        pytest.raises(ValueError, match=f"{T - 1} targets, but the head has {T}"),
    ):
        run()
    host[2] = V
    with linear_head.targets_on_host(host), pytest.raises(IndexError, match=rf"target\[2\] is {V}"):
        run()
