"""The short convolution that writes three tensors, and reads three gradients: the same numbers as with one of each."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from liger_triton import reference, short_conv

LENGTHS = (5, 1, 0, 23, 0, 2, 9)
WIDTHS = [(16, 16, 32), (3, 50, 7), (1, 1, 1)]  # in vectors of 32 channels: part of one, several, both
if torch.cuda.is_available():
    WIDTHS.append((40, 40, 16))


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    """Programs of 16 and 20 tokens by 32 channels, so that small rows take several."""
    module = importlib.import_module("liger_triton.short_conv")
    small = {"FORWARD_RUN": 4, "FORWARD_TOKENS": 16, "BACKWARD_TOKENS": 20, "CHANNELS": 32, "PROGRAMS": 1}
    for name, size in small.items():
        monkeypatch.setattr(module, name, size)


def inputs(device, dtype, channels, *, bias=True):
    shapes = (sum(LENGTHS), channels), (channels, 4), (channels,)
    x, w, b = (torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes)
    return [x, w, b if bias else None]


def offsets(device):
    return torch.tensor((0, *LENGTHS), device=device).cumsum(0).int()


def oracle(x, w, b, widths):
    """Convolve each row by PyTorch's own convolution, and cut the result."""
    done, channels = [], x.shape[1]
    for row in x.split(list(LENGTHS)):
        if len(row):
            y = F.conv1d(row.t()[None], w[:, None], b, padding=w.shape[1] - 1, groups=channels)
            done.append(F.silu(y[0, :, : len(row)].t()))
    return torch.cat(done).split(list(widths), 1)


@pytest.mark.parametrize("widths", [(16, 16, 32), (3, 50, 7)], ids=str)
def test_a_program_writes_its_own_channels_alone(widths, device, triton_only, monkeypatch):
    """The first program runs without the others, which would write over what it writes past the end of its part."""
    module = importlib.import_module("liger_triton.short_conv")
    own, written = module.launch, []

    def first_alone(kernel, grid, *args, **constants):
        written[:] = args[7:8] if kernel is module._backward_kernel else args[4:7]  # dx, or the parts of y
        for tensor in written:
            tensor.fill_(7.0)
        own(kernel, (1,), *args, **constants)

    x, w, b = (tensor.detach() for tensor in inputs(device, torch.float32, sum(widths)))
    options = {"cu_seqlens": offsets(device), "activation": "silu"}
    whole = short_conv(x, w, b, **options)
    monkeypatch.setattr(module, "launch", first_alone)
    parts = short_conv(x.requires_grad_(), w, b, **options, split=widths)
    assert torch.equal(written[0][:16], whole[:16, : widths[0]])
    assert all((rest == 7.0).all() for rest in (written[0][16:], *written[1:]))
    torch.autograd.grad(parts, x, [torch.randn_like(part) for part in parts])
    (dx,) = written
    assert (dx[:, widths[0] :] == 7.0).all() and (dx[:16, : widths[0]] != 7.0).all()


def check_gradients(got, want):
    """Those of x and the weight are the same bits. On a GPU, the two kernels add up the bias in different orders."""
    *exact, bias = zip(got, want, strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in exact)
    if bias[0].is_cuda:
        torch.testing.assert_close(*bias, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(*bias)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype, bias", [(torch.float32, True), (torch.bfloat16, False)], ids=str)
def test_matches_float64(dtype, bias, widths, device, check_close):
    cu_seqlens = offsets(device)
    check_close(
        lambda x, w, b: short_conv(x, w, b, cu_seqlens=cu_seqlens, activation="silu", split=widths),
        lambda x, w, b: oracle(x, w, b, widths),
        inputs(device, dtype, sum(widths), bias=bias),
    )


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_bits_are_those_of_one_tensor(widths, device):
    given = inputs(device, torch.float32, sum(widths))
    options = {"cu_seqlens": offsets(device), "activation": "silu"}
    whole, parts = short_conv(*given, **options), short_conv(*given, **options, split=widths)
    assert type(parts) is tuple and all(part.is_contiguous() for part in parts)
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 3
    assert all(map(torch.equal, parts, whole.split(widths, 1)))
    upstream = torch.randn_like(whole)
    want = torch.autograd.grad(whole, given, upstream)
    got = torch.autograd.grad(parts, given, upstream.split(widths, 1))
    check_gradients(got, want)


def test_gradients_are_read_where_they_are(device, triton_only, monkeypatch):
    """The kernel gets the memory of each, with strides of their own."""
    module = importlib.import_module("liger_triton.short_conv")
    given, own = [], module.launch
    widths, tokens = (16, 16, 32), sum(LENGTHS)
    leaves = inputs(device, torch.float32, sum(widths))
    options = {"cu_seqlens": offsets(device), "activation": "silu"}
    parts = short_conv(*leaves, **options, split=widths)
    upstream = [torch.randn(tokens, 3 * width, device=device)[:, :width] for width in widths]
    monkeypatch.setattr(module, "launch", lambda *args, **constants: given.append(args) or own(*args, **constants))
    got = torch.autograd.grad(parts, leaves, upstream)
    assert [t.data_ptr() for t in given[0][2:5]] == [t.data_ptr() for t in upstream]
    want = torch.autograd.grad(short_conv(*leaves, **options), leaves, torch.cat(upstream, 1))
    check_gradients(got, want)


def test_a_part_that_is_not_used_has_no_gradient(device):
    widths = (16, 16, 32)
    given = inputs(device, torch.float32, sum(widths))
    _, keys, _ = short_conv(*given, split=widths)
    keys.sum().backward()
    assert not given[0].grad[:, :16].any() and not given[0].grad[:, 32:].any()
    assert given[0].grad[:, 16:32].any() and not given[1].grad[:16].any()


@pytest.mark.parametrize("trained", [(0,), (1, 2)], ids=str)
def test_frozen_parts_get_no_gradient(trained, device, check_close):
    widths = (3, 3, 8)
    given = [t.detach().requires_grad_(i in trained) for i, t in enumerate(inputs(device, torch.float32, 14))]
    cu_seqlens = offsets(device)
    check_close(
        lambda x, w, b: short_conv(x, w, b, cu_seqlens=cu_seqlens, activation="silu", split=widths),
        lambda x, w, b: oracle(x, w, b, widths),
        given,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "twin"])
def test_compiles(dtype, device, check_compiled):
    cu_seqlens = offsets(device)
    check_compiled(
        lambda x, w, b: short_conv(x, w, b, cu_seqlens=cu_seqlens, activation="silu", split=(2, 3, 4)),
        inputs(device, dtype, 9),
    )


def test_without_a_graph(device):
    x, w, b = inputs(device, torch.float32, 9)
    with torch.no_grad():
        got = short_conv(x, w, b, split=[2, 3, 4])
        want = reference.short_conv(x, w, b, split=[2, 3, 4])
        none = short_conv(x[:0], w, b, split=[2, 3, 4])
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
    assert [tuple(part.shape) for part in none] == [(0, 2), (0, 3), (0, 4)]


@pytest.mark.parametrize("split", [(4, 4), (4, 4, 4), (8, 0, 0), (2, 2, 2, 2), (-1, 1, 8)], ids=str)
def test_bad_widths(split):
    with pytest.raises(ValueError, match=r"split is .*, x \(5, 8\); expected three widths .* sum to 8"):
        short_conv(torch.ones(5, 8), torch.ones(8, 4), split=split)


@pytest.mark.gpu
def test_at_the_size_of_a_model(device, monkeypatch):
    """Queries, keys and values of Qwen3.5-4B, in programs of the usual size."""
    monkeypatch.undo()
    widths = (2048, 2048, 4096)
    given = inputs(device, torch.bfloat16, sum(widths), bias=False)[:2]
    options = {"cu_seqlens": offsets(device), "activation": "silu"}
    whole, parts = short_conv(*given, **options), short_conv(*given, **options, split=widths)
    assert all(map(torch.equal, parts, whole.split(widths, 1)))
    upstream = torch.randn_like(whole)
    want = torch.autograd.grad(whole, given, upstream)
    got = torch.autograd.grad(parts, given, [dy.contiguous() for dy in upstream.split(widths, 1)])
    assert all(map(torch.equal, got, want))
