import gc

import pytest
import torch

from liger_triton import linear_head, linear_heads_cross_entropy, reference
from liger_triton.linear_head import EVERY_ROW, counted_rows

# no size is a power of two, the last chunk is partial, a row is two blocks of 128
T = 13
H = 24
V = 211
CHUNK = 7
BF16, FP32 = torch.bfloat16, torch.float32


def inputs(device, heads=3, tied=True, dtype=FP32, rows=T):
    """Return hidden (K, T, H), weights and a target: some rows ignored, others each head's first largest logit."""
    x = torch.randn(heads, rows, H).to(device, dtype)
    w = [(torch.randn(V, H) / H**0.5).to(device, dtype) for _ in range(1 if tied else heads)]
    y = torch.randint(0, V, (heads, rows), device=device)
    for k in range(heads):
        y[k, k::3] = torch.nn.functional.linear(x[k], w[0 if tied else k]).argmax(-1)[k::3]
    y[:, ::4] = -100
    return [t.requires_grad_() for t in (x, *w)], y


def loss_of(fn, y, tied=True, **options):
    """Wrap `fn` as a function of the tensors from `inputs` that returns its differentiable result."""
    return lambda x, *w: fn(x, w[0] if tied else w, y, **options).loss


def heads_of(y, tied, **options):
    """Return ours and the reference's, for `check_close`."""
    return loss_of(linear_heads_cross_entropy, y, tied, chunk_rows=CHUNK, **options), loss_of(
        reference.linear_heads_cross_entropy, y, tied, **options
    )


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_matches_float64(dtype, tied, heads, device, row_pass, check_close):
    """The upstream gradient is a random number."""
    tensors, y = inputs(device, heads, tied, dtype)
    weights = torch.rand(heads, T, device=device)
    check_close(*heads_of(y, tied, row_weight=weights, softcap=2.0, logit_scale=0.7), tensors)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_fp16(tied, device, check_close):
    tensors, y = inputs(device, 3, tied, torch.float16)
    check_close(*heads_of(y, tied, row_weight=0.8 ** torch.arange(1, 4, device=device)), tensors)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_sums_of_each_head(tied, device, row_pass):
    """Sums are unweighted and have no gradient. Top-1 counts only the first of the largest logits."""
    (x, *w), y = inputs(device, 3, tied)
    with torch.no_grad():
        w[0][150] = w[0][20]
        x[0, 1] = x[0, 2] = 3 * w[0][20] / w[0][20].norm() ** 2 * 4
        y[0, 1], y[0, 2] = 150, 20
    weight = w[0] if tied else w
    got = linear_heads_cross_entropy(x, weight, y, row_weight=torch.rand(3, device=device), chunk_rows=CHUNK)
    want = reference.linear_heads_cross_entropy(x.double(), [t.double() for t in w] * (3 if tied else 1), y)
    torch.testing.assert_close(got.head_losses.double(), want.head_losses, rtol=1e-5, atol=0)
    assert torch.equal(got.head_top1, want.head_top1) and torch.equal(got.head_rows, want.head_rows)
    assert 0 < got.head_top1.min() and (got.head_top1 < got.head_rows).all() and got.head_top1.dtype == torch.int64
    assert not any(t.requires_grad for t in got[1:])
    with torch.no_grad():
        again = linear_heads_cross_entropy(x, weight, y, chunk_rows=CHUNK)
    assert not again.loss.requires_grad and torch.equal(again.head_losses, got.head_losses)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_lists_and_strides(tied, device, check_close):
    """Heads are side by side in memory (T, K, H), a list of slices; the weight is transposed."""
    x = torch.randn(T, 3, H, device=device, requires_grad=True)
    w = [torch.randn(H, V, device=device, requires_grad=True) for _ in range(1 if tied else 3)]
    _, y = inputs(device)
    for layout in (lambda x: x.transpose(0, 1), lambda x: list(x.unbind(1))):
        ours, oracle = heads_of(y, tied)
        check_close(
            lambda x, *w: ours(layout(x), *(t.t() for t in w)),  # noqa: B023
            lambda x, *w: oracle(layout(x), *(t.t() for t in w)),  # noqa: B023
            [x, *w],
        )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_scaled_and_added_to_another_loss(tied, device, check_close):
    tensors, y = inputs(device, 3, tied)

    def objective(f):
        return lambda x, *w: f(x, *w) * 3.7 + x.square().sum() + w[-1].square().mean()

    check_close(*(objective(f) for f in heads_of(y, tied)), tensors)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_ignored_rows(tied, device, row_pass):
    """Values and weights of ignored rows are never read. Heads have no row, one row, or all are empty."""
    (x, *w), y = inputs(device, 3, tied)
    weight, share = w[0] if tied else w, torch.rand(3, T, device=device)
    want = linear_heads_cross_entropy(x, weight, y, row_weight=share)
    with torch.no_grad():
        x[y == -100] = torch.nan
    share[y == -100] = torch.nan
    got = linear_heads_cross_entropy(x, weight, y, row_weight=share)
    got.loss.backward()
    assert torch.equal(got.loss, want.loss) and torch.equal(got.head_losses, want.head_losses)
    assert torch.equal(x.grad[y == -100], torch.zeros_like(x.grad[y == -100])) and x.grad[y != -100].ne(0).any(1).all()
    y[1] = -100
    some = linear_heads_cross_entropy(x, weight, y)
    some.loss.backward()
    assert some.head_losses[1] == 0 and some.head_rows[1] == 0 and some.loss.isfinite() and some.loss > 0
    for x_, y_ in ((x, torch.full_like(y, -100)), (x[:, :0].detach().requires_grad_(), y[:, :0])):
        none = linear_heads_cross_entropy(x_, weight, y_)
        assert none.loss == 0 and not none.head_losses.any() and not none.head_rows.any()
        for g in torch.autograd.grad(none.loss, (x_, *w)):
            assert torch.equal(g, torch.zeros_like(g))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_nan(tied, device, row_pass):
    (x, *w), y = inputs(device, 3, tied)
    with torch.no_grad():
        x[2, 3, 5] = torch.nan
    out = linear_heads_cross_entropy(x, w[0] if tied else w, y)
    out.loss.backward()
    assert out.loss.isnan() and out.head_losses.isnan().tolist() == [False, False, True]
    assert x.grad[2, 3].isnan().all() and x.grad[:2].isfinite().all() and w[-1].grad.isnan().any()


def test_untied_gradients_are_rounded_head_by_head(device):
    """In bf16, no fp32 sum of V * H lives between forward and backward.

    The error is two roundings, less than one for each chunk. For a power of two as upstream gradient it is one
    rounding.
    """
    tensors, y = inputs(device, 2, False, BF16, rows=32)
    x64 = [t.detach().double().requires_grad_() for t in tensors]
    loss_of(reference.linear_heads_cross_entropy, y, False)(*x64).backward()

    def errors(upstream, **options):
        loss = loss_of(linear_heads_cross_entropy, y, False, chunk_rows=1, **options)(*tensors)
        held, nodes = [], [loss.grad_fn]
        for node in nodes:
            held += getattr(node, "held", None) or []
            nodes += [n for n, _ in node.next_functions if n is not None]
        grads = torch.autograd.grad(loss * upstream, tensors[1:])
        want = [t.grad * upstream for t in x64[1:]]
        return [((g - w).norm() / w.norm()).item() for g, w in zip(grads, want, strict=True)], held

    exact, held = errors(0.25)
    assert len(held) == 4 and all(g.dtype == BF16 for g in held)
    rounded, _ = errors(0.3)
    lean, _ = errors(0.3, accumulate="lean")
    for one, two, many in zip(exact, rounded, lean, strict=True):
        assert one < two < 1.5 * one < many and two < 5e-3


def test_fp16_sums_may_exceed_fp16(device):
    """A frequent token with a large hidden state gives 2e5 before the division by the rows, 4000 after it."""
    x = torch.full((2, 50, 1), 6000.0, device=device, dtype=torch.float16)
    w = [torch.zeros(3, 1, device=device, dtype=torch.float16).requires_grad_() for _ in range(2)]
    y = torch.zeros(2, 50, dtype=torch.long, device=device)
    (linear_heads_cross_entropy(x, w, y).loss / 50).backward()
    for t in w:
        torch.testing.assert_close(t.grad.flatten().tolist(), [-4000.0, 2000.0, 2000.0], rtol=1e-3, atol=0)


def test_products_and_memory(device, row_pass, allocations):
    """A chunk takes three products, two with a frozen weight, one without gradients.

    Only one chunk of logits is alive, for any K. A frozen weight has no gradient buffer.
    """

    def count(heads, tied, frozen):
        (x, *w), y = inputs(device, heads, tied, rows=30)
        y = y.clamp(min=0)
        for t in w:
            t.requires_grad_(not frozen)
        with allocations() as seen:
            linear_heads_cross_entropy(x, w[0] if tied else w, y, chunk_rows=6).loss.backward()
        assert frozen == (w[0].grad is None)
        chunk = 6 * (256 if row_pass == "triton" else V)
        assert max(n for n in seen.sizes if n < V * H and n != heads * 30 * H) == chunk
        return seen.products / (5 * heads), sum(n >= V * H for n in seen.sizes)

    assert count(3, True, True) == (2, 0)
    if row_pass == "triton":  # the walk is one for both passes, and the interpreter slow
        return
    assert count(5, True, True) == (2, 0)
    assert count(3, True, False) == count(5, True, False) == (3, 1)
    assert count(3, False, True) == (2, 0)
    assert count(3, False, False) == (3, 3)
    (x, *w), y = inputs(device, rows=30)
    with torch.no_grad(), allocations() as seen:
        linear_heads_cross_entropy(x, w[0], y.clamp(min=0), chunk_rows=6)
    assert seen.products == 15


@pytest.mark.parametrize("accumulate", ["fp32", "lean"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_untied_heads_hold_no_logits(dtype, accumulate, device):
    """Each head fits one chunk, but it does not keep its logits: one backward pass waits for all heads."""
    (x, *w), y = inputs(device, tied=False, dtype=dtype)
    gc.collect()
    loss = linear_heads_cross_entropy(x, w, y, accumulate=accumulate).loss
    held = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape[-1:] in [(V,), (-(-V // 64) * 64,)]]
    assert not [t for t in held if t.numel() >= 9 * V]  # nine rows count
    loss.backward()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_second_backward(dtype, device):
    tensors, y = inputs(device, 3, False, dtype)
    loss = loss_of(linear_heads_cross_entropy, y, False)(*tensors)
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    for got, want in zip(torch.autograd.grad(loss, tensors), first, strict=True):
        assert torch.equal(got, want)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_autocast(device):
    """Heads have fp32 weights under mixed precision: gradients are fp32, untied and tied."""
    for tied in (True, False):
        (x, *w), y = inputs(device, 3, tied)
        want = loss_of(reference.linear_heads_cross_entropy, y, tied)(x.double(), *(t.double() for t in w))
        want = (want, *torch.autograd.grad(want, (x, *w)))
        with torch.autocast(device, BF16):
            got = loss_of(linear_heads_cross_entropy, y, tied)(x, *w)
        got = (got, *torch.autograd.grad(got, (x, *w)))
        for g, t in zip(got, want, strict=True):
            assert g.dtype == FP32 and (g - t).norm() <= 1e-2 * t.norm()


def test_compile(device, check_compiled):
    tensors, y = inputs(device, 2, False)
    ours, _ = heads_of(y, False)
    check_compiled(lambda x, *w: ours(list(x), *w), tensors)


def test_errors():
    (x, w), y = inputs("cpu")
    good = {"hidden": x, "weight": w, "target": y}
    for changes, message in [
        ({"hidden": []}, "hidden is an empty list"),
        ({"hidden": x[0]}, r"hidden is \(13, 24\); expected hidden \(K, T, H\)"),
        ({"hidden": list(x.unsqueeze(1))}, r"hidden\[0\] is \(1, 13, 24\); expected .*Flatten batch and sequence"),
        ({"hidden": [x[0], x[1], x[2, :-1]]}, r"hidden\[2\] is \(12, 24\)"),
        ({"hidden": [x[0], x[1].half(), x[2]]}, r"hidden\[1\] is \(13, 24\) torch.float16"),
        ({"weight": w[:, :-1]}, r"weight is \(211, 23\).*expected \(V, 24\)"),
        ({"weight": [w, w]}, "weight has 2 tensors, hidden 3 heads"),
        ({"weight": [w, w, w[1:]]}, r"weight\[2\] is \(210, 24\), weight\[0\] \(211, 24\)"),
        ({"weight": w.bfloat16()}, "hidden is torch.float32, weight torch.bfloat16"),
        ({"target": y[:2]}, r"target is \(2, 13\); expected \(3, 13\)"),
        ({"target": y.float()}, "target is torch.float32; expected class ids"),
        ({"row_weight": torch.ones(13)}, r"row_weight is \(13,\) torch.float32, .*; expected torch.float32, \(3,\) or"),
        ({"row_weight": torch.ones(3, dtype=torch.float64)}, "row_weight is .* torch.float64"),
        ({"row_weight": torch.ones(3, requires_grad=True)}, "requires_grad=True; expected .* without gradient"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"accumulate": "bf16"}, "accumulate is 'bf16'"),
        ({"chunk_rows": 0}, "chunk_rows is 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            linear_heads_cross_entropy(**(good | changes))
    y[1, 4] = V
    with pytest.raises(IndexError, match=rf"target\[17\] is {V}"):
        linear_heads_cross_entropy(x, w, y)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_rows_of_any_layout(tied, device, row_pass):
    """Targets and row weights are column-major, as from `labels.t()`. Kernels index contiguous rows."""
    (x, *w), y = inputs(device, 3, tied)
    share = torch.rand(3, T, device=device)
    found = []
    for turn in (torch.clone, lambda t: t.t().contiguous().t()):
        loss = linear_heads_cross_entropy(
            x, w[0] if tied else w, turn(y), row_weight=turn(share), chunk_rows=CHUNK
        ).loss
        found.append((loss, *torch.autograd.grad(loss, (x, *w))))
    for got, want in zip(found[1], found[0], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("size", [1e-6, 1e5])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_fp16_takes_weights_of_any_size(tied, size, device, row_pass):
    """With a loss scale, gradients equal float64 up to fp16 rounding."""
    tensors, y = inputs(device, 3, tied, torch.float16)
    share, scale = size * (0.5 + torch.rand(3, T, device=device)), 1.0 / (size * T)
    (x, *w) = tensors
    loss = linear_heads_cross_entropy(x, w[0] if tied else w, y, row_weight=share, chunk_rows=CHUNK).loss
    got = torch.autograd.grad(loss * scale, tensors)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    want = torch.autograd.grad(
        loss_of(reference.linear_heads_cross_entropy, y, tied, row_weight=share)(*wide) * scale, wide
    )
    for g, ref in zip(got, want, strict=True):
        assert (g.double() - ref).norm() <= 2e-3 * ref.norm()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_rows_that_are_known_to_count(dtype, device, monkeypatch):
    """Loss and gradients equal a call with all rows. Each row is checked once for all heads."""
    (x, w), y = inputs(device, dtype=dtype)
    want = linear_heads_cross_entropy(x, w, y, chunk_rows=CHUNK)
    want_dx = torch.autograd.grad(want.loss, x)[0]
    checks, own = [], linear_head.check_target_range
    monkeypatch.setattr(linear_head, "check_target_range", lambda *args: checks.append(args) or own(*args))
    rows = counted_rows(y, V)
    assert [r.tolist() for r in rows] == [(own_y != -100).nonzero()[:, 0].tolist() for own_y in y]
    for k, kept in enumerate(rows):
        found = linear_heads_cross_entropy(
            x[k : k + 1, kept], w, y[k : k + 1, kept], ignore_index=EVERY_ROW, chunk_rows=CHUNK
        )
        torch.testing.assert_close(found.head_losses[0], want.head_losses[k])
        assert found.head_rows.tolist() == [len(kept)] and torch.equal(found.head_top1[0], want.head_top1[k])
        torch.testing.assert_close(torch.autograd.grad(found.loss, x)[0][k], want_dx[k])
    assert len(checks) == 1
    y[1, 2] = V
    with pytest.raises(IndexError, match=f"is {V}"):
        counted_rows(y, V)
