"""`float8_linear` with scales by row. On a CPU the twins run, since Triton's interpreter rounds to fp8 wrongly."""

import importlib
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from liger_triton import Float8Form, Float8RowwiseForm, float8_linear, reference
from liger_triton.float8_linear import Float8Input

E4M3 = torch.float8_e4m3fn
module = importlib.import_module("liger_triton.float8_linear")
# Against float64 products of the same fp8 numbers. The matrix units of a GPU keep about 14 bits of a sum.
BOUND = {torch.bfloat16: 5e-3, torch.float16: 2e-3, torch.float32: 1e-3 if torch.cuda.is_available() else 1e-5}
FORMS = {
    "rowwise": Float8RowwiseForm(),
    "gw_hp": Float8RowwiseForm(gw_hp=True),
    "any scale": Float8RowwiseForm(power_of_2=False, fast_accum=(False, False, True)),
}
BOTH = [pytest.param(FORMS[name], id=name) for name in ("rowwise", "gw_hp")]


@pytest.fixture(autouse=True)
def twins_on_a_cpu(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(importlib.import_module("liger_triton.float8_cast"), "runs_triton", lambda *tensors: False)


@pytest.fixture
def casts(monkeypatch):
    """Record the shapes that were cast by rows and by columns."""
    seen = []
    for name, own in (("rows", module.float8_rows), ("columns", module.float8_columns)):

        def counted(t, *args, own=own, name=name, **options):
            seen.append((name, tuple(t.shape)))
            return own(t, *args, **options)

        monkeypatch.setattr(module, f"float8_{name}", counted)
    return seen


def inputs(shape, device, dtype=torch.bfloat16, widths=(48, 80)):
    x = torch.randn(*shape, widths[0], device=device).to(dtype).requires_grad_()
    weight = (0.1 * torch.randn(widths[1], widths[0], device=device)).to(dtype).requires_grad_()
    return x, weight, torch.randn(*shape, widths[1], device=device).to(dtype)


def by_row(t, form):
    """Cast t to fp8 with row scales and back, in float64."""
    rows, inverse, _ = reference.float8_rows(t.detach(), form.power_of_2)
    return rows.double() * inverse.double()[:, None]


def wanted(x, weight, dy, form):
    x = x.detach().flatten(0, -2)
    dy = dy.flatten(0, -2)
    weight = weight.detach()
    turned = by_row(weight.t().contiguous(), form).t()
    if form.gw_hp:
        whole, _, inverse, _ = reference.float8_cast(weight, E4M3, power_of_2=form.power_of_2)
        turned = whole.double() * inverse.double()
        dw = dy.double().t() @ x.double()
    else:
        dw = by_row(dy.t().contiguous(), form) @ by_row(x.t().contiguous(), form).t()
    return F.linear(by_row(x, form), by_row(weight, form)), by_row(dy, form) @ turned, dw


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("keeps_input", [False, True])
@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("shape", [(32,), (3, 7), (1,)], ids=str)
def test_products_match_float64(shape, form, dtype, keeps_input, device):
    """The three products use the fp8 numbers, for any number of rows."""
    x, weight, dy = inputs(shape, device, dtype)
    y = float8_linear(x, weight, given=Float8Input(x, form, keeps_input))
    grads = torch.autograd.grad(y, (x, weight), dy)
    for got, like, want in zip((y, *grads), (dy, x, weight), wanted(x, weight, dy, form), strict=True):
        assert (got.dtype, got.shape) == (dtype, like.shape)
        assert error(got.flatten(0, -2), want) <= BOUND[dtype]


@pytest.mark.parametrize("form", BOTH)
def test_error_is_that_of_fp8(form, device):
    """The error comes from three mantissa bits, for gradients too. With `gw_hp`, the weight's gradient has none."""
    x, weight, dy = inputs((512,), device, torch.float32, (256, 256))
    y = float8_linear(x, weight, form=form)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    assert 0.02 < error(y, F.linear(x, weight)) < 0.05 and 0.02 < error(dx, dy @ weight) < 0.05
    if form.gw_hp:
        assert error(dw, dy.t() @ x) < 1e-5
    else:
        assert 0.02 < error(dw, dy.t() @ x) < 0.05


def test_a_large_token_costs_the_others_nothing(device):
    """With one scale for all tokens they would be zero. The same holds for a large feature of dy in dW."""
    x, weight, dy = inputs((64,), device, torch.float32)
    with torch.no_grad():
        x[3] *= 1e6
        dy[:, 5] *= 1e6
    y = float8_linear(x, weight, form=Float8RowwiseForm())
    (dw,) = torch.autograd.grad(y, weight, dy)
    others = [token for token in range(64) if token != 3]
    assert error(y[others], F.linear(x, weight)[others]) < 0.06
    rest = [feature for feature in range(80) if feature != 5]
    assert error(dw[rest], (dy.t() @ x)[rest]) < 0.06


def test_the_weight_has_one_scale_for_the_gradient_of_the_input_with_gw_hp(device):
    """So an input feature with weights of 1e-7 gets no gradient."""
    x, weight, dy = inputs((64,), device, torch.float32)
    with torch.no_grad():
        weight[:, 5] *= 1e-7
    by_row, whole = (
        torch.autograd.grad(float8_linear(x, weight, form=form), x, dy)[0][:, 5]
        for form in (Float8RowwiseForm(), Float8RowwiseForm(gw_hp=True))
    )
    assert error(by_row, (dy @ weight)[:, 5]) < 0.06 and not whole.any()


def test_bias(device):
    x, weight, dy = inputs((3, 7), device)
    bias = torch.randn(80, device=device).requires_grad_()
    form = Float8RowwiseForm()
    y = float8_linear(x, weight, bias, form=form)
    assert torch.equal(y, float8_linear(x, weight, form=form) + bias.bfloat16())
    (db,) = torch.autograd.grad(y, bias, dy)
    torch.testing.assert_close(db, dy.float().sum((0, 1)), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("keeps_input", [False, True])
@pytest.mark.parametrize("form", BOTH)
def test_layers_that_share_their_input(form, keeps_input, device, casts):
    """Results are bit-equal to separate layers. Each of the two casts of x runs once, the second only if needed."""
    x, q, dy = inputs((3, 7), device)
    k, v = (torch.randn_like(q).requires_grad_() for _ in range(2))
    apart = [torch.autograd.grad(float8_linear(x, w, form=form), (x, w), dy) for w in (q, k, v)]
    casts.clear()
    outputs = [float8_linear(x, w, given=module.shared_input(x, form, keeps_input)) for w in (q, k, v)]
    assert casts.count(("rows", (21, 48))) == 1
    assert casts.count(("columns", (21, 48))) == (not keeps_input and not form.gw_hp)
    for _ in range(2):  # two backward passes
        casts.clear()
        shared = torch.autograd.grad(outputs, (x, q, k, v), [dy] * 3, retain_graph=True)
        assert casts.count(("rows", (21, 48))) == 0
        assert casts.count(("columns", (21, 48))) == (keeps_input and not form.gw_hp)
        for got, (_, want) in zip(shared[1:], apart, strict=True):
            assert torch.equal(got, want)
        assert error(shared[0], sum(dx.double() for dx, _ in apart)) < 1e-2


@pytest.mark.parametrize("form", BOTH)
def test_a_first_layer_that_is_frozen(form, device):
    """The second layer gets what its weight's gradient needs from the input that the first layer cast."""
    x, q, dy = inputs((3, 7), device)
    k = torch.randn_like(q).requires_grad_()
    want = torch.autograd.grad(float8_linear(x, k, form=form), k, dy)
    given = Float8Input(x, form)
    float8_linear(x, q.detach(), given=given)
    assert torch.equal(torch.autograd.grad(float8_linear(x, k, given=given), k, dy)[0], want[0])


def test_not_shared_with_another_form(device):
    x, _, _ = inputs((3, 7), device)
    kinds = (Float8Form(), Float8RowwiseForm(), Float8RowwiseForm(gw_hp=True))
    given = [module.shared_input(x, form) for form in kinds]
    assert len({id(each) for each in given}) == 3 and [each.form for each in given] == list(kinds)
    with pytest.raises(ValueError, match="given is of another x, of another form"):
        float8_linear(x, torch.ones(80, 48, device=device), given=given[1], form=kinds[2])


def test_nothing_of_a_shared_input_outlives_it(device):
    x, weight, _ = inputs((3, 7), device)
    x = x * 1
    given = module.shared_input(x, Float8RowwiseForm())
    y = float8_linear(x, weight, given=given)
    rows = weakref.ref(given.cast.rows)
    del x
    assert given.cast is None and rows() is None
    y.sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("keeps_input", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("form", BOTH)
def test_what_is_kept(form, autocast, keeps_input, device):
    """Saved are the weight, numbers for each column, and the fp8 columns of x or x itself.

    x itself is saved in 16 bits, unless somebody keeps it anyway.
    """
    x, weight, _ = inputs((3, 7), device, torch.float32 if autocast else torch.bfloat16)
    x, kept = x * 1, []

    def pack(t):
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            given = Float8Input(x, form, keeps_input)
            float8_linear(x, weight, given=given)
            float8_linear(x, weight, given=given)
    whole = keeps_input or (form.gw_hp and not autocast)
    assert any(t is weight for t in kept) and any(t is x for t in kept) == whole
    rest = [t for t in kept if t is not weight and t is not x]
    large = {(t.dtype, tuple(t.shape), t.data_ptr()) for t in rest if t.ndim == 2}
    expected = []
    if not whole:
        expected.append((torch.bfloat16, (21, 48)) if form.gw_hp else (E4M3, (48, 32)))
    assert [each[:2] for each in large] == expected
    assert all(t.shape == (48,) for t in rest if t.ndim < 2)


@pytest.mark.parametrize("form", BOTH)
def test_only_what_is_wanted(form, device, casts, monkeypatch):
    products = []

    def counted(*args, own=Float8RowwiseForm.product, **options):
        products.append(1)
        return own(*args, **options)

    monkeypatch.setattr(Float8RowwiseForm, "product", staticmethod(counted))
    x, weight, dy = inputs((3, 7), device)
    both = torch.autograd.grad(float8_linear(x, weight, form=form), (x, weight), dy)
    products.clear()
    (dx,) = torch.autograd.grad(float8_linear(x, weight.detach(), form=form), x, dy)
    assert len(products) == 2
    (dw,) = torch.autograd.grad(float8_linear(x.detach(), weight, form=form), weight, dy)
    assert len(products) == 3 + (not form.gw_hp)
    assert torch.equal(dx, both[0]) and torch.equal(dw, both[1])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", BOTH)
def test_checkpointing(form, reentrant, device):
    x, weight, dy = inputs((3, 7), device)
    want = torch.autograd.grad(float8_linear(x, weight, form=form), (x, weight), dy)
    checkpoint(lambda t: float8_linear(t, weight, form=form), x, use_reentrant=reentrant).backward(dy)
    assert torch.equal(x.grad, want[0]) and torch.equal(weight.grad, want[1])


def test_weights_are_read_in_every_call(device):
    """Changes that bypass the version counter, as some optimizers make, are noticed too."""
    x, weight, _ = inputs((3, 7), device)
    y = float8_linear(x, weight, form=Float8RowwiseForm())
    weight.data.mul_(4)
    torch.testing.assert_close(float8_linear(x, weight, form=Float8RowwiseForm()), 4 * y)


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("changed", ["weight", "x"])
def test_a_change_before_the_backward_pass_raises(changed, form, device):
    x, weight, _ = inputs((3, 7), device)
    x = x * 1
    y = float8_linear(x, weight, given=Float8Input(x, form, keeps_input=True))
    with torch.no_grad():
        (weight if changed == "weight" else x).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("form", BOTH)
def test_second_backward_and_second_derivative_raise(form, device):
    x, weight, _ = inputs((3, 7), device)
    y = float8_linear(x, weight, form=form).square().sum()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(y, x, create_graph=True)
    y = float8_linear(x, weight, form=form).square().sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_no_gradient_no_graph(device, casts):
    x, weight, _ = inputs((3, 7), device)
    want = float8_linear(x, weight, form=Float8RowwiseForm())
    for context in (torch.no_grad(), torch.inference_mode()):
        casts.clear()
        with context:
            y = float8_linear(x, weight, form=Float8RowwiseForm())
        assert not y.requires_grad and torch.equal(y, want)
        assert sorted(casts) == [("rows", (21, 48)), ("rows", (80, 48))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", BOTH)
def test_autocast(form, dtype, device):
    """The output has the autocast dtype, and gradients the dtypes of the tensors. fp32 weights are rounded once."""
    x, weight, dy = inputs((3, 7), device, torch.float32)
    x = x.detach().to(dtype).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        y = float8_linear(x, weight, form=form)
    dx, dw = torch.autograd.grad(y, (x, weight), dy.bfloat16())
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, dtype, torch.float32)
    for got, want in zip((y, dx, dw), wanted(x.bfloat16(), weight, dy.bfloat16(), form), strict=True):
        assert error(got.flatten(0, -2), want) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize("form", BOTH)
def test_rows_that_lie_apart(form, device):
    x, weight, _ = inputs((6, 4), device)
    dy = torch.randn(4, 6, 80, device=device).bfloat16().transpose(0, 1)
    apart = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    results = []
    for given in (x, apart):
        y = float8_linear(given, weight, form=form)
        results.append([y, *torch.autograd.grad(y, (given, weight), dy)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("form", BOTH)
def test_empty(form, device):
    x, weight, _ = inputs((0,), device)
    float8_linear(x, weight, form=form).sum().backward()
    assert x.grad.shape == x.shape and not weight.grad.any()


@pytest.mark.parametrize("form", BOTH)
def test_nan_reaches_its_row_and_the_gradient(form, device):
    x, weight, dy = inputs((3,), device)
    with torch.no_grad():
        x[0, 0] = torch.nan
    y = float8_linear(x, weight, form=form)
    assert y[0].isnan().all() and y[1:].isfinite().all()
    (dw,) = torch.autograd.grad(y, weight, dy)
    assert dw[:, 0].isnan().all() and dw[:, 1:].isfinite().all()
