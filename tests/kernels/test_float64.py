"""Every operation computes in float64 on any device, as `gradcheck` and float64 models need."""

import pytest
import torch
import torch.nn.functional as F

import liger_triton as lt

T = 7
H = 6
V = 11
K = 3
F64 = torch.float64


def randn(*shape, grad=True, dtype=F64):
    return torch.randn(*shape, dtype=F64).to(dtype).requires_grad_(grad)


def targets(*shape):
    y = torch.randint(0, V, shape)
    y.view(-1)[::3] = -100
    return y


def head_logits(x, w, b=None, lora_a=None, lora_b=None):
    z = F.linear(x, w, b)
    return z if lora_a is None else z + 0.5 * F.linear(F.linear(x, lora_a), lora_b)


def capped(z, softcap=3.0, scale=0.7):
    return softcap * torch.tanh(scale * z / softcap)


def rms(x, w):
    return F.rms_norm(x, x.shape[-1:], w, 1e-6)


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)


def convolved(x, w, b):
    """Rows of 4 and of 3 tokens."""
    done = []
    for row in (x[:4], x[4:]):
        y = F.conv1d(row.t()[None], w[:, None], b, padding=w.shape[1] - 1, groups=len(w))
        done.append(y[0, :, : len(row)].t())
    return F.silu(torch.cat(done))


def angles():
    angle = torch.randn(2, 5, 4, dtype=F64).repeat(1, 1, 2)
    return angle.cos(), angle.sin()


def row_kl(log_a, log_b):
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def cases():
    """Return {name: (ours, plain PyTorch, inputs)}. Results without a derivative have no gradient in either."""
    torch.manual_seed(0)
    found = {}
    x = randn(T, H)
    w = randn(H)
    b = randn(H)
    for cast in ("llama", "gemma", "none"):
        found[f"rms_norm-{cast}"] = (
            lambda x, w, cast=cast: lt.rms_norm(x, w, 1e-6, offset=1.0, cast=cast),
            lambda x, w: rms(x, w + 1),
            [x, w],
        )
    found["add_rms_norm"] = (
        lambda x, r, w: lt.add_rms_norm(x, r, w, 1e-6),
        lambda x, r, w: (rms(x + r, w), x + r),
        [x, randn(T, H), w],
    )
    found["layer_norm"] = (
        lambda x, w, b: lt.layer_norm(x, w, b, 1e-6),
        lambda x, w, b: F.layer_norm(x, (H,), w, b, 1e-6),
        [x, w, b],
    )
    rows = torch.tensor([0, 4, T], dtype=torch.int32)
    found["short_conv"] = (
        lambda x, w, b: lt.short_conv(x, w, b, cu_seqlens=rows, activation="silu"),
        convolved,
        [x, randn(H, 4), b],
    )
    found["short_conv-split"] = (
        lambda x, w, b: lt.short_conv(x, w, b, cu_seqlens=rows, activation="silu", split=(1, 2, H - 3)),
        lambda x, w, b: convolved(x, w, b).split((1, 2, H - 3), 1),
        [x, randn(H, 4), b],
    )
    gates = [x, randn(T, H)]
    found["swiglu"] = lt.swiglu, lambda g, u: F.silu(g) * u, gates
    found["swiglu-reuse"] = lambda g, u: lt.swiglu(g, u, reuse_inputs=True), lambda g, u: F.silu(g) * u, gates
    for kind in ("tanh", "none"):
        found[f"geglu-{kind}"] = (
            lambda g, u, kind=kind: lt.geglu(g, u, approximate=kind),
            lambda g, u, kind=kind: F.gelu(g, approximate=kind) * u,
            gates,
        )
    cos, sin = angles()
    found["rope"] = (
        lambda q, k: lt.rope(q, k, cos, sin),
        lambda q, k: (rotated(q, cos, sin), rotated(k, cos, sin)),
        [randn(2, 3, 5, 8), randn(2, 1, 5, 8)],
    )

    y = targets(T)
    for reduction in ("mean", "sum", "none"):
        found[f"cross_entropy-{reduction}"] = (
            lambda z, r=reduction: lt.cross_entropy(
                z * 1.0, y, reduction=r, label_smoothing=0.1, softcap=3.0, logit_scale=0.7
            ),
            lambda z, r=reduction: F.cross_entropy(capped(z), y, reduction=r, label_smoothing=0.1),
            [randn(T, V)],
        )
        found[f"linear_cross_entropy-{reduction}"] = (
            lambda x, w, b, a, c, r=reduction: lt.linear_cross_entropy(
                x, w, y, b, reduction=r, label_smoothing=0.1, softcap=3.0, logit_scale=0.7, lora=(a, c, 0.5)
            ),
            lambda *head, r=reduction: F.cross_entropy(capped(head_logits(*head)), y, reduction=r, label_smoothing=0.1),
            [randn(T, H), randn(V, H), randn(V), randn(2, H), randn(V, 2)],
        )
    share = torch.rand(T, dtype=F64)
    for dtype in (torch.float32, F64):
        found[f"linear_cross_entropy-weights-{dtype}"] = (
            lambda x, w, dtype=dtype: lt.linear_cross_entropy(x, w, y, z_loss=0.1, token_weights=share.to(dtype)),
            lambda x, w, dtype=dtype: weighted(head_logits(x, w), y, share.to(dtype).double()),
            [randn(T, H), randn(V, H)],
        )

    def logprobs(x, w, b):
        found = lt.linear_logprobs(x, w, y, b, temperature=0.9, outputs=lt.LogProbs._fields)
        return tuple(found)

    found["linear_logprobs"] = logprobs, plain_logprobs(y), [randn(T, H), randn(V, H), randn(V)]
    found["linear_token_ranks"] = (
        lambda x, w, b: tuple(lt.linear_token_ranks(x, w, y, b, softcap=3.0, logit_scale=0.7)),
        lambda x, w, b: plain_ranks(capped(head_logits(x, w, b)), y),
        [randn(T, H), randn(V, H), randn(V)],
    )
    found["token_ranks"] = lambda z: tuple(lt.token_ranks(z, y)), lambda z: plain_ranks(z, y), [randn(T, V)]

    teacher = [randn(T, 4, grad=False), randn(V, 4, grad=False)]
    kept = y != -100
    for beta in (0.0, 0.3, 1.0):
        found[f"linear_divergence-{beta}"] = (
            lambda x, w, beta=beta: tuple(lt.linear_divergence(x, w, *teacher, beta=beta, mask=kept)),
            lambda x, w, beta=beta: plain_divergence(x, w, *teacher, beta, kept),
            [randn(T, H), randn(V, H)],
        )
    ys, per_row = targets(K, T), torch.rand(K, T, dtype=F64)
    untied = [randn(T, H) for _ in range(K)] + [randn(V, H) for _ in range(K)]
    for name, inputs in (("tied", [randn(K, T, H), randn(V, H)]), ("untied", untied)):

        def split(tensors):
            return tensors if len(tensors) == 2 else (list(tensors[:K]), list(tensors[K:]))

        found[f"linear_heads_cross_entropy-{name}"] = (
            lambda *t, split=split: tuple(lt.linear_heads_cross_entropy(*split(t), ys, row_weight=per_row)),
            lambda *t, split=split: plain_heads(
                *split(t),
                per_row,
                lambda k, z: (F.cross_entropy(z, ys[k], reduction="none"), z.argmax(-1) == ys[k]),
                ys != -100,
            ),
            inputs,
        )
        found[f"linear_heads_kl-{name}"] = (
            lambda *t, split=split: tuple(lt.linear_heads_kl(*split(t), *teacher, ys != -100, row_weight=per_row)),
            lambda *t, split=split: plain_heads_kl(*split(t), *teacher, ys != -100, per_row),
            inputs,
        )
    return found


def weighted(z, y, share):
    rows = F.cross_entropy(z, y, reduction="none") + 0.1 * z.logsumexp(-1).square()
    return (rows * share)[y != -100].sum() / share[y != -100].sum()


def plain_logprobs(y):
    def run(x, w, b):
        z = head_logits(x, w, b) / 0.9
        log_p = z.log_softmax(-1)
        p, ignored = log_p.exp(), y == -100
        found = (
            log_p.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1),
            -(p * log_p).sum(-1),
            p.detach().square().sum(-1).log(),
            z.detach().mean(-1),
            z.argmax(-1) == y,
        )
        return tuple(t.masked_fill(ignored, 0) for t in found)

    return run


def plain_ranks(z, y):
    own = z.gather(-1, y.clamp(min=0).unsqueeze(-1))
    found = z.argmax(-1), z.log_softmax(-1).gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1), (z > own).sum(-1)
    return tuple(t.detach().masked_fill(y == -100, -100) for t in found)


def plain_divergence(x, w, teacher_x, teacher_w, beta, kept):
    log_p = F.linear(x, w).log_softmax(-1)
    log_q = F.linear(teacher_x, teacher_w).log_softmax(-1)
    if beta in (0.0, 1.0):
        found = row_kl(log_p, log_q) if beta else row_kl(log_q, log_p)
    else:
        log_m = ((1 - beta) * log_p.exp() + beta * log_q.exp()).log()
        found = beta * row_kl(log_q, log_m) + (1 - beta) * row_kl(log_p, log_m)
    return found.masked_fill(~kept, 0), -(log_p.exp() * log_p).sum(-1).detach().masked_fill(~kept, 0)


def plain_heads(hidden, weight, row_weight, rows, counted):
    weights = weight if isinstance(weight, list) else [weight] * K
    per_head = [rows(k, F.linear(hidden[k], weights[k])) for k in range(K)]
    loss = torch.stack([head[0] for head in per_head])
    top1 = torch.stack([head[1] for head in per_head])
    loss = torch.where(counted, loss, 0.0)
    return (loss * row_weight).sum(), loss.detach().sum(1), (top1 & counted).sum(1), counted.sum(1)


def plain_heads_kl(hidden, weight, teacher_x, teacher_w, valid, row_weight):
    log_q = F.linear(teacher_x, teacher_w).log_softmax(-1)
    ahead = [torch.cat((log_q[k + 1 :], log_q[: k + 1])) for k in range(K)]
    ahead_of = torch.arange(1, K + 1, device=valid.device).unsqueeze(1)
    row = torch.arange(T, device=valid.device)
    counted = valid & (row + ahead_of < T)

    def rows(k, z):
        return row_kl(ahead[k], z.log_softmax(-1)), z.argmax(-1) == ahead[k].argmax(-1)

    return plain_heads(hidden, weight, row_weight, rows, counted)


NAMES = list(cases())


@pytest.fixture
def case(device):
    """Return (ours, the same in plain PyTorch, inputs) of a name, on the device."""

    def found(name):
        with torch.device(device):
            return cases()[name]

    return found


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", NAMES)
def test_is_plain_pytorch(name, autocast, case, device):
    """Values and gradients agree, also inside autocast: it leaves float64 alone."""
    ours, plain, inputs = case(name)
    results = []
    for function in (ours, plain):
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
        with torch.autocast(device, enabled=autocast):
            out = function(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        differentiable = [t for t in out if t.requires_grad]
        torch.manual_seed(1)
        if differentiable:
            torch.autograd.backward(differentiable, [torch.randn_like(t) for t in differentiable])
        results.append([*out, *(t.grad for t in leaves)])
    for got, want in zip(*results, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in NAMES if "ranks" not in name])
def test_gradcheck(name, case):
    """Check only differentiable inputs: `row_weight` and such are constants."""
    ours, _, inputs = case(name)

    def differentiable(*leaves):
        out = ours(*leaves)
        return tuple(t for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad)

    assert torch.autograd.gradcheck(differentiable, inputs)


@pytest.mark.parametrize("name", NAMES)
def test_compiles(name, case):
    ours, _, inputs = case(name)
    if "ranks" in name:
        pytest.skip("drops rows, and no trace knows how many; it is not for training")
    torch._dynamo.reset()
    got = torch.compile(ours, fullgraph=True, backend="eager")(*inputs)
    want = ours(*inputs)
    got, want = (t if isinstance(t, tuple) else (t,) for t in (got, want))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


F32 = torch.float32
X = torch.ones(T, H, dtype=F64)
W = torch.ones(V, H, dtype=F64)
X32 = torch.ones(T, H)
W32 = torch.ones(V, H)
Y = torch.zeros(T, dtype=torch.long)
TEACHER = torch.ones(T, 4, dtype=F64), torch.ones(V, 4, dtype=F64)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: lt.linear_cross_entropy(X, W32, Y), "hidden is torch.float64, weight torch.float32; expected one"),
        (lambda: lt.linear_cross_entropy(X32, W, Y), "hidden is torch.float32, weight torch.float64; expected one"),
        (lambda: lt.linear_cross_entropy(X, W, Y, torch.ones(V)), "hidden is torch.float64, bias torch.float32"),
        (lambda: lt.linear_cross_entropy(X32, W32, Y, token_weights=torch.ones(T, dtype=F64)), "token_weights is"),
        (
            lambda: lt.linear_cross_entropy(X32, W32, Y, lora=(W[:2], W[:, :2], 1.0)),
            "lora A is torch.float64, hidden torch.float32; expected bfloat16, float16, float32",
        ),
        (lambda: lt.linear_logprobs(X, W32, Y), "hidden is torch.float64, weight torch.float32"),
        (lambda: lt.linear_token_ranks(X, W32, Y), "hidden is torch.float64, weight torch.float32"),
        (lambda: lt.linear_token_ranks(X32, W, Y), "hidden is torch.float32, weight torch.float64"),
        (lambda: lt.linear_divergence(X, W32, *TEACHER, beta=0.5), "hidden is torch.float64, weight torch.float32"),
        (lambda: lt.linear_divergence(X, W, TEACHER[0].float(), TEACHER[1], beta=0.5), "Of the teacher's head: hidden"),
        (lambda: lt.linear_heads_cross_entropy(X[None], W32, Y[None]), "hidden is torch.float64, weight torch.float32"),
        (
            lambda: lt.linear_heads_cross_entropy([X, X32], [W, W], Y.expand(2, T)),
            r"hidden\[1\] is \(7, 6\) torch.float32 on cpu, hidden\[0\] \(7, 6\) torch.float64",
        ),
        (lambda: lt.linear_heads_kl(X32[None], W32, *TEACHER, Y[None] == 0), "hidden is torch.float32, teacher_hidden"),
        (lambda: lt.swiglu(X, X32), "up is .* torch.float32"),
        (lambda: lt.geglu(X32, X), "up is .* torch.float64"),
    ],
)
def test_mixed_with_another_dtype(call, message, autocast):
    with pytest.raises(ValueError, match=message), torch.autocast("cpu", enabled=autocast):
        call()


def test_a_norm_of_two_dtypes_is_computed_in_the_wider(device):
    """PyTorch promotes the dtypes: float64 in x or the weight is never rounded to fp32."""
    x = torch.randn(T, H, dtype=F64, device=device)
    w = torch.randn(H, dtype=F64, device=device)
    for x_dtype, w_dtype in ((F64, F32), (F32, F64)):
        a, b = x.to(x_dtype), w.to(w_dtype)
        torch.testing.assert_close(
            lt.rms_norm(a, b, 1e-6, cast="none"), rms(a.double(), b.double()), rtol=1e-12, atol=0
        )
    got = lt.layer_norm(x, w.float(), w.float(), 1e-6)
    want = F.layer_norm(x, (H,), w.float().double(), w.float().double(), 1e-6)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "call",
    [
        lambda y: lt.cross_entropy(torch.ones(T, V, dtype=F64, device=y.device), y),
        lambda y: lt.linear_cross_entropy(X.to(y.device), W.to(y.device), y),
        lambda y: lt.linear_logprobs(X.to(y.device), W.to(y.device), y),
        lambda y: lt.linear_heads_cross_entropy(X[None].to(y.device), W.to(y.device), y[None]),
    ],
)
def test_target_outside_the_vocabulary(call, device):
    y = Y.to(device, copy=True)
    y[3] = V
    with pytest.raises(IndexError, match=rf"target\[3\] is {V} "):
        call(y)


def test_no_rows_and_no_row_that_counts(device):
    for rows, y in ((0, Y[:0]), (T, torch.full_like(Y, -100))):
        x = torch.randn(rows, H, dtype=F64, device=device, requires_grad=True)
        w, y = W.to(device, copy=True).requires_grad_(), y.to(device)
        total = lt.linear_cross_entropy(x, w, y) + lt.linear_logprobs(x, w, y).log_probs.sum()
        total = total + lt.cross_entropy(F.linear(x, w), y) + lt.linear_heads_cross_entropy(x[None], w, y[None]).loss
        total = total + lt.linear_divergence(x, w, x.detach(), w.detach(), beta=0.5, mask=y != -100).divergence.sum()
        total = total + lt.linear_heads_kl(x[None], w, x.detach(), w.detach(), (y != -100)[None]).loss
        total.backward()
        assert total.item() == 0.0 and not x.grad.any() and not w.grad.any()


def test_words_without_probability(device):
    """Logits of -inf, from a bias that masks words, give no NaN and the values of the remaining words."""
    x = torch.randn(T, H, dtype=F64, device=device)
    w = torch.randn(V, H, dtype=F64, device=device)
    x.requires_grad_()
    bias = torch.zeros(V, dtype=F64, device=device)
    bias[V - 2 :] = -torch.inf
    y = Y.to(device)
    for b, weight in ((bias, w), (None, w[: V - 2])):
        found = lt.linear_logprobs(x, weight, y, b, outputs=("log_probs", "entropy"))
        (grad,) = torch.autograd.grad(found.log_probs.sum() + found.entropy.sum(), x)
        if b is bias:
            masked = [*found[:2], grad]
    for got, want in zip(masked, [*found[:2], grad], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
