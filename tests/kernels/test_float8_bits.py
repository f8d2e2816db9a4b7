"""Linear layers whose weight is in eight bits already, which are read in each pass. On a CPU the twins run."""

import importlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from liger_triton import Float8Form, float8_linear
from liger_triton.float8_cast import float8_cast
from liger_triton.float8_linear import Float8Input

E4M3 = torch.float8_e4m3fn
FORMS = {"torchao's": Float8Form(), "e4m3, powers": Float8Form(E4M3, power_of_2=True)}


@pytest.fixture(autouse=True)
def twins_on_a_cpu(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(importlib.import_module("liger_triton.float8_cast"), "runs_triton", lambda *tensors: False)


class Bits:
    """A weight in eight bits, which are freed and filled again as a sharded one's are."""

    def __init__(self, weight, form):
        self.rows, _, self.inverse, _ = float8_cast(weight.detach(), power_of_2=form.power_of_2)
        self.saved, self.asked = self.rows.clone(), 0

    def __call__(self, weight):
        self.asked += 1
        return self.rows, self.inverse

    def free(self):
        self.rows.untyped_storage().resize_(0)

    def fill(self):
        self.rows.untyped_storage().resize_(self.saved.nbytes)
        self.rows.view(torch.uint8).copy_(self.saved.view(torch.uint8))


def case(device, dtype=torch.bfloat16, shape=(3, 7), form=FORMS["torchao's"], widths=(48, 80)):
    """x, a weight, its bits, a stand-in of other values for the weight, and dy."""
    torch.manual_seed(0)
    x = torch.randn(*shape, widths[0], device=device).to(dtype).requires_grad_()
    weight = (0.1 * torch.randn(widths[1], widths[0], device=device)).to(dtype).requires_grad_()
    stand_in = torch.full_like(weight, torch.nan).requires_grad_()
    return x, weight, Bits(weight, form), stand_in, torch.randn(*shape, widths[1], device=device).to(dtype)


@pytest.mark.parametrize("keeps_input", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("shape", [(32,), (3, 7), (1,)], ids=str)
def test_the_same_bits_give_the_same_numbers(shape, form, dtype, keeps_input, device):
    """As when the weight is cast in the call. The weight's own values are not read, and it has the gradient."""
    x, weight, bits, stand_in, dy = case(device, dtype, shape, form)
    bias = torch.randn(80, device=device)
    results = []
    for w, bits_of in ((weight, None), (stand_in, bits)):
        y = float8_linear(x, w, bias, given=Float8Input(x, form, keeps_input), bits_of=bits_of)
        results.append([y, *torch.autograd.grad(y, (x, w), dy)])
    for got, want in zip(*reversed(results), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want) and want.isfinite().all()


def test_bits_that_are_freed_in_between(device):
    """No copy of them is kept: they are asked for once in each pass."""
    x, weight, bits, stand_in, dy = case(device)
    want = torch.autograd.grad(float8_linear(x, weight), (x, weight), dy)
    y = float8_linear(x, stand_in, bits_of=bits)
    assert bits.asked == 1
    bits.free()
    bits.fill()
    got = torch.autograd.grad(y, (x, stand_in), dy)
    assert bits.asked == 2 and all(map(torch.equal, got, want))


def test_what_is_kept(device):
    x, _, bits, stand_in, _ = case(device)
    kept = []

    def pack(t):
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        float8_linear(x * 1, stand_in, bits_of=bits)
    large = [t for t in kept if t.ndim == 2]
    assert len(large) == 2 and any(t is stand_in for t in large)
    assert any((t.dtype, tuple(t.shape)) == (E4M3, (48, 32)) for t in large)  # the transpose of x


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(reentrant, device):
    x, weight, bits, stand_in, _ = case(device)
    want = torch.autograd.grad(float8_linear(x, weight).square().mean(), (x, weight))
    y = checkpoint(lambda x: float8_linear(x, stand_in, bits_of=bits), x, use_reentrant=reentrant)
    y.square().mean().backward()
    assert torch.equal(x.grad, want[0]) and torch.equal(stand_in.grad, want[1])


@pytest.mark.parametrize("wants", ["x", "weight"])
def test_only_what_is_wanted(wants, device):
    """For the gradient of the weight alone, its bits are not asked for a second time."""
    x, weight, bits, stand_in, dy = case(device)
    dx, dw = torch.autograd.grad(float8_linear(x, weight), (x, weight), dy)
    if wants == "x":
        (got,) = torch.autograd.grad(float8_linear(x, stand_in.detach(), bits_of=bits), x, dy)
    else:
        (got,) = torch.autograd.grad(float8_linear(x.detach(), stand_in, bits_of=bits), stand_in, dy)
    assert torch.equal(got, dx if wants == "x" else dw) and bits.asked == (2 if wants == "x" else 1)


def test_without_gradients(device):
    x, weight, bits, stand_in, _ = case(device)
    with torch.no_grad():
        y = float8_linear(x, stand_in, bits_of=bits)
    assert not y.requires_grad and torch.equal(y, float8_linear(x, weight))


def test_empty(device):
    """A gradient of zeros: a process without rows has to send one."""
    x, _, bits, stand_in, _ = case(device, shape=(0,))
    float8_linear(x, stand_in, bits_of=bits).sum().backward()
    assert x.grad.shape == x.shape and stand_in.grad.shape == stand_in.shape and not stand_in.grad.any()


@pytest.mark.parametrize("fault", ["dtype", "shape", "strides"])
def test_other_bits_are_refused(fault):
    x, _, bits, stand_in, _ = case("cpu")
    rows = {
        "dtype": bits.rows.to(torch.float8_e5m2), "shape": bits.rows[:48].contiguous(),
        "strides": bits.rows.view(torch.uint8).t().contiguous().t().view(E4M3),
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"bits_of gives .*expected contiguous \(80, 48\) torch.float8_e4m3fn on cpu"):
        float8_linear(x, stand_in, bits_of=lambda weight: (rows[fault], bits.inverse))
