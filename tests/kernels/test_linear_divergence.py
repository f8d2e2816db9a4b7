import pytest
import torch
import torch.nn.functional as F

from liger_triton import linear_divergence, reference

# the teacher is wider; no size is a power of two, the last chunk is partial
T = 23
HS = 24
HT = 40
V = 211
CHUNK = 5
DTYPES = [torch.float32, torch.bfloat16]
BETAS = [0.0, 0.3, 1.0]


def inputs(device, dtype=torch.float32):
    """Return hidden, weight and bias of the student (with gradients) and of the teacher, and a mask."""
    student = torch.randn(T, HS), torch.randn(V, HS) / HS**0.5, torch.randn(V) * 0.3
    teacher = torch.randn(T, HT), torch.randn(V, HT) / HT**0.5, torch.randn(V) * 0.3
    mask = torch.ones(T, dtype=torch.bool)
    mask[::4] = False
    return (
        *(t.to(device, dtype).requires_grad_() for t in student),
        *(t.to(device, dtype) for t in teacher),
        mask.to(device),
    )


def call(function, **options):
    """Wrap `function` for `check_close`: value and entropy of tensors in the order of `inputs`."""

    def run(x, w, b, xt, wt, bt):
        out = function(x, w, xt, wt, b, bt, **options)
        return out.divergence

    return run


OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"temperature": 0.7, "softcap": 2.0, "teacher_logit_scale": 0.5}, id="softcap"),
    pytest.param({"temperature": 1.8, "logit_scale": 0.5, "teacher_softcap": 3.0}, id="scale"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("beta", BETAS)
def test_matches_float64(beta, options, dtype, device, check_close):
    """Upstream gradients are arbitrary: backward walks again."""
    *tensors, mask = inputs(device, dtype)
    options = options | {"beta": beta, "mask": mask}
    check_close(
        call(linear_divergence, chunk_rows=CHUNK, **options), call(reference.linear_divergence, **options), tensors
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_uniform_grad(beta, dtype, device, check_close):
    """Gradients come with the values. Rows that do not count may get any gradient."""
    *tensors, mask = inputs(device, dtype)
    factor = torch.where(mask, -0.37, torch.arange(T, device=device))

    def objective(function, **options):
        divergence = call(function, beta=beta, mask=mask, **options)
        return lambda *t: (divergence(*t) * factor).sum() * 3.7 + t[0].square().sum()

    check_close(
        objective(linear_divergence, uniform_grad=True, chunk_rows=CHUNK),
        objective(reference.linear_divergence),
        tensors,
    )


@pytest.mark.parametrize("beta", BETAS)
def test_frozen_head_with_lora(beta, device, check_close):
    """Student and teacher have fp32 adapters on bf16 heads. Upstream gradients differ by row."""
    x, w, _, xt, wt, _, mask = inputs(device, torch.bfloat16)
    w.requires_grad_(False)
    a = torch.randn(3, HS, device=device) / HS**0.5
    lb = torch.randn(V, 3, device=device) / 2
    at = torch.randn(2, HT, device=device) / HT**0.5
    lbt = torch.randn(V, 2, device=device) / 2
    dropped = (x.detach() * (torch.rand(T, HS, device=device) > 0.2)).requires_grad_()

    def objective(function):
        def f(x, w, a, lb, d, xt, wt, at, lbt):
            options = {"lora": (a, lb, 0.7), "lora_input": d, "teacher_lora": (at, lbt, 1.3)}
            return function(x, w, xt, wt, beta=beta, mask=mask, **options).divergence

        return f

    for trained in (True, False):
        a.requires_grad_(trained), lb.requires_grad_(trained)
        check_close(
            objective(linear_divergence),
            objective(reference.linear_divergence),
            [x, w, a, lb, dropped, xt, wt, at, lbt],
        )


@pytest.mark.parametrize("beta", BETAS)
def test_entropy(beta, device):
    x, w, b, xt, wt, bt, mask = inputs(device)
    got = linear_divergence(x, w, xt, wt, b, bt, beta=beta, temperature=0.8, mask=mask, chunk_rows=CHUNK).entropy
    z = F.linear(x, w, b).double() / 0.8
    want = torch.distributions.Categorical(logits=z).entropy()
    torch.testing.assert_close(got.double(), torch.where(mask, want, 0.0), rtol=1e-5, atol=0)
    assert not got.requires_grad


def test_the_ends_are_kl_divergences(device):
    """F.kl_div(log q, p) is KL(p || q): its arguments are swapped."""
    x, w, b, xt, wt, bt, _ = inputs(device)
    log_p = F.linear(x, w, b).log_softmax(-1)
    log_q = F.linear(xt, wt, bt).log_softmax(-1)
    ends = {0.0: (log_p, log_q.exp()), 1.0: (log_q, log_p.exp())}
    for beta, (log_of, other) in ends.items():
        want = F.kl_div(log_of, other, reduction="none")
        got = linear_divergence(x, w, xt, wt, b, bt, beta=beta).divergence
        torch.testing.assert_close(got, want.sum(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_is_trl_s(beta, device):
    """TRL's kernel has the same definitions, gradients and entropy."""
    kernel = pytest.importorskip("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    x, w, b, xt, wt, bt, _ = inputs(device)
    ours = linear_divergence(
        x, w, xt, wt, b, bt, beta=beta, temperature=0.8, logit_scale=1.5, softcap=4.0, teacher_logit_scale=0.7
    )
    theirs = kernel.apply(x, w, b, xt, wt, bt, beta, 0.8, 1.5, 4.0, 0.7, None)
    upstream = torch.randn(T, device=device)
    for a, c in zip(
        [*ours, *torch.autograd.grad(ours[0] @ upstream, (x, w, b))],
        [*theirs, *torch.autograd.grad(theirs[0] @ upstream, (x, w, b))],
        strict=True,
    ):
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("beta", BETAS)
def test_equal_heads(beta, device):
    """If the student is the teacher, divergence and gradient are zero up to rounding."""
    x, w, b, *_ = inputs(device)
    divergence = linear_divergence(x, w, x.detach(), w.detach(), b, b.detach(), beta=beta).divergence
    assert divergence.abs().max() < 1e-6
    assert all(g.abs().max() < 1e-5 for g in torch.autograd.grad(divergence.sum(), (x, w, b)))


@pytest.mark.parametrize("beta", BETAS)
def test_confident_heads(beta, device, check_close):
    """Softmax is near 1 for different tokens, as at the start of training: p of the teacher's choice is tiny."""
    *tensors, _ = inputs(device)
    for k in (1, 4):
        tensors[k] = (tensors[k].detach() * 12).requires_grad_(k == 1)
    check_close(call(linear_divergence, beta=beta), call(reference.linear_divergence, beta=beta), tensors)


def test_products(device, allocations):
    """A chunk takes four products with the promise, six without, three with a frozen head, two without gradients."""
    x, w, _, xt, wt, _, _ = inputs(device)

    def count(x, w, **options):
        with allocations() as seen:
            out = linear_divergence(x, w, xt, wt, beta=0.5, chunk_rows=T, **options).divergence
            if out.requires_grad:
                out.sum().backward()
        return seen.products

    assert count(x, w, uniform_grad=True) == 4
    assert count(x, w) == 6
    assert count(x, w.detach()) == 3
    assert count(x.detach(), w.detach()) == 2


@pytest.mark.parametrize("uniform", [True, False])
def test_logits_live_for_a_chunk(uniform, device, allocations):
    x, w, b, xt, wt, bt, mask = inputs(device)
    with allocations() as seen:
        out = linear_divergence(x, w, xt, wt, b, bt, beta=0.5, mask=mask, uniform_grad=uniform, chunk_rows=CHUNK)
        out.divergence.sum().backward()
    assert max(seen.sizes) == max(CHUNK * V, V * HS)


@pytest.mark.parametrize("uniform", [True, False])
def test_no_row_counts(uniform, device):
    x, w, b, xt, wt, bt, mask = inputs(device)
    for rows in (slice(None), slice(0, 0)):
        out = linear_divergence(
            x[rows], w, xt[rows], wt, b, bt, beta=0.5, mask=torch.zeros_like(mask)[rows], uniform_grad=uniform
        )
        assert all(torch.equal(v, torch.zeros_like(v)) for v in out)
        for g in torch.autograd.grad(out.divergence.sum(), (x, w, b)):
            assert torch.equal(g, torch.zeros_like(g))


def test_nan_reaches_the_divergence(device):
    x, w, b, xt, wt, bt, mask = inputs(device)
    xt[1, 3] = torch.nan
    divergence = linear_divergence(x, w, xt, wt, b, bt, beta=0.5, mask=mask).divergence
    assert divergence.isnan().nonzero().flatten().tolist() == [1]


def test_broken_promise_is_never_silently_wrong(device):
    x, w, b, xt, wt, bt, mask = inputs(device)
    uneven = torch.ones(T, device=device)
    uneven[6] = 1.0001
    out = linear_divergence(x, w, xt, wt, b, bt, beta=0.5, mask=mask, uniform_grad=True)
    (out.divergence * uneven).sum().backward()
    assert x.grad[mask].isnan().all() and w.grad.isnan().all() and b.grad.isnan().all()
    with pytest.raises(RuntimeError, match="second time"):
        out.divergence.sum().backward()


def test_leading_dimensions_and_strides(device, check_close):
    x = torch.randn(3, 8, HS, device=device, requires_grad=True)
    xt = torch.randn(3, 8, HT, device=device)
    w = torch.randn(HS, V, device=device, requires_grad=True)
    wt = torch.randn(HT, V, device=device)
    mask = torch.rand(3, 7, device=device) > 0.3

    def objective(function):
        return lambda x, w, xt, wt: function(x[:, :-1], w.t(), xt[:, 1:], wt.t(), beta=0.4, mask=mask).divergence

    out = check_close(objective(linear_divergence), objective(reference.linear_divergence), [x, w, xt, wt])
    assert out[0].shape == (3, 7)


def test_autocast_and_lean(device):
    x, w, b, xt, wt, bt, mask = inputs(device)
    with torch.autocast(device, torch.bfloat16):
        out = linear_divergence(
            x, w, xt, wt, b, bt, beta=0.0, mask=mask, accumulate="lean", uniform_grad=True
        ).divergence
    grads = torch.autograd.grad(out.sum(), (x, w, b))
    assert out.dtype == torch.float32 and [g.dtype for g in grads] == [torch.float32] * 3
    want = reference.linear_divergence(x, w, xt, wt, b, bt, beta=0.0, mask=mask).divergence
    for got, ref in zip([out, *grads], [want, *torch.autograd.grad(want.sum(), (x, w, b))], strict=True):
        assert (got - ref).norm() < 1e-2 * ref.norm()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"teacher_weight": torch.zeros(V + 1, HT)}, f"vocabulary of {V}, teacher_weight of {V + 1}; a divergence"),
        ({"teacher_hidden": torch.zeros(T - 1, HT)}, rf"hidden is \({T}, {HS}\), teacher_hidden \({T - 1}, {HT}\)"),
        ({"teacher_hidden": torch.zeros(T, HT + 1)}, "Of the teacher's head: hidden is"),
        ({"teacher_bias": torch.zeros(3)}, r"Of the teacher's head: bias is \(3,\)"),
        ({"weight": torch.zeros(V, HS + 2)}, r"weight \(211, 26\)"),
        ({"beta": 1.5}, "beta is 1.5; expected a number from 0"),
        ({"temperature": 0.0}, "temperature is 0.0; expected a positive number"),
        ({"teacher_softcap": -2.0}, "teacher_softcap is -2.0; expected a positive number, or None"),
        ({"mask": torch.zeros(T)}, r"mask is torch.float32 \(23,\); expected torch.bool"),
        ({"chunk_rows": 0}, "chunk_rows is 0"),
    ],
)
def test_errors(change, message):
    x, w, _, xt, wt, _, _ = inputs("cpu")
    arguments = {"hidden": x, "weight": w, "teacher_hidden": xt, "teacher_weight": wt, "beta": 0.5} | change
    with pytest.raises(ValueError, match=message):
        linear_divergence(**arguments)
