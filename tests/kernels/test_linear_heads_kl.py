import pytest
import torch
import torch.nn.functional as F

from liger_triton import linear_heads_cross_entropy, linear_heads_kl, reference
from liger_triton.linear_heads_kl import _windows, kl_pass, teacher_pass

# no size is a power of two, a row is two blocks of 128
T = 13
H = 37
V = 211
CHUNK = 5
BF16, FP32 = torch.bfloat16, torch.float32


def inputs(device, heads=3, tied=True, dtype=FP32, rows=T):
    """Return hidden (K, T, H) and weights with gradients, the teacher's two tensors, and the rows that count."""
    x = torch.randn(heads, rows, H).to(device, dtype)
    w = [(torch.randn(V, H) / H**0.5).to(device, dtype) for _ in range(1 if tied else heads)]
    teacher = torch.randn(rows, H).to(device, dtype), (torch.randn(V, H) / H**0.5).to(device, dtype)
    valid = (torch.rand(heads, rows) > 0.3).to(device)
    return [t.requires_grad_() for t in (x, *w)], teacher, valid


def heads_of(teacher, valid, tied, dtype=None, **options):
    """Return ours and the reference's loss as functions of the tensors from `inputs`, for `check_close`."""

    def call(fn, wide):
        own = [t.double() for t in teacher] if wide else teacher
        more = {} if wide else {"chunk_rows": CHUNK}
        return lambda x, *w: fn(x, w[0] if tied else w, *own, valid, **options, **more).loss

    return call(linear_heads_kl, False), call(reference.linear_heads_kl, True)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_matches_float64(dtype, tied, heads, device, row_pass, check_close):
    tensors, teacher, valid = inputs(device, heads, tied, dtype)
    weights = torch.rand(heads, T, device=device)
    ours, oracle = heads_of(teacher, valid, tied, row_weight=weights, softcap=2.0, logit_scale=0.7)
    check_close(ours, oracle, tensors)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_fp16_and_lists(tied, device, check_close):
    """Heads are side by side in memory (T, K, H), or a list of slices of it."""
    tensors, teacher, valid = inputs(device, 3, tied, torch.float16)
    tensors[0] = tensors[0].detach().transpose(0, 1).contiguous().requires_grad_()
    ours, oracle = heads_of(teacher, valid, tied, row_weight=0.8 ** torch.arange(1, 4, device=device))
    for layout in (lambda x: x.transpose(0, 1), lambda x: list(x.unbind(1))):
        check_close(lambda x, *w: ours(layout(x), *w), lambda x, *w: oracle(layout(x), *w), tensors)  # noqa: B023


def test_teacher_is_k_rows_ahead(device, row_pass):
    """Teacher and students predict one-hot, so only the right row gives a KL near 0."""
    n, heads = 9, 3
    tokens = torch.arange(n, device=device)
    head = torch.eye(n, device=device) * 30
    states = torch.eye(n, device=device)
    x = torch.stack(
        [states.roll(-k, 0) for k in range(1, heads + 1)]
    )  # head k at row t: what the teacher says at t + k
    valid = torch.ones(heads, n, dtype=torch.bool, device=device)
    out = linear_heads_kl(x, head, states, head, valid, chunk_rows=4)
    assert out.head_rows.tolist() == [8, 7, 6] == out.head_top1.tolist()  # the last k rows have no teacher
    assert out.head_losses.abs().max() < 1e-9
    by_target = linear_heads_kl(x, head, states, head, valid, target=tokens.expand(heads, n))
    assert by_target.head_top1.tolist() == [0, 0, 0]
    shifted = torch.stack([tokens.roll(-k) for k in range(1, heads + 1)])
    assert linear_heads_kl(x, head, states, head, valid, target=shifted).head_top1.tolist() == [8, 7, 6]
    assert linear_heads_kl(x.roll(1, 1), head, states, head, valid).head_losses.min() > 100


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_sums_of_each_head(tied, device, row_pass):
    (x, *w), teacher, valid = inputs(device, 3, tied)
    with torch.no_grad():  # some students that agree with their teacher, one in all but a tie
        for k in range(3):
            x[k, : T - k - 1 : 2] = teacher[0][k + 1 :: 2]
        (w[0] if tied else w[1]).copy_(teacher[1])
        teacher[1][150] = teacher[1][20]
        teacher[0][7] = 3 * teacher[1][20] / teacher[1][20].norm() ** 2 * 4
    weight, target = w[0] if tied else w, torch.randint(0, V, (3, T), device=device)
    for more in ({}, {"target": target}):
        got = linear_heads_kl(
            x, weight, *teacher, valid, row_weight=torch.rand(3, device=device), chunk_rows=CHUNK, **more
        )
        wide = [t.double() for t in w] * (3 if tied else 1)
        want = reference.linear_heads_kl(x.double(), wide, *(t.double() for t in teacher), valid, **more)
        torch.testing.assert_close(got.head_losses.double(), want.head_losses, rtol=1e-5, atol=1e-6)
        assert torch.equal(got.head_top1, want.head_top1) and torch.equal(got.head_rows, want.head_rows)
        assert got.head_top1.dtype == torch.int64 and not any(t.requires_grad for t in got[1:])
        assert more or got.head_top1[1] > 1
    with torch.no_grad():
        again = linear_heads_kl(x, weight, *teacher, valid, chunk_rows=CHUNK)
    assert not again.loss.requires_grad and torch.equal(again.head_losses, got.head_losses)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_scaled_and_added_to_another_loss(tied, device, check_close):
    tensors, teacher, valid = inputs(device, 3, tied)

    def objective(f):
        return lambda x, *w: f(x, *w) * 3.7 + x.square().sum() + w[-1].square().mean()

    check_close(*(objective(f) for f in heads_of(teacher, valid, tied)), tensors)


def test_the_teacher_gets_no_gradient(device, check_close):
    """It gets none even if its head is the students' trained head: only the students' part counts."""
    (x, w), (states, _), valid = inputs(device)
    states.requires_grad_()
    frozen = w.detach().clone()
    ours, oracle = heads_of((states, frozen), valid, True)
    check_close(ours, oracle, [x, w])
    linear_heads_kl(x, w, states, w, valid).loss.backward()
    got, w.grad = w.grad, None
    linear_heads_kl(x, w, states, frozen, valid).loss.backward()
    assert torch.equal(got, w.grad) and states.grad is None


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_rows_that_do_not_count(tied, device, row_pass):
    """Their values, weight and teacher are never read. Covers a head without rows, one with one row, no rows at all."""
    (x, *w), (states, head), valid = inputs(device, 3, tied)
    valid[:, 3:8] = False  # no head needs the teacher's rows 6 to 8
    weight, share = w[0] if tied else w, torch.rand(3, T, device=device)
    want = linear_heads_kl(x, weight, states, head, valid, row_weight=share, chunk_rows=CHUNK)
    counts = valid & (torch.arange(T, device=device) + torch.arange(1, 4, device=device).unsqueeze(1) < T)
    with torch.no_grad():
        x[~counts] = torch.nan
        states[6:9] = torch.nan
        states[0] = torch.nan
    share[~counts] = torch.nan
    got = linear_heads_kl(x, weight, states, head, valid, row_weight=share, chunk_rows=CHUNK)
    got.loss.backward()
    assert torch.equal(got.loss, want.loss) and torch.equal(got.head_losses, want.head_losses)
    assert torch.equal(got.head_rows, counts.sum(1))
    assert torch.equal(x.grad[~counts], torch.zeros_like(x.grad[~counts])) and x.grad[counts].ne(0).any(1).all()
    valid[1] = False
    some = linear_heads_kl(x, weight, states, head, valid, chunk_rows=CHUNK)
    grads = torch.autograd.grad(some.loss, w)
    assert some.head_losses[1] == 0 and some.head_rows[1] == 0 and some.loss > 0
    assert all(g.isfinite().all() for g in grads) and (tied or not grads[1].any())
    for rows, mask in ((T, torch.zeros_like(valid)), (0, valid[:, :0]), (1, valid[:, :1])):
        x_ = x[:, :rows].detach().requires_grad_()
        none = linear_heads_kl(x_, weight, states[:rows], head, mask)
        assert none.loss == 0 and not none.head_losses.any() and not none.head_rows.any()
        for g in torch.autograd.grad(none.loss, (x_, *w)):
            assert torch.equal(g, torch.zeros_like(g))


@pytest.mark.parametrize("of", ["student", "teacher"])
def test_nan(of, device, row_pass):
    """A NaN reaches the losses of its own rows and no other."""
    (x, w), (states, head), valid = inputs(device)
    valid[:] = True
    with torch.no_grad():
        (x[2] if of == "student" else states)[5, 3] = torch.nan
    out = linear_heads_kl(x, w, states, head, valid, chunk_rows=CHUNK)
    out.loss.backward()
    rows = {"student": {(2, 5)}, "teacher": {(0, 4), (1, 3), (2, 2)}}[of]
    assert {tuple(r) for r in x.grad.isnan().any(-1).nonzero().tolist()} == rows
    assert x.grad[[k for k, _ in rows], [t for _, t in rows]].isnan().all() and w.grad.isnan().any()
    assert out.loss.isnan() and out.head_losses.isnan().tolist() == [of == "teacher", of == "teacher", True]


def rows_against_float64(student, teacher, **options):
    """Return loss and dl of `kl_pass` on logits, with both errors relative to the row's largest value."""
    places = torch.arange(len(student), device=student.device)
    stats, _ = teacher_pass(teacher, 1.0, 0.0)
    z = student.detach().double().requires_grad_()
    want = F.kl_div(z.log_softmax(-1), teacher.double().log_softmax(-1), reduction="none", log_target=True).sum(-1)
    (dz,) = torch.autograd.grad(want.sum(), z)
    grad = student.clone()
    loss, _ = kl_pass(grad, teacher, stats, places, None, 1.0, 0.0, True)
    return loss, ((loss - want).abs() / want).max(), ((grad - dz).norm(dim=1) / dz.norm(dim=1)).max()


@pytest.mark.parametrize("gap", [1e-3, 1e-2, 0.3, 3.0])
def test_nearly_equal_rows_keep_a_small_loss(gap, device, row_pass):
    """The sum of q log(q / p) cancels: at a gap of 1e-3 it keeps far fewer digits.

    Logits are sums of 2**-12, so rounding of the inputs does not hide the pass.
    """
    z = (torch.randn(7, 1000, device=device) * 3 * 4096).round() / 4096
    student = z + (torch.randn_like(z) * gap * 4096).round() / 4096
    loss, error, grad_error = rows_against_float64(student, z)
    assert error < 2e-6 and grad_error < 2e-6 + 1e-6 / gap  # p itself is known to about 3e-7
    log_p, log_q = student.log_softmax(-1), z.log_softmax(-1)
    plain = (log_q.exp() * (log_q - log_p)).sum(-1)
    assert gap > 1e-3 or ((plain - loss).abs() / loss).max() > 20 * error


@pytest.mark.parametrize("rest", [1e-2, 1e-4, 1e-6])
def test_confident_rows(rest, device, row_pass):
    """Both are sure of one token, p = 1 - rest and q = 1 - rest / 2. p - q would keep no digit of rest = 1e-6."""
    student, teacher = torch.zeros(2, 3, 500, device=device)
    student[:, 123], teacher[:, 123] = (torch.tensor([2.0, 1.0]) * 499 / rest).log().flip(0).to(device)
    loss, error, grad_error = rows_against_float64(student, teacher)
    assert error < 1e-5 and grad_error < 1e-5  # of a GPU's exponential: 5e-6


def test_impossible_tokens(device, row_pass):
    """A logit of -inf in both adds 0; in the teacher alone p; in the student alone infinity."""
    student, teacher = torch.randn(2, 3, 300, device=device)
    student[0, 7:9] = teacher[0, 7:9] = float("-inf")
    teacher[1, 200:] = float("-inf")
    student[2, 5] = float("-inf")
    stats, _ = teacher_pass(teacher, 1.0, 0.0)
    p, q = student.double().softmax(-1), teacher.double().softmax(-1)
    want = torch.where(q > 0, q * (q / p).log(), 0.0).sum(-1)
    grad, places = student.clone(), torch.arange(3, device=device)
    loss, _ = kl_pass(grad, teacher, stats, places, None, 1.0, 0.0, True)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=0)
    assert loss.isinf().tolist() == [False, False, True]
    torch.testing.assert_close(grad.double(), p - q, rtol=1e-4, atol=1e-8)


def test_first_of_equals(device, row_pass):
    """Both argmaxes are the first of equal logits: in one lane, a block apart, or in two lanes."""
    z = torch.randn(4, 500, device=device)
    for row, places in enumerate(([5, 133], [133, 261, 7 + 128], [130, 3], [499])):
        z[row, places] = 9.0
    stats, top = teacher_pass(z, 1.0, 0.0)
    assert top.tolist() == [5, 133, 3, 499]
    loss, top = kl_pass(z.clone(), z, stats, torch.arange(4, device=device), None, 1.0, 0.0, False)
    assert top.tolist() == [5, 133, 3, 499] and not loss.any()


def test_common_offset(device, row_pass):
    """Adding 10000 to all logits of student or teacher changes nothing: sums of 2**-9 are exact either way."""
    student, teacher = (torch.randn(2, 3, 300, device=device) * 512).round() / 512
    plain, *_ = rows_against_float64(student, teacher)
    for offset in ((10000.0, 0.0), (0.0, 10000.0)):
        moved, *_ = rows_against_float64(student + offset[0], teacher + offset[1])
        torch.testing.assert_close(moved, plain, rtol=1e-6, atol=0)


def test_cross_entropy_is_its_limit(device, row_pass):
    """A teacher that is sure of one token gives the cross-entropy of that token, gradients too."""
    (x, w), _, valid = inputs(device)
    states, head = torch.zeros(T, V, device=device), torch.eye(V, device=device)
    tokens = torch.randint(0, V, (T,), device=device)
    states[torch.arange(T), tokens] = 200.0
    counts = valid & (torch.arange(T, device=device) + torch.arange(1, 4, device=device).unsqueeze(1) < T)
    target = torch.stack([tokens.roll(-k) for k in range(1, 4)]).masked_fill(~counts, -100)
    soft = linear_heads_kl(x, w, states, head, valid)
    hard = linear_heads_cross_entropy(x, w, target)
    for a, b in zip(torch.autograd.grad(soft.loss, (x, w)), torch.autograd.grad(hard.loss, (x, w)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    for a, b in zip(soft, hard, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@pytest.mark.parametrize("heads, share", [(1, 1.0), (3, 1.0), (3, 0.5), (5, 0.1), (5, 0.01), (5, 0.0)])
def test_windows(heads, share):
    """Each row that counts is in one window with its teacher. No window needs more teacher rows than fit."""
    valid = torch.rand(heads, 101) < share
    for k in range(heads):
        valid[k, 101 - k - 1 :] = False
    seen = torch.zeros(heads, 101, dtype=torch.int64)
    for size in (heads, 8, 40, 101):
        windows = list(_windows(valid, size))
        for of_teacher, of_heads, places, per_head in windows:
            assert 0 < len(of_teacher) <= size and sum(per_head) == len(of_heads) == len(places) > 0
            head = torch.repeat_interleave(torch.arange(heads), torch.tensor(per_head))
            assert torch.equal(of_teacher[places], of_heads + head + 1) and max(per_head) <= len(of_teacher)
            seen.index_put_((head, of_heads), torch.ones_like(of_heads), accumulate=True)
        assert share == 0.0 or share < 1.0 or len(windows) <= -(-100 // (size - heads + 1))
    assert torch.equal(seen, valid * 4)


def test_products_and_memory(device, row_pass, allocations, monkeypatch):
    """A token takes one product for the teacher and two for each head.

    Heads take three if their weight trains, and one without gradients. Five heads hold no more logits than one. A
    frozen weight has no gradient buffer.
    """
    monkeypatch.setattr("liger_triton._chunks._CPU_CHUNK_BYTES", 4 * V * 36)  # 36 rows
    monkeypatch.setattr("liger_triton._chunks._GPU_CHUNK_BYTES", 0)

    def count(heads, tied, frozen, rows=40, **options):
        (x, *w), teacher, valid = inputs(device, heads, tied, rows=rows)
        valid[:] = True
        for t in w:
            t.requires_grad_(not frozen)
        with allocations() as seen:
            linear_heads_kl(x, w[0] if tied else w, *teacher, valid, **options).loss.backward()
        assert frozen == (w[0].grad is None)
        return seen, sum(n == V * H for n in seen.sizes)

    if row_pass == "torch" and device == "cpu":  # the walk is one for both passes, and the interpreter slow
        for heads, tied in ((1, True), (5, True), (5, False)):
            seen, dense = count(heads, tied, True)
            assert 25 * V <= max(seen.sizes) <= 36 * 224 and dense == 0
    one_window = {"rows": 11, "chunk_rows": 11}
    seen, dense = count(3, True, True, **one_window)
    assert seen.products == 1 + 2 and dense == 0
    if row_pass == "triton":
        return
    seen, dense = count(3, False, True, **one_window)
    assert seen.products == 1 + 2 * 3 and dense == 0
    for tied in (True, False):
        seen, dense = count(3, tied, False, **one_window)
        assert seen.products == 1 + 3 * (1 if tied else 3) and dense == (1 if tied else 3)
    (x, w), teacher, valid = inputs(device, rows=11)
    with torch.no_grad(), allocations() as seen:
        linear_heads_kl(x, w, *teacher, valid, chunk_rows=11)
    assert seen.products == 2


def test_weight_gradient_is_rounded_once(device):
    """With bf16 and many windows, the fp32 sum has the error of one window. The lean sum has more."""
    (x, w), teacher, valid = inputs(device, 1, dtype=BF16, rows=24)
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    reference.linear_heads_kl(x64, w64, *(t.double() for t in teacher), valid).loss.backward()

    def error(**options):
        loss = linear_heads_kl(x, w, *teacher, valid, **options).loss * 0.3
        (grad,) = torch.autograd.grad(loss, w)
        assert grad.dtype == BF16
        return ((grad.double() - 0.3 * w64.grad).norm() / w64.grad.norm() / 0.3).item()

    one = error()
    assert one < 1e-2 and error(chunk_rows=2) < 1.05 * one and error(chunk_rows=2, accumulate="lean") > 1.05 * one


def test_bf16_loses_what_pytorch_loses(device):
    """bf16 logits with a spread of 4 move every log(p / q) by their rounding, no more than F.linear does."""
    (x, w), (states, head), valid = inputs(device, dtype=BF16, rows=40)
    with torch.no_grad():
        w *= 4
    head = head * 4

    def results(fn, *tensors):
        loss = fn(*tensors, valid).loss
        return loss, *torch.autograd.grad(loss, tensors[:2])

    want = results(reference.linear_heads_kl, *(t.detach().double().requires_grad_() for t in (x, w, states, head)))
    ours, theirs = (results(fn, x, w, states, head) for fn in (linear_heads_kl, reference.linear_heads_kl))
    for got, eager, ref in zip(ours[1:], theirs[1:], want[1:], strict=True):
        assert 2e-3 * ref.norm() < (got - ref).norm() <= 1.2 * (eager - ref).norm()
    assert (ours[0] - want[0]).abs() <= 1e-3 * want[0]


def test_second_backward(device):
    (x, w), teacher, valid = inputs(device)
    loss = linear_heads_kl(x, w, *teacher, valid).loss
    first = torch.autograd.grad(loss, [x, w], retain_graph=True)
    for got, want in zip(torch.autograd.grad(loss, [x, w]), first, strict=True):
        assert torch.equal(got, want)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_autocast(device):
    """With fp32 heads on a bf16 teacher, gradients are fp32."""
    (x, *w), teacher, valid = inputs(device, 3, False)
    teacher = [t.bfloat16() for t in teacher]
    want = heads_of(teacher, valid, False)[1](x.double(), *(t.double() for t in w))
    want = (want, *torch.autograd.grad(want, (x, *w)))
    with torch.autocast(device, BF16):
        got = heads_of(teacher, valid, False)[0](x, *w)
    got = (got, *torch.autograd.grad(got, (x, *w)))
    for g, t in zip(got, want, strict=True):
        assert g.dtype == FP32 and (g - t).norm() <= 1e-2 * t.norm()


def test_compile(device, check_compiled):
    tensors, teacher, valid = inputs(device, 2, False)
    ours, _ = heads_of(teacher, valid, False)
    check_compiled(lambda x, *w: ours(list(x), *w), tensors)


def test_errors():
    (x, w), (states, head), valid = inputs("cpu")
    good = {"hidden": x, "weight": w, "teacher_hidden": states, "teacher_weight": head, "valid": valid}
    for changes, message in [
        ({"weight": [w, w]}, "weight has 2 tensors, hidden 3 heads"),
        ({"valid": valid.long()}, "valid is torch.int64; expected torch.bool"),
        ({"valid": valid[:2]}, r"valid is \(2, 13\); expected \(3, 13\)"),
        ({"teacher_hidden": states[1:]}, r"teacher_hidden is \(12, 37\); expected \(13, H\)"),
        ({"teacher_weight": head[1:]}, r"teacher_weight is \(210, 37\).*one vocabulary"),
        ({"teacher_weight": head.bfloat16()}, "hidden is torch.float32, teacher_weight torch.bfloat16"),
        ({"hidden": x.long()}, "hidden is torch.int64; expected bfloat16"),
        ({"target": torch.zeros(3, 5, dtype=torch.long)}, r"target is \(3, 5\)"),
        ({"target": torch.zeros(3, T)}, "target is torch.float32; expected class ids"),
        ({"row_weight": torch.ones(2)}, r"row_weight is \(2,\)"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"logit_scale": float("inf")}, "logit_scale is inf"),
        ({"accumulate": "half"}, "accumulate is 'half'"),
        ({"chunk_rows": 0}, "chunk_rows is 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            linear_heads_kl(**(good | changes))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_rows_of_any_layout(tied, device, row_pass):
    """`valid` and row weights are column-major; fp16 weights have any size."""
    for dtype, size in ((torch.float32, 1.0), (torch.float16, 1e-6), (torch.float16, 1e5)):
        tensors, teacher, valid = inputs(device, 3, tied, dtype)
        share, found = size * (0.5 + torch.rand(3, T, device=device)), []
        ours = (linear_heads_kl, column_major, dtype)
        twin = (reference.linear_heads_kl, torch.clone, torch.float64)
        for fn, turn, to in (ours, twin):
            x, *w = (t.detach().to(to).requires_grad_() for t in tensors)
            own = [t.to(to) for t in teacher]
            loss = fn(x, w[0] if tied else w, *own, turn(valid), row_weight=turn(share)).loss
            found.append(torch.autograd.grad(loss / (size * T), (x, *w)))
        for got, want in zip(*found, strict=True):
            assert (got.double() - want).norm() <= (2e-3 if dtype == torch.float16 else 1e-5) * want.norm()


def column_major(t):
    return t.t().contiguous().t()


def test_rows_at_the_least_number(device, row_pass):
    """If all logits are `finfo.min`, the rows are uniform. One larger logit takes all probability."""
    lowest = torch.finfo(torch.float32).min
    student = torch.full((3, 300), lowest, device=device)
    student[1, 200] = 0.0
    student[2, 200] = lowest / 2
    stats, top = teacher_pass(student, 1.0, 0.0)
    assert top.tolist() == [0, 200, 200]
    torch.testing.assert_close(stats[:, 1], torch.tensor([299.0, 0.0, 0.0], device=device))
    rows = torch.tensor([0, 1, 2], device=device)
    loss, top = kl_pass(student.clone(), student, stats, rows, None, 1.0, 0.0, True)
    assert torch.equal(loss, torch.zeros(3, device=device)) and top.tolist() == [0, 200, 200]
