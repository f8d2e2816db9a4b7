"""fp8 linear layers. Only a GPU runs the kernels: Triton's interpreter rounds to fp8 wrongly, so a CPU runs the
twins."""

import importlib
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from liger_triton import Float8Form, float8_linear, reference
from liger_triton.float8_linear import Float8Input

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
cast_module = importlib.import_module("liger_triton.float8_cast")
module = importlib.import_module("liger_triton.float8_linear")
# Against float64 products of the same fp8 numbers. The matrix units of a GPU keep about 14 bits of a sum.
BOUND = {torch.bfloat16: 5e-3, torch.float16: 2e-3, torch.float32: 1e-3 if torch.cuda.is_available() else 1e-5}
FORMS = {
    "torchao's": Float8Form(),
    "e4m3": Float8Form(E4M3, fast_accum=(False, False, False)),
    "powers": Float8Form(power_of_2=True),
}


@pytest.fixture(autouse=True)
def twins_on_a_cpu(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(cast_module, "runs_triton", lambda *tensors: False)


@pytest.fixture
def products(monkeypatch):
    """Count the fp8 products."""
    count = []

    def counted(*args, own=Float8Form.product, **options):
        count.append(1)
        return own(*args, **options)

    monkeypatch.setattr(Float8Form, "product", staticmethod(counted))
    return count


def inputs(shape, device, dtype=torch.bfloat16, widths=(48, 80)):
    x = torch.randn(*shape, widths[0], device=device).to(dtype).requires_grad_()
    weight = (0.1 * torch.randn(widths[1], widths[0], device=device)).to(dtype).requires_grad_()
    return x, weight, torch.randn(*shape, widths[1], device=device).to(dtype)


def rounded(t, dtype, form):
    """Cast t to fp8 and back, in float64."""
    rows, _, inverse, _ = reference.float8_cast(t.detach().flatten(0, -2), dtype, power_of_2=form.power_of_2)
    return (rows.double() * inverse.double()).view(t.shape)


def wanted(x, weight, dy, form):
    x8 = rounded(x, E4M3, form)
    w8 = rounded(weight, E4M3, form)
    dy8 = rounded(dy, form.grad_dtype, form)
    return F.linear(x8, w8), dy8 @ w8, dy8.flatten(0, -2).t() @ x8.flatten(0, -2)


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
    for got, want in zip((y, *grads), wanted(x, weight, dy, form), strict=True):
        assert got.dtype == dtype and got.shape == want.shape and error(got, want) <= BOUND[dtype]


def test_error_is_that_of_fp8(device):
    """The error comes from three mantissa bits, or two for gradients, and is not the 16-bit error."""
    x, weight, dy = inputs((512,), device, torch.float32, (256, 256))
    y = float8_linear(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    assert 0.02 < error(y, F.linear(x, weight)) < 0.05
    assert 0.03 < error(dx, dy @ weight) < 0.08 and 0.03 < error(dw, dy.t() @ x) < 0.08


def test_bias(device):
    x, weight, dy = inputs((3, 7), device)
    bias = torch.randn(80, device=device).requires_grad_()
    y = float8_linear(x, weight, bias)
    assert torch.equal(y, float8_linear(x, weight) + bias.bfloat16())
    (db,) = torch.autograd.grad(y, bias, dy)
    torch.testing.assert_close(db, dy.float().sum((0, 1)), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("keeps_input", [False, True])
def test_layers_that_share_their_input(keeps_input, device, monkeypatch):
    """Results equal separate layers. x is cast once, and its transpose is made once."""
    x, q, dy = inputs((3, 7), device)
    k, v = (torch.randn_like(q).requires_grad_() for _ in range(2))
    leaves = (x, q, k, v)
    apart = torch.autograd.grad(sum((float8_linear(x, w) * dy).sum() for w in (q, k, v)), leaves)
    casts = []

    def counted(t, *args, own=cast_module.float8_cast, **options):
        casts.append(tuple(t.shape))
        return own(t, *args, **options)

    monkeypatch.setattr(module, "float8_cast", counted)
    form = Float8Form()
    outputs = [float8_linear(x, w, given=module.shared_input(x, form, keeps_input)) for w in (q, k, v)]
    assert casts.count((21, 48)) == 1
    for _ in range(2):  # two backward passes
        casts.clear()
        shared = torch.autograd.grad(sum((y * dy).sum() for y in outputs), leaves, retain_graph=True)
        assert casts.count((21, 48)) == keeps_input
        for got, want in zip(shared, apart, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)
            assert error(got, want) < 1e-2


def test_nothing_of_a_shared_input_outlives_it(device):
    x, weight, _ = inputs((3, 7), device)
    x = x * 1
    given = module.shared_input(x, Float8Form())
    y = float8_linear(x, weight, given=given)
    rows = weakref.ref(given.cast.rows)
    del x
    assert given.cast is None and rows() is None
    y.sum().backward()
    assert weight.grad is not None


def test_a_layer_alone_shares_no_input(device):
    x, _, _ = inputs((3, 7), device)
    first = module.shared_input(x, Float8Form())
    alone = module.shared_input(x, Float8Form(), alone=True)
    assert len({id(t) for t in (first, alone, module.shared_input(x, Float8Form()))}) == 3


@pytest.mark.parametrize("change", ["in place", "autocast", "form"])
def test_not_shared_once_something_has_changed(change, device):
    x, weight, _ = inputs((3, 7), device, torch.float32)
    x = x * 1
    given = module.shared_input(x, Float8Form())
    assert module.shared_input(x, Float8Form()) is given
    form = Float8Form(E4M3) if change == "form" else Float8Form()
    if change == "in place":
        x.mul_(2)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=change == "autocast"):
        assert module.shared_input(x, form) is not given
        if change != "form":
            with pytest.raises(ValueError, match="given is of another x"):
                float8_linear(x, weight, given=given)


@pytest.mark.parametrize("keeps_input", [False, True])
def test_what_is_kept(keeps_input, device):
    """Saved are the fp8 transpose of x, or x itself; the weight; and some maxima."""
    x, weight, _ = inputs((3, 7), device)
    x = x * 1
    kept = []

    def pack(t):
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        float8_linear(x, weight, given=Float8Input(x, Float8Form(), keeps_input))
    assert any(t is weight for t in kept) and any(t is x for t in kept) == keeps_input
    rest = [t for t in kept if t is not weight and t is not x]
    large = [(t.dtype, tuple(t.shape)) for t in rest if t.ndim == 2]
    assert large == ([] if keeps_input else [(E4M3, (48, 32))])
    assert all(t.numel() <= cast_module.PROGRAMS for t in rest if t.ndim < 2)


def test_only_what_is_wanted(device, products):
    x, weight, dy = inputs((3, 7), device)
    both = torch.autograd.grad(float8_linear(x, weight), (x, weight), dy)
    products.clear()
    (dx,) = torch.autograd.grad(float8_linear(x, weight.detach()), x, dy)
    (dw,) = torch.autograd.grad(float8_linear(x.detach(), weight), weight, dy)
    assert torch.equal(dx, both[0]) and torch.equal(dw, both[1]) and len(products) == 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(reentrant, device, products):
    """Gradients are the same. Without reentrance, the last product of a checkpoint is not repeated."""
    x, weight, _ = inputs((3, 7), device)
    want = torch.autograd.grad(float8_linear(x, weight).square().mean(), (x, weight))
    products.clear()

    def layer(x):
        return float8_linear(x, weight, given=module.shared_input(x, Float8Form()))

    checkpoint(layer, x, use_reentrant=reentrant).square().mean().backward()
    assert len(products) == 3 + reentrant
    assert torch.equal(x.grad, want[0]) and torch.equal(weight.grad, want[1])


def test_weights_are_read_in_every_call(device):
    """Changes that bypass the version counter, as some optimizers make, are noticed too."""
    x, weight, _ = inputs((3, 7), device)
    y = float8_linear(x, weight)
    weight.data.mul_(4)
    torch.testing.assert_close(float8_linear(x, weight), 4 * y)


@pytest.mark.parametrize("changed", ["weight", "x"])
def test_a_change_before_the_backward_pass_raises(changed, device):
    x, weight, _ = inputs((3, 7), device)
    x = x * 1
    y = float8_linear(x, weight, given=Float8Input(x, Float8Form(), keeps_input=True))
    with torch.no_grad():
        (weight if changed == "weight" else x).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_backward_and_second_derivative_raise(device):
    x, weight, _ = inputs((3, 7), device)
    y = float8_linear(x, weight).square().sum()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(y, x, create_graph=True)
    y = float8_linear(x, weight).square().sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_no_gradient_no_graph(device):
    x, weight, _ = inputs((3, 7), device)
    want = float8_linear(x, weight)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y = float8_linear(x, weight)
            assert not y.requires_grad and torch.equal(y, want)
            z = x * 1
            for _ in range(2):  # a tensor of inference mode has no version
                y = float8_linear(z, weight, given=module.shared_input(z, Float8Form()))
                assert torch.equal(y, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast(dtype, device):
    """The output has the autocast dtype, and gradients the dtypes of the tensors. fp32 weights are rounded once."""
    x, weight, dy = inputs((3, 7), device, torch.float32)
    x = x.detach().to(dtype).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        y = float8_linear(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), dy.bfloat16())
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, dtype, torch.float32)
    for got, want in zip((y, dx, dw), wanted(x.bfloat16(), weight, dy.bfloat16(), Float8Form()), strict=True):
        assert error(got, want) <= BOUND[torch.bfloat16]


def test_rows_that_lie_apart(device):
    x, weight, _ = inputs((6, 4), device)
    dy = torch.randn(4, 6, 80, device=device).bfloat16().transpose(0, 1)
    apart = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    results = []
    for given in (x, apart):
        y = float8_linear(given, weight)
        results.append([y, *torch.autograd.grad(y, (given, weight), dy)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_empty(device):
    x, weight, _ = inputs((0,), device)
    float8_linear(x, weight).sum().backward()
    assert x.grad.shape == x.shape and not weight.grad.any()


def test_nan_reaches_the_output(device):
    x, weight, _ = inputs((3,), device)
    with torch.no_grad():
        x[0, 0] = torch.nan
    assert float8_linear(x, weight).isnan().all()


def test_compile_is_refused(device):
    with pytest.raises(Exception, match="float8_linear is for eager code"):
        torch.compile(float8_linear, backend="eager", fullgraph=True)(*inputs((3,), device)[:2])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.ones(9, 48).double()}, r"x is \(9, 48\) torch.float64; expected"),
        ({"weight": torch.ones(80, 32)}, r"weight is \(80, 32\) .*, x \(9, 48\); expected weight \(N, 48\)"),
        ({"weight": torch.ones(72, 48)}, r"weight is \(72, 48\); expected multiples of 16"),
        ({"bias": torch.ones(48)}, r"bias is \(48,\); expected \(80,\)"),
        ({"weight": torch.ones(80, 48, device="meta")}, "weight is on meta, x on cpu"),
    ],
)
def test_bad_input(change, message):
    given = {"x": torch.ones(9, 48), "weight": torch.ones(80, 48), "bias": None} | change
    with pytest.raises(ValueError, match=message):
        float8_linear(**given)


def test_a_gpu_without_fp8_is_refused(monkeypatch):
    monkeypatch.setattr(module, "fault_of_device", lambda device: "NVIDIA A10 has no matrix units for fp8")
    with pytest.raises(ValueError, match="NVIDIA A10 has no matrix units for fp8. Use torch.nn.functional.linear"):
        float8_linear(torch.ones(9, 48), torch.ones(80, 48))
