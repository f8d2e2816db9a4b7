"""The short convolution against float64: any row length, 2 to 8 taps, tokens with gaps, and a fixed order of sums."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from liger_triton import reference, short_conv

LENGTHS = (5, 1, 0, 23, 0, 2, 9)  # longer than the runs and programs below, and shorter than the taps
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    """Programs of 16 and 20 tokens by 32 channels, so that small rows take several."""
    module = importlib.import_module("liger_triton.short_conv")
    sizes = {"PROGRAMS": 1, "SUM_GROUPS": 1, "SUM_CHANNELS": 16}
    for name, tokens in (("FORWARD", 16), ("BACKWARD", 20)):
        sizes[name] = getattr(module, name)._replace(tokens=tokens, run=4)
    for name, size in sizes.items():
        monkeypatch.setattr(module, name, size)
    monkeypatch.setattr(module, "_channels", lambda x, walk: 32)


def offsets(device, lengths=LENGTHS):
    return torch.tensor((0, *lengths), device=device).cumsum(0).int()


def inputs(device, dtype=torch.float32, *, taps=4, bias=True, lengths=LENGTHS, channels=32, parameter_dtype=None):
    shapes = (sum(lengths), channels), (channels, taps), (channels,)
    x, w, b = (torch.randn(shape, device=device) for shape in shapes)
    x = x.to(dtype).requires_grad_()
    w, b = (p.to(parameter_dtype or dtype).requires_grad_() for p in (w, b))
    return [x, w, b if bias else None]


def oracle(x, w, b, lengths=LENGTHS, silu=True):
    """Convolve each row by PyTorch's own convolution."""
    done, w = [], w.reshape(x.shape[1], 1, -1)
    for row in x.split(list(lengths)):
        if len(row):
            y = F.conv1d(row.t()[None], w, b, padding=w.shape[-1] - 1, groups=x.shape[1])[0, :, : len(row)].t()
            done.append(F.silu(y) if silu else y)
    return torch.cat(done)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("taps", range(2, 9))
@pytest.mark.parametrize("bias, activation", [(True, "silu"), (False, None)])
def test_matches_float64(taps, bias, activation, dtype, device, check_close):
    cu_seqlens = offsets(device)
    check_close(
        lambda x, w, b: short_conv(x, w, b, cu_seqlens=cu_seqlens, activation=activation),
        lambda x, w, b: oracle(x, w, b, silu=activation is not None),
        inputs(device, dtype, taps=taps, bias=bias),
    )


@pytest.mark.parametrize("lengths", [(40,), (1,), (3, 0), (0, 0, 7)], ids=str)
def test_rows_of_other_numbers(lengths, device, check_close):
    cu_seqlens = offsets(device, lengths)
    check_close(
        lambda x, w, b: short_conv(x, w, b, cu_seqlens=cu_seqlens, activation="silu"),
        lambda x, w, b: oracle(x, w, b, lengths),
        inputs(device, lengths=lengths, channels=7),
    )


@pytest.mark.parametrize(
    "taps, lengths",
    [
        (4, (16, 4, 12, 8)),  # rows begin where runs and programs do
        (8, (16, 4, 12, 8)),
        (4, (15, 6, 17, 1, 1)),  # one token before and after
        (8, (3, 13, 7, 0, 0, 9)),
        (5, (1, 1, 1, 1, 1, 1, 12, 0, 1, 4)),
    ],
    ids=str,
)
def test_rows_that_begin_near_the_borders_of_runs_and_programs(lengths, taps, device, check_close):
    cu_seqlens = offsets(device, lengths)
    check_close(
        lambda x, w, b: short_conv(x, w, b, cu_seqlens=cu_seqlens, activation="silu"),
        lambda x, w, b: oracle(x, w, b, lengths),
        inputs(device, taps=taps, lengths=lengths, bias=False),
    )


def test_a_vector_that_is_not_full(device, check_close):
    """40 channels by 32 of a program."""
    cu_seqlens = offsets(device)
    check_close(
        lambda x, w, b: short_conv(x, w, b, cu_seqlens=cu_seqlens, activation="silu"),
        oracle,
        inputs(device, channels=40),
    )


def test_tokens_before_the_first_offset_are_a_row(device, check_close):
    cu_seqlens = offsets(device, (6, 20, 4))[1:]
    check_close(
        lambda x, w, b: short_conv(x, w, b, cu_seqlens=cu_seqlens, activation="silu"),
        lambda x, w, b: oracle(x, w, b, (6, 20, 4)),
        inputs(device, lengths=(6, 20, 4)),
    )


def test_offsets_made_in_inference_mode(device, check_close):
    """As those that an evaluation has left."""
    with torch.inference_mode():
        cu_seqlens = offsets(device, (3, 5))
    check_close(
        lambda x, w, b: short_conv(x, w, b, cu_seqlens=cu_seqlens, activation="silu"),
        lambda x, w, b: oracle(x, w, b, (3, 5)),
        inputs(device, lengths=(3, 5)),
    )


def test_few_tokens_are_shared_by_many_programs(device, monkeypatch):
    """Programs of fewer tokens, down to two runs."""
    module = importlib.import_module("liger_triton.short_conv")
    monkeypatch.setattr(module, "PROGRAMS", 64)
    walk = module.Walk(tokens=256, run=4, bytes=256)
    tokens = [module._tokens(torch.empty(t, 64, device=device), walk, 32) for t in (1, 64, 1024, 4096, 8192, 10**5)]
    assert tokens == [8, 8, 32, 128, 256, 256]


def test_without_offsets_there_is_one_row(device, check_close):
    given = inputs(device)
    check_close(
        lambda x, w, b: short_conv(x, w, b, activation="silu"),
        lambda x, w, b: oracle(x, w, b, (sum(LENGTHS),)),
        given,
    )


def test_rows_together_are_the_rows_alone(device):
    """Outputs and the gradient of x are bit-equal wherever a row lies."""
    x, w, b = inputs(device)
    y = short_conv(x, w, b, cu_seqlens=offsets(device), activation="silu")
    upstream = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, upstream)
    start = 0
    for length in filter(None, LENGTHS):
        row = x.detach()[start : start + length].requires_grad_()
        alone = short_conv(row, w, b, activation="silu")
        (d_row,) = torch.autograd.grad(alone, row, upstream[start : start + length])
        assert torch.equal(y[start : start + length], alone)
        assert torch.equal(dx[start : start + length], d_row)
        start += length


def test_tokens_after_the_last_offset_are_a_row(device):
    """A buffer of fixed size may end with unused tokens."""
    x, w, b = inputs(device)
    short = offsets(device, LENGTHS[:-1])
    got = short_conv(x, w, b, cu_seqlens=short, activation="silu")
    assert torch.equal(got, short_conv(x, w, b, cu_seqlens=offsets(device), activation="silu"))
    assert torch.equal(
        short_conv(x.double(), w, b, cu_seqlens=short).float(),
        short_conv(x.double(), w, b, cu_seqlens=offsets(device)).float(),
    )


def test_tokens_that_lie_apart(device, check_close):
    """A slice of a projection's result, and channels that are not contiguous."""
    cu_seqlens = offsets(device)
    _, w, b = inputs(device, channels=30)
    wide = torch.randn(sum(LENGTHS), 100, device=device)
    for view in (wide[:, 20:50], wide[:, ::3][:, :30], torch.randn(30, sum(LENGTHS), device=device).t()):
        check_close(
            lambda x, w, b: short_conv(x, w, b, cu_seqlens=cu_seqlens, activation="silu"),
            oracle,
            [view.detach().requires_grad_(), w, b],
        )


def test_upstream_of_any_strides(device, check_upstream_strides):
    cu_seqlens = offsets(device)
    check_upstream_strides(
        lambda x, w, b: short_conv(x, w, b, cu_seqlens=cu_seqlens, activation="silu"), inputs(device)
    )


def test_the_weight_of_a_conv1d(device):
    """A weight (C, 1, K) gives the same result, and its gradient has its shape."""
    x, w, b = inputs(device)
    layer = w.detach()[:, None].clone().requires_grad_()
    y, want = short_conv(x, layer, b), short_conv(x, w, b)
    assert torch.equal(y, want)
    upstream = torch.randn_like(y)
    (got,) = torch.autograd.grad(y, layer, upstream)
    (flat,) = torch.autograd.grad(want, w, upstream)
    assert torch.equal(got, flat[:, None])


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (1, 2)], ids=str)
def test_frozen_parts_get_no_gradient(trained, device, check_close):
    given = [t.detach().requires_grad_(i in trained) for i, t in enumerate(inputs(device, channels=8))]
    cu_seqlens = offsets(device)
    check_close(lambda x, w, b: short_conv(x, w, b, cu_seqlens=cu_seqlens, activation="silu"), oracle, given)


@pytest.mark.parametrize("parameter_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype_equals_the_twin_s(dtype, parameter_dtype, device):
    x, w, b = inputs(device, dtype, parameter_dtype=parameter_dtype, lengths=(5, 3), channels=9)
    given = {"cu_seqlens": offsets(device, (5, 3)), "activation": "silu"}
    got, want = short_conv(x, w, b, **given), reference.short_conv(x, w, b, **given)
    assert got.dtype == want.dtype == dtype and got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    got.sum().backward()
    assert (x.grad.dtype, w.grad.dtype, b.grad.dtype) == (dtype, parameter_dtype, parameter_dtype)


@pytest.mark.parametrize("activation", ["silu", None])
def test_a_nan_stays_in_its_row(activation, device):
    x, w, b = inputs(device)
    with torch.no_grad():
        x[28, 3] = float("nan")  # the last token of a row that is followed by an empty one
    y = short_conv(x, w, b, cu_seqlens=offsets(device), activation=activation)
    assert y.isnan().nonzero().tolist() == [[28, 3]]
    y.sum().backward()
    assert set(x.grad.isnan().nonzero()[:, 0].tolist()) <= set(range(25, 29))
    assert (w.grad.isnan().sum(1) > 0).nonzero().tolist() == [[3]]


def test_sums_are_in_a_fixed_order(device):
    x, w, b = inputs(device)
    y = short_conv(x, w, b, cu_seqlens=offsets(device), activation="silu")
    upstream = torch.randn_like(y)
    first = torch.autograd.grad(y, (x, w, b), upstream, retain_graph=True)
    for one, two in zip(first, torch.autograd.grad(y, (x, w, b), upstream), strict=True):
        assert torch.equal(one, two)


def test_a_second_derivative_is_refused(device, triton_only):
    given = inputs(device, channels=4)
    y = short_conv(*given)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(y.sum(), given, create_graph=True)


def test_no_tokens(device):
    x, w, b = inputs(device, lengths=(0,))
    short_conv(x, w, b, cu_seqlens=offsets(device, (0, 0)), activation="silu").sum().backward()
    assert x.grad.shape == (0, 32) and not w.grad.any() and not b.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "twin"])
def test_compiles(dtype, device, check_compiled):
    cu_seqlens = offsets(device)
    check_compiled(
        lambda x, w, b: short_conv(x, w, b, cu_seqlens=cu_seqlens, activation="silu"), inputs(device, dtype, channels=9)
    )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.ones(2, 5, 8)}, r"x is \(2, 5, 8\).*expected a floating-point tensor \(tokens, channels\)"),
        ({"x": torch.ones(5, 8, dtype=torch.long)}, "x is .*int64; expected a floating-point tensor"),
        ({"weight": torch.ones(7, 4)}, r"weight is \(7, 4\), x \(5, 8\); expected weight \(8, taps\)"),
        ({"weight": torch.ones(8, 2, 4)}, r"weight is \(8, 2, 4\)"),
        ({"weight": torch.ones(8, 9)}, "9 taps; expected 2 to 8"),
        ({"weight": torch.ones(8, 1, 1)}, "1 taps; expected 2 to 8"),
        ({"bias": torch.ones(1, 8)}, r"bias is \(1, 8\), x \(5, 8\); expected bias \(8,\) or None"),
        ({"bias": torch.ones(8, dtype=torch.int)}, "bias is torch.int32; expected a floating-point"),
        ({"weight": torch.ones(8, 4, device="meta")}, "weight is on meta, x on cpu; move weight to cpu"),
        (
            {"cu_seqlens": torch.tensor([0, 5])},
            r"cu_seqlens is \(2,\) torch.int64; expected \(rows \+ 1,\) torch.int32",
        ),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, r"cu_seqlens is \(0,\)"),
        ({"activation": "gelu"}, "activation is 'gelu'; expected one of 'silu'"),
    ],
)
def test_bad_input(change, message):
    given = {"x": torch.ones(5, 8), "weight": torch.ones(8, 4)} | change
    with pytest.raises(ValueError, match=message):
        short_conv(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("taps, channels", [(4, 8192), (3, 2048), (8, 777)])
def test_at_the_sizes_of_models(taps, channels, device, check_close, monkeypatch):
    monkeypatch.undo()  # programs of the usual size
    lengths = (700, 1, 0, 333, 3, 1024, 2)
    cu_seqlens = offsets(device, lengths)
    check_close(
        lambda x, w, b: short_conv(x, w, b, cu_seqlens=cu_seqlens, activation="silu"),
        lambda x, w, b: oracle(x, w, b, lengths),
        inputs(device, torch.bfloat16, taps=taps, lengths=lengths, channels=channels),
    )


@pytest.mark.gpu
def test_offsets_past_int32(monkeypatch):
    """Use 2**31 + 8192 elements. The last rows equal a call on those rows alone."""
    monkeypatch.undo()
    x = torch.randn(2**18 + 1, 8192, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = torch.randn(8192, 4, device="cuda", dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, 2**18 - 8, 2**18 + 1], device="cuda", dtype=torch.int32)
    tail = x[-9:].detach().requires_grad_()
    y = short_conv(x, w, cu_seqlens=cu_seqlens, activation="silu")
    y_tail = short_conv(tail, w, activation="silu")
    assert torch.equal(y[-9:], y_tail)
    dy = torch.randn_like(y)
    y.backward(dy)
    y_tail.backward(dy[-9:])
    assert torch.equal(x.grad[-9:], tail.grad)


def test_programs_of_the_usual_width(device, check_close, monkeypatch):
    """Runs the sizes that other tests reduce: several programs share a row."""
    monkeypatch.undo()
    module = importlib.import_module("liger_triton.short_conv")
    monkeypatch.setattr(module, "BACKWARD", module.BACKWARD._replace(tokens=64))
    lengths = (70, 2)
    cu_seqlens = offsets(device, lengths)
    check_close(
        lambda x, w, b: short_conv(x, w, b, cu_seqlens=cu_seqlens, activation="silu"),
        lambda x, w, b: oracle(x, w, b, lengths),
        inputs(device, taps=3, lengths=lengths, channels=130),
    )
