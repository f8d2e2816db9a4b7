"""fp8 casts. Triton's interpreter rounds some numbers to fp8 wrongly (15.9 to 8), so rounding is tested on a GPU and
for the twin only. Which numbers are read and where they are written is tested everywhere."""

import importlib

import pytest
import torch

from liger_triton import float8_cast, reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
module = importlib.import_module("liger_triton.float8_cast")
SHAPES = [
    pytest.param((256, 128), id="full-tiles"),
    pytest.param((300, 176), id="tails"),
    pytest.param((1, 16), id="one-row"),
    pytest.param((33, 7), id="odd"),
]


@pytest.fixture
def rounds_right(device, monkeypatch):
    """Use the twin instead of the kernel on a CPU."""
    if device == "cpu":
        monkeypatch.setattr(module, "runs_triton", lambda *tensors: False)


@pytest.fixture
def kernel_rounds_right(device):
    if device == "cpu" and module.runs_triton(torch.empty(1)):
        pytest.skip("Triton's interpreter rounds to fp8 wrongly; runs on a GPU, or without TRITON_INTERPRET")


def numbers(shape, device, dtype=torch.bfloat16):
    """Return numbers of many sizes, some too small for the common scale."""
    return (torch.randn(shape, device=device) * torch.logspace(-5, 1, shape[1], device=device)).to(dtype)


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("dtype, most, bits, least", [(E4M3, 448.0, 3, -6), (E5M2, 57344.0, 2, -14)], ids=["4", "5"])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_float64(shape, x_dtype, dtype, most, bits, least, power_of_2, device, rounds_right):
    """Each number is within half a step of its float64 value, for the float64 scale."""
    x = numbers(shape, device, x_dtype)
    found = float8_cast(x, dtype, power_of_2=power_of_2)
    scale = most / x.double().abs().max()
    if power_of_2:
        scale = scale.log2().floor().exp2()
    assert (found.inverse.double() * scale - 1).abs() <= 1e-6
    want = x.double() * scale
    step = want.abs().clamp(min=2.0**least).log2().floor().exp2() * 2.0**-bits
    assert ((found.rows.double() - want).abs() <= 0.5 * step * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_twin(shape, x_dtype, dtype, device, kernel_rounds_right):
    x = numbers(shape, device, x_dtype)
    for power_of_2 in (False, True):
        found = float8_cast(x, dtype, columns=True, power_of_2=power_of_2)
        want = reference.float8_cast(x, dtype, True, True, power_of_2)
        for got, expected in zip(found[:3], want[:3], strict=True):
            assert got.dtype == expected.dtype and torch.equal(got.float(), expected.float())


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_layouts(shape, x_dtype, dtype, device):
    """The transpose has the same numbers, padded with zeros. Each layout alone equals both together."""
    x = numbers(shape, device, x_dtype)
    both = float8_cast(x, dtype, columns=True)
    rows = float8_cast(x, dtype)
    columns = float8_cast(x, dtype, rows=False, columns=True)
    assert both.columns.shape == (shape[1], -(-shape[0] // 16) * 16)
    assert torch.equal(both.columns[:, : shape[0]].t().float(), both.rows.float())
    assert not both.columns[:, shape[0] :].float().any()
    if shape[0] >= 16 or device == "cuda":  # with fewer rows, the twin makes the transpose and rounds correctly
        assert torch.equal(rows.rows.float(), both.rows.float())
    assert rows.columns is None
    assert torch.equal(columns.columns.float(), both.columns.float()) and columns.rows is None
    twin = reference.float8_cast(x, dtype)[0]
    assert (both.rows.float() == twin.float()).float().mean() > 0.5  # 1 where rounding is right


def test_several_rounds_of_maxima(device, triton_only, monkeypatch):
    """The maximum is found anywhere, by programs that read several blocks."""
    monkeypatch.setattr(module, "PROGRAMS", 2)
    monkeypatch.setattr(module, "BLOCK", 64)
    x = torch.randn(9, 100, device=device)
    for place in (0, 63, 64, 500, 899):
        y = x.clone()
        y.view(-1)[place] = -50.0
        found = float8_cast(y)
        assert found.inverse.item() == pytest.approx(50 / 448) and found.maxima.shape == (2,)


def test_given_maxima_save_a_pass(device, monkeypatch):
    x = numbers((33, 48), device)
    first = float8_cast(x)

    def refuse(x):
        raise AssertionError("the maxima were computed again")

    monkeypatch.setattr(module, "maxima_of", refuse)
    monkeypatch.setattr(reference, "float8_maxima", refuse)
    again = float8_cast(x, columns=True, maxima=first.maxima)
    assert torch.equal(again.rows.float(), first.rows.float()) and again.inverse == first.inverse


@pytest.mark.parametrize("power_of_2", [False, True])
def test_nan_and_infinity_are_seen(power_of_2, device, rounds_right):
    x = numbers((5, 48), device)
    x[2, 3] = torch.nan
    found = float8_cast(x, columns=True, power_of_2=power_of_2)
    assert found.rows.float().isnan().all() and found.inverse.isnan()
    x[2, 3] = torch.inf
    found = float8_cast(x, power_of_2=power_of_2)
    assert (found.rows.float() * found.inverse).isnan().all()


def test_zeros(device):
    found = float8_cast(torch.zeros(5, 48, device=device), columns=True)
    assert not found.rows.float().any() and not found.columns.float().any() and found.inverse.isfinite()


@pytest.mark.parametrize(
    "x, options, message",
    [
        (torch.ones(2, 3, 4), {}, r"x is \(2, 3, 4\) torch.float32 .*; expected a contiguous matrix"),
        (torch.ones(4, 6).t(), {}, r"with strides \(1, 6\)"),
        (torch.ones(4, 6).double(), {}, "torch.float64"),
        (torch.ones(4, 6), {"dtype": torch.float8_e4m3fnuz}, "dtype is torch.float8_e4m3fnuz; expected"),
        (torch.ones(4, 6), {"rows": False}, "rows and columns are both False"),
    ],
)
def test_bad_input(x, options, message):
    with pytest.raises(ValueError, match=message):
        float8_cast(x, **options)


def test_a_gpu_without_fp8(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10")
    fault = module.fault_of_device.__wrapped__
    assert "NVIDIA A10 (compute capability 8.6) has no matrix units for fp8" in fault(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert fault(torch.device("cuda", 0)) is None and fault(torch.device("cpu")) is None
    assert "not an NVIDIA GPU" in fault(torch.device("xpu", 0))


@pytest.mark.gpu
def test_offsets_past_int32():
    """Use more than 2**31 elements. The last rows and columns equal a small matrix with the same maximum."""
    x = torch.randn(2**17 + 16, 16384, device="cuda", dtype=torch.bfloat16)
    x[0, 0] = x[-1, -1] = 100.0
    found = float8_cast(x, columns=True)
    tail = float8_cast(x[-16:].contiguous(), columns=True)
    assert torch.equal(found.rows[-16:].float(), tail.rows.float())
    assert torch.equal(found.columns[:, -16:].float(), tail.columns.float())


def test_a_gpu_without_fp8_takes_the_twins(monkeypatch, device):
    """The kernels do not compile on such a GPU."""
    x = torch.randn(32, 48, device=device)

    def refuse(*args, **options):
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(module, "fault_of_device", lambda device: "NVIDIA A100 has no matrix units for fp8")
    monkeypatch.setattr(module, "launch", refuse)
    want = reference.float8_cast(x, torch.float8_e4m3fn, True, True, maxima=reference.float8_maxima(x))
    got = float8_cast(x, columns=True, maxima=want[3])
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(got, want, strict=True))
    rows = module.float8_rows(x, maxima=True)
    module.float8_columns(x, rows.maxima)
    module.transposed([module.row_cast([x])[0]])


def test_maxima_that_are_none(device):
    with pytest.raises(ValueError, match="expected the maxima of an earlier cast"):
        float8_cast(torch.randn(16, 16, device=device), maxima=torch.ones(4, device=device))
