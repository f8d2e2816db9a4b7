import math

import pytest
import torch
import torch.nn.functional as F

from liger_triton import cross_entropy, reference
from liger_triton._row_pass import ENTROPY, N_STATS, RowSpec
from liger_triton._row_pass import row_pass as run_row_pass

T, V = 7, 307
DTYPES = [torch.float32, torch.bfloat16]


def inputs(device, dtype=torch.float32, scale=1.0):
    """Return a leaf and a target with ignored rows. `leaf * 1.0` stands for logits that a model computed."""
    leaf = (torch.randn(T, V) * scale).to(device, dtype).requires_grad_()
    y = torch.randint(0, V, (T,))
    y[::4] = -100
    return leaf, y.to(device)


CASES = [
    pytest.param({}, id="plain"),
    pytest.param({"reduction": "sum", "label_smoothing": 0.2}, id="smoothing"),
    pytest.param({"reduction": "none", "softcap": 2.0}, id="softcap"),
    pytest.param({"logit_scale": -0.4, "softcap": 1.5, "z_loss": 0.01}, id="scale-softcap-z-loss"),
    pytest.param({"reduction": "none", "logit_scale": 2.0, "label_smoothing": 0.1, "z_loss": 0.05}, id="none-all"),
]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
def test_matches_float64(inplace, options, dtype, device, row_pass, check_close):
    """Upstream gradients are random: the gradient from the forward pass is multiplied by them."""
    leaf, y = inputs(device, dtype)
    check_close(
        lambda z: cross_entropy(z * 1.0, y, **options, inplace=inplace),
        lambda z: reference.cross_entropy(z, y, **options),
        [leaf],
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("view", ["made", "view", "leaf", "columns"])
def test_the_logits_are_intact(view, reduction, device, row_pass):
    """Forward and two backward passes leave the logits unchanged, also for a second use of them."""
    leaf, y = inputs(device)
    results = []
    for loss_of in (cross_entropy, F.cross_entropy):
        made = leaf if view == "leaf" else leaf * 1.0
        logits = made.view(T, V) if view == "view" else made
        if view == "columns":
            logits = made[:, : V - 7]
        target = y.clamp(max=V - 8)
        before = logits.detach().clone()
        loss = loss_of(logits, target, reduction=reduction, label_smoothing=0.1)
        up = torch.arange(loss.numel(), device=device).view(loss.shape) + 0.5
        later = logits.square().sum() + logits.tanh().sum()
        (first,) = torch.autograd.grad(loss, leaf, up, retain_graph=True)
        (both,) = torch.autograd.grad([loss, later], leaf, [up, torch.ones_like(later)], retain_graph=True)
        (again,) = torch.autograd.grad(loss, leaf, up)
        assert torch.equal(logits, before) and torch.equal(first, again)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, leaf, up)
        results.append([loss, first, both, again])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_logits_changed_since_the_call(device, row_pass):
    """Changed logits raise: backward reads them again, or finds its gradient in their memory."""
    leaf, y = inputs(device)
    for inplace in (False, True):
        for view in (False, True):
            made = leaf * 1.0
            logits = made.view(T, V) if view else made
            loss = cross_entropy(logits, y, inplace=inplace)
            with torch.no_grad():
                made.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_what_is_kept_and_made(device, row_pass, allocations):
    """No copy of the logits is saved, and the gradient is the only new tensor of their size."""
    if row_pass == "torch":
        pytest.skip("plain PyTorch copies the logits to fp32")
    leaf, y = inputs(device)
    logits, saved = leaf * 1.0, []
    with allocations() as seen, torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = cross_entropy(logits, y)
    assert max(seen.sizes) < T * V and max(t.numel() for t in saved if t.data_ptr() != logits.data_ptr()) < T * V
    with allocations() as seen:
        torch.autograd.grad(loss, logits)
    assert sum(size >= T * V for size in seen.sizes) == 1


def test_reference_is_f_cross_entropy(device):
    leaf, y = inputs(device)
    for reduction in ("mean", "sum", "none"):
        got = reference.cross_entropy(leaf.double(), y, reduction=reduction, label_smoothing=0.1, softcap=3.0)
        want = F.cross_entropy(3 * torch.tanh(leaf.double() / 3), y, reduction=reduction, label_smoothing=0.1)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("view", [False, True])
def test_gradient_takes_the_memory_of_the_logits(view, device, row_pass, allocations):
    leaf, y = inputs(device)
    made = leaf * 1.0
    received = []
    made.grad_fn.register_prehook(lambda grads: received.append(grads[0].data_ptr()))
    logits = made.view(T, V) if view else made
    with allocations() as seen:
        loss = cross_entropy(logits, y, reduction="sum", inplace=True)
    loss.backward()
    assert received == [made.data_ptr()]
    if row_pass == "triton":
        assert max(seen.sizes) < T * V


@pytest.mark.parametrize("how", ["leaf", "no_grad", "transposed", "expanded"])
def test_logits_left_alone(how, device, row_pass):
    leaf, y = inputs(device)
    if how == "transposed":
        logits = (leaf.detach().t().contiguous().requires_grad_() * 1.0).t()
    elif how == "expanded":
        logits = (leaf[:1] * 1.0).expand(T, V)
    else:
        logits = leaf if how == "leaf" else leaf * 1.0
    before = logits.detach().clone()
    with torch.set_grad_enabled(how != "no_grad"):
        loss = cross_entropy(logits, y, inplace=True)
    assert loss.requires_grad == (how != "no_grad")
    want = F.cross_entropy(before.double().requires_grad_(), y)
    torch.testing.assert_close(loss.double(), want)
    if loss.requires_grad:
        grad = torch.autograd.grad(loss, logits)[0]
        clean = before.double().requires_grad_()
        torch.testing.assert_close(grad.double(), torch.autograd.grad(F.cross_entropy(clean, y), clean)[0])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("view", [False, True])
def test_overwritten_logits_cannot_be_used_in_silence(view, device, row_pass):
    def logits():
        made = leaf * 1.0
        return made.view(T, V) if view else made

    leaf, y = inputs(device)
    saved_before = logits()
    aux = saved_before.square().sum()  # keeps the logits for its backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (cross_entropy(saved_before, y, inplace=True) + aux).backward()
    saved_before = logits()
    aux = saved_before.square().sum()
    cross_entropy(saved_before, y, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        aux.backward()

    twice = logits()
    loss = cross_entropy(twice, y, inplace=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Second backward through cross_entropy"):
        loss.backward()

    again = logits()
    losses = [cross_entropy(again, y, inplace=True), cross_entropy(again, y, inplace=True)]
    with pytest.raises(RuntimeError, match="used again after cross_entropy|modified by an inplace operation"):
        sum(losses).backward()

    if not view:
        later = logits()
        loss = cross_entropy(later, y, inplace=True)
        with pytest.raises(RuntimeError, match="used again after cross_entropy"):
            (loss + later.sum()).backward()


def test_an_operation_before_that_saved_its_output(device, row_pass):
    """tanh saves its output, and here the output is the logits."""
    leaf, y = inputs(device)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy(leaf.tanh(), y, inplace=True).backward()
    cross_entropy(leaf.tanh(), y).backward()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_rows_ignored(reduction, device, row_pass):
    leaf, y = inputs(device)
    loss = cross_entropy(leaf * 1.0, torch.full_like(y, 7), ignore_index=7, reduction=reduction)
    assert torch.equal(loss, torch.zeros_like(loss))
    loss.sum().backward()
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_no_rows(device, row_pass):
    leaf = torch.zeros(0, V, device=device, requires_grad=True)
    loss = cross_entropy(leaf * 1.0, torch.zeros(0, dtype=torch.long, device=device))
    loss.backward()
    assert loss.item() == 0.0 and leaf.grad.shape == (0, V)


def test_nan_and_infinity(device, row_pass):
    """NaN stays in its own row. -inf, a masked token, has p = 0 and gradient 0, as in PyTorch."""
    leaf, y = inputs(device)
    y[1], y[2] = 3, 4
    with torch.no_grad():
        leaf[1, 5] = torch.nan
        leaf[2, 6:] = -torch.inf
        leaf[0, 5] = torch.nan  # an ignored row
    loss = cross_entropy(leaf * 1.0, y, reduction="none")
    loss.sum().backward()
    want = leaf.detach().double().requires_grad_()
    F.cross_entropy(want, y, reduction="none").sum().backward()
    assert loss.isnan().nonzero().flatten().tolist() == [1] and leaf.grad[1].isnan().all()
    assert torch.equal(leaf.grad[0], torch.zeros_like(leaf.grad[0]))
    rows = range(2, T)
    torch.testing.assert_close(leaf.grad[rows].double(), want.grad[rows], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.9, 0.99, 0.999, 0.9999])
def test_confident_tokens(p, dtype, device, row_pass):
    """Where softmax is near 1, p - 1 cancels: the gradient is at least as accurate as PyTorch's in that dtype."""
    z = torch.zeros(4, V, device=device)
    y = torch.tensor([0, 127, 128, V - 1], device=device)
    z[torch.arange(4), y] = torch.tensor((V - 1) * p / (1 - p)).log()
    z = z.to(dtype)
    grads = []
    for fn, t in ((F.cross_entropy, z.double()), (lambda t, y: F.cross_entropy(t.float(), y), z), (cross_entropy, z)):
        t = t.clone().requires_grad_()
        fn(t * 1.0, y).backward()
        grads.append(t.grad.double())
    want, theirs, ours = grads
    error = (ours - want).norm() / want.norm()
    truncates = row_pass == "triton" and device == "cpu" and dtype == torch.bfloat16  # the interpreter, at its stores
    floor = 4e-3 if truncates else 4e-6  # the latter is exp(-13) on a GPU
    assert error <= 1.5 * max((theirs - want).norm() / want.norm(), floor)
    # The loss of such a token is small too: log1p keeps it
    for t, target in zip(z, y, strict=True):
        exact = F.cross_entropy(t.double(), target)
        assert (cross_entropy(t[None], target[None]) - exact).abs() <= 4e-6 * exact


def test_common_offset(device, row_pass):
    """Adding 10000 to all logits changes nothing. They are eighths, so fp32 holds them exactly either way."""
    z, y = torch.randint(-40, 40, (T, V), device=device) / 8, inputs(device)[1]
    got = []
    for offset in (0.0, 10000.0):
        leaf = (z + offset).requires_grad_()
        loss = cross_entropy(leaf, y, label_smoothing=0.1)
        got.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    for plain, shifted in zip(*got, strict=True):
        assert (plain - shifted).norm() <= 1e-6 * plain.norm()


def test_rows_of_any_stride(device, row_pass, check_close):
    """Logits are a slice of the vocabulary: rows have gaps, and the gaps are not written."""
    leaf, y = inputs(device)
    wide = torch.cat([leaf.detach(), torch.full((T, 9), 7.0, device=device)], dim=1).requires_grad_()
    for inplace in (False, True):
        check_close(
            lambda w, inplace=inplace: cross_entropy((w * 1.0)[:, :V], y, inplace=inplace),
            lambda w: reference.cross_entropy(w[:, :V], y),
            [wide],
        )
    made = wide * 1.0
    cross_entropy(made[:, :V], y, inplace=True)
    assert torch.equal(made[:, V:], wide[:, V:]) and not torch.equal(made[:, :V], wide[:, :V])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compile(reduction, dtype, device, row_pass, check_compiled):
    if row_pass == "triton" and device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter's store of the scaled gradient truncates to bf16, the traced scaling rounds")
    leaf, y = inputs(device, dtype)
    check_compiled(lambda z: cross_entropy(z * 2.0, y, reduction=reduction, label_smoothing=0.1), [leaf])


@pytest.mark.parametrize("columns, first", [(V, 0), (V + 6, 0), (V + 13, 3), (V + 13, 0), (320, 0), (320, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_that_start_anywhere(columns, first, dtype, device, row_pass):
    """In place in some columns of a wider tensor, the gradient is right and the other columns are unchanged."""
    wide = torch.randn(T, columns, device=device).to(dtype)
    before, y = wide.clone(), inputs(device)[1]
    y[1], y[2] = 0, V - 1
    logits = wide[:, first : first + V]
    z = logits.double().requires_grad_()
    F.cross_entropy(z, y, reduction="sum").backward()
    stats = torch.zeros(N_STATS, T, device=device)
    run_row_pass(logits, logits, y, stats, None, None, RowSpec())
    bound = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    assert (logits - z.grad).norm() < bound * z.grad.norm()
    torch.testing.assert_close(stats[0].double(), F.cross_entropy(z, y, reduction="none"), rtol=1e-5, atol=1e-6)
    wide[:, first : first + V] = before[:, first : first + V]
    assert torch.equal(wide, before)


@pytest.mark.gpu
def test_offsets_past_2_31():
    """Nine rows are 2**28 elements apart: the last begins at element 2**31."""
    far = torch.zeros(9 * 2**28, device="cuda", dtype=torch.bfloat16).view(9, 2**28)[:, :V]
    z, y = torch.randn(9, V, device="cuda").bfloat16(), torch.arange(9, device="cuda")
    stats = torch.zeros(2, N_STATS, 9, device="cuda")
    for logits, rows in ((far.copy_(z), stats[0]), (z, stats[1])):
        run_row_pass(logits, logits, y, rows, None, None, RowSpec())
    torch.testing.assert_close(far, z)  # not bit for bit: another alignment selects other machine code
    torch.testing.assert_close(stats[0], stats[1])
    assert far[8].float().sum().abs() < 1e-2 and far[8, 8] < -0.5  # a gradient: sums to 0, negative at the target


@pytest.mark.parametrize(
    "logits, target, options, message",
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, 3).long(), {}, r"logits is \(2, 3, 4\).*logits.flatten\(0, -2\)"),
        (torch.zeros(2, 3), torch.zeros(3).long(), {}, r"target \(3,\); expected logits \(T, V\) and target \(T,\)"),
        (torch.zeros(2, 3).long(), torch.zeros(2).long(), {}, "logits is torch.int64; expected bfloat16"),
        (torch.zeros(2, 3), torch.zeros(2), {}, "target is torch.float32; expected class ids"),
        (torch.zeros(2, 3), torch.zeros(2, device="meta").long(), {}, "target is on meta, logits on cpu"),
        (torch.zeros(2, 3), torch.zeros(2).long(), {"reduction": "avg"}, "reduction is 'avg'"),
        (torch.zeros(2, 3), torch.zeros(2).long(), {"label_smoothing": -0.1}, "label_smoothing is -0.1"),
        (torch.zeros(2, 3), torch.zeros(2).long(), {"softcap": -1.0}, "softcap is -1.0"),
        (torch.zeros(2, 3), torch.zeros(2).long(), {"z_loss": float("inf")}, "z_loss is inf"),
    ],
)
def test_errors(logits, target, options, message):
    with pytest.raises(ValueError, match=message):
        cross_entropy(logits, target, **options)


def test_target_outside_the_vocabulary(device, row_pass):
    """A CPU raises. A GPU would have to wait, so the row becomes NaN there."""
    leaf, y = inputs(device)
    y[5] = V
    if device == "cpu":
        with pytest.raises(IndexError, match=rf"target\[5\] is {V} .*expected 0 to {V - 1}, or -100"):
            cross_entropy(leaf * 1.0, y)
    else:
        loss = cross_entropy(leaf * 1.0, y, reduction="none")
        loss.sum().backward()
        assert loss.isnan().nonzero().flatten().tolist() == [5] and leaf.grad.isnan().any(1).sum() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_at_the_least_number(dtype, device, row_pass):
    """If all logits are `finfo.min`, the row is uniform. Next to larger logits, they have no probability."""
    lowest = torch.finfo(dtype).min
    logits = torch.full((4, V), lowest, dtype=dtype, device=device)
    logits[1, 3] = lowest / 2
    logits[2, 5] = 1e30
    logits[3, 3] = -1e31
    logits, y = logits.requires_grad_(), torch.tensor([3, 3, 5, 3], device=device)
    got = cross_entropy(logits, y, reduction="none")
    want = F.cross_entropy(logits.double(), y, reduction="none")
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    grads = [torch.autograd.grad(t.sum(), logits)[0].float() for t in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-2, atol=1e-5)


def test_the_entropy_of_rows_with_large_and_least_numbers(device, row_pass):
    logits = torch.full((2, V), torch.finfo(torch.float32).min, device=device)
    logits[1, 4] = 3e38
    stats = torch.zeros((N_STATS, 2), device=device)
    y = torch.tensor([0, 4], device=device)
    run_row_pass(logits, None, y, stats, None, None, RowSpec(extras=1 << ENTROPY))
    torch.testing.assert_close(stats[ENTROPY], torch.tensor([math.log(V), 0.0], device=device))


def test_fp16_waits_with_the_scale_of_the_logits(device, row_pass):
    leaf, y = inputs(device)
    logits = leaf.detach().half().requires_grad_()
    for inplace in (False, True):
        loss = cross_entropy(logits * 1.0, y, logit_scale=1e-6, inplace=inplace)
        (got,) = torch.autograd.grad(loss * 2.0**30, logits)
        want = F.cross_entropy(logits.double() * 1e-6, y) * 2.0**30
        assert (got.double() - torch.autograd.grad(want, logits)[0]).norm() <= 2e-3 * got.double().norm()
