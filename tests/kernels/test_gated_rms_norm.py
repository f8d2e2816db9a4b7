import importlib

import pytest
import torch

from liger_triton import gated_rms_norm, reference, rms_norm

DTYPES = [torch.float32, torch.bfloat16]
FORMS = {  # as in the model families that use them
    "qwen3-next": {},
    "kimi-linear": {"activation": "sigmoid", "cast": "gemma"},
    "mamba2": {"gate_first": True},
    "sigmoid-first": {"gate_first": True, "activation": "sigmoid", "cast": "gemma", "offset": 1.0},
}


def inputs(shape, dtype, device, weight_dtype=None, gate_dtype=None):
    x = 3 * torch.randn(shape, device=device)
    gate = 2 * torch.randn(shape, device=device)
    weight = torch.randn(shape[-1], device=device)
    given = x.to(dtype), gate.to(gate_dtype or dtype), weight.to(weight_dtype or dtype)
    return [t.requires_grad_() for t in given]


def oracle(x, gate, weight, activation="silu", gate_first=False, group_size=None, offset=0.0, cast=None, eps=1e-5):
    act = 1.0
    if gate is not None:
        act = torch.sigmoid(gate) * (gate if activation == "silu" else 1.0)
    h = x * act if gate_first else x
    groups = h.unflatten(-1, (-1, group_size or x.shape[-1]))
    y = (groups * (groups.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2) * (weight + offset)
    return y if gate_first else y * act


def check(check_close, options, given):
    check_close(lambda *t: gated_rms_norm(*t, 1e-5, **options), lambda *t: oracle(*t, **options), given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shape, group_size",
    [
        pytest.param((3, 1152), None, id="one-row-tiles-with-tail"),
        pytest.param((2, 37, 5, 20), None, id="many-narrow-rows"),  # several tiles for one program
        pytest.param((7, 33, 60), 12, id="five-groups"),
        pytest.param((3, 8400), 4200, id="two-groups-wider-than-a-tile"),
    ],
)
def test_matches_float64(shape, group_size, form, dtype, device, check_close):
    options = FORMS[form] | {"group_size": group_size}
    given = inputs(shape, dtype, device)
    if options.get("offset"):  # exact in bf16
        given[2] = (given[2].detach().sign() * 0.5).requires_grad_()
    check(check_close, options, given)


@pytest.mark.parametrize("cast, offset", [("llama", 0.0), ("gemma", 1.0)])
def test_without_a_gate_it_is_a_norm_of_groups(cast, offset, device, check_close):
    """Over whole rows it is `rms_norm`, bit for bit."""
    x, _, w = inputs((5, 7, 60), torch.float32, device)
    options = {"cast": cast, "offset": offset}
    check_close(
        lambda x, w: gated_rms_norm(x, None, w, 1e-5, group_size=12, **options),
        lambda x, w: oracle(x, None, w, group_size=12, offset=offset),
        [x, w],
    )
    assert torch.equal(gated_rms_norm(x, None, w, 1e-5, **options), rms_norm(x, w, 1e-5, **options))


@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("w_dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("gate_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_dtype_equals_the_twin_s(form, gate_dtype, w_dtype, x_dtype, device):
    given = inputs((5, 40), x_dtype, device, w_dtype, gate_dtype)
    got, want = (f(*given, 1e-6, **FORMS[form]) for f in (gated_rms_norm, reference.gated_rms_norm))
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    got.sum().backward()
    assert [t.grad.dtype for t in given] == [x_dtype, gate_dtype, w_dtype]


def test_casts_round_where_they_say(device):
    """The gate is all ones (sigmoid of a large number), the fp32 weight powers of two, and the rows bf16."""
    x = torch.randn(5, 64, device=device, dtype=torch.bfloat16)
    gate = torch.full_like(x, 50.0)
    w = 2.0 ** torch.randint(-3, 3, (64,), device=device)
    last = gated_rms_norm(x, gate, w, 1e-6, activation="sigmoid", gate_first=True)
    assert last.dtype == torch.float32 and torch.equal(last / w, (last / w).bfloat16().float()), "rounded, then scaled"
    first = gated_rms_norm(x, gate, w, 1e-6, activation="sigmoid")
    assert first.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_16_bit_results_equal_the_twin(form, dtype, device):
    given = inputs((64, 1024), dtype, device)
    got, want = (f(*given, 1e-6, **FORMS[form]) for f in (gated_rms_norm, reference.gated_rms_norm))
    assert (got != want).float().mean() < 2e-3


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda t: t[:, ::2, :40], id="row-stride"),
        pytest.param(lambda t: t.transpose(0, 1)[..., 3:43], id="transposed"),
        pytest.param(lambda t: t.transpose(1, 2), id="column-stride"),
    ],
)
@pytest.mark.parametrize("form", ["qwen3-next", "mamba2"])
def test_non_contiguous(form, view, device, check_close):
    """Rows have gaps, as in a slice of a fused projection, or need a copy."""
    x, gate = (view(torch.randn(3, 8, 64, device=device)).requires_grad_() for _ in range(2))
    w = torch.randn(2 * x.shape[-1], device=device)[::2].requires_grad_()
    check(check_close, FORMS[form] | {"group_size": x.shape[-1] // 4}, [x, gate, w])


@pytest.mark.parametrize("form", FORMS)
def test_non_contiguous_upstream(form, device, check_upstream_strides):
    check_upstream_strides(lambda *t: gated_rms_norm(*t, 1e-5, **FORMS[form]), inputs((4, 21), torch.float32, device))


@pytest.mark.parametrize("form", FORMS)
def test_frozen_weight_and_gate(form, device):
    x, gate, w = inputs((4, 24), torch.float32, device)
    want = torch.autograd.grad(gated_rms_norm(x, gate, w, 1e-6, **FORMS[form]).pow(3).sum(), x)[0]
    gated_rms_norm(x, gate.detach(), w.detach(), 1e-6, **FORMS[form]).pow(3).sum().backward()
    torch.testing.assert_close(x.grad, want, rtol=0, atol=0)


def test_weight_gradient_is_deterministic(device):
    x, gate, w = inputs((300, 20), torch.bfloat16, device)
    first, second = (torch.autograd.grad(gated_rms_norm(x, gate, w, 1e-6).float().sin().sum(), w)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_inputs_and_upstream_gradient_stay(device):
    given = inputs((5, 24), torch.float32, device)
    dy = torch.randn(5, 24, device=device)
    copies = [t.detach().clone() for t in (*given, dy)]
    gated_rms_norm(*given, 1e-6).backward(dy)
    assert all(map(torch.equal, (*given, dy), copies))


def test_one_tensor_as_both(device):
    x, _, w = inputs((5, 24), torch.float32, device)
    (got,) = torch.autograd.grad(gated_rms_norm(x, x, w, 1e-5).sin().sum(), x)
    (want,) = torch.autograd.grad(oracle(x, x, w).sin().sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_second_backward_raises(device):
    loss = gated_rms_norm(*inputs((5, 24), torch.float32, device), 1e-6).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", [0, 1], ids=["x", "gate"])
def test_nan_stays_in_its_group(place, form, device):
    given = inputs((5, 24), torch.float32, device)
    with torch.no_grad():
        given[place][2, 3] = float("nan")
    bad = gated_rms_norm(*given, 1e-6, group_size=8, **FORMS[form]).isnan()
    alone = place == 1 and not FORMS[form].get("gate_first")
    assert bad[2, 3] and bad.sum() == (1 if alone else 8)


def test_extreme_gates(device):
    """Values and gradients are finite at both ends, also with the gate first, where a row becomes zeros."""
    for options in FORMS.values():
        x, _, w = inputs((4, 24), torch.float32, device)
        gate = torch.tensor([-1e4, -100.0, 100.0, 1e4], device=device)[:, None].expand(4, 24).clone().requires_grad_()
        y = gated_rms_norm(x, gate, w, 1e-6, **options)
        grads = torch.autograd.grad(y.sum(), (x, gate, w))
        assert all(t.isfinite().all() for t in (y, *grads))


@pytest.mark.parametrize("shape", [(0, 24), (3, 0, 24)], ids=str)
def test_empty(shape, device):
    given = inputs(shape, torch.float32, device)
    y = gated_rms_norm(*given, 1e-6)
    y.sum().backward()
    assert y.shape == given[0].grad.shape == given[1].grad.shape and not given[2].grad.any()


def test_float64_is_exact(device):
    given = inputs((4, 24), torch.float64, device)
    for options in FORMS.values():
        call = lambda *t, options=options: gated_rms_norm(*t, 1e-6, group_size=8, **options)  # noqa: E731
        assert torch.autograd.gradcheck(call, given)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "twin"])
def test_compiles(dtype, form, device, check_compiled):
    check_compiled(lambda *t: gated_rms_norm(*t, 1e-6, group_size=8, **FORMS[form]), inputs((2, 3, 24), dtype, device))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight": torch.ones(23)}, r"weight is \(23,\), x \(5, 24\); expected weight \(24,\)"),
        ({"gate": torch.ones(5, 23)}, r"gate is \(5, 23\) torch.float32 on cpu, x \(5, 24\)"),
        ({"gate": torch.ones(5, 24, device="meta")}, "gate is .* on meta"),
        ({"gate": torch.ones(5, 24, dtype=torch.int64)}, "gate is .* torch.int64"),
        ({"activation": "relu"}, "activation is 'relu'; expected one of 'silu', 'sigmoid'"),
        ({"cast": "none"}, "cast is 'none'; expected one of 'llama', 'gemma'"),
        ({"group_size": 5}, r"group_size is 5, x \(5, 24\); expected a divisor of 24"),
        ({"group_size": 0}, "group_size is 0"),
    ],
)
def test_bad_input(change, message):
    given = {"x": torch.ones(5, 24), "gate": torch.ones(5, 24), "weight": torch.ones(24), "eps": 1e-6} | change
    with pytest.raises(ValueError, match=message):
        gated_rms_norm(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["qwen3-next", "mamba2"])
def test_offsets_past_int32(form):
    """Use 2**31 + 8192 elements. The last rows equal a call on those rows alone."""
    x, gate = (torch.randn(2**18 + 1, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w = torch.randn(8192, device="cuda", dtype=torch.bfloat16)
    tails = [t[-3:].clone().requires_grad_() for t in (x, gate)]
    x.requires_grad_()
    y, y_tail = (gated_rms_norm(*t, w, 1e-6, group_size=1024, **FORMS[form]) for t in ((x, gate), tails))
    assert torch.equal(y[-3:], y_tail)
    dy = torch.randn_like(y)
    y.backward(dy)
    y_tail.backward(dy[-3:])
    assert torch.equal(x.grad[-3:], tails[0].grad)


def test_more_groups_than_a_grid_has_programs(device):
    """65,536 groups of one column run on the PyTorch twin."""
    x = torch.randn(2, 65536, device=device)
    got = gated_rms_norm(x, x, torch.ones(65536, device=device), 1e-6, group_size=1)
    torch.testing.assert_close(
        got, reference.gated_rms_norm(x, x, torch.ones(65536, device=device), 1e-6, group_size=1)
    )


def test_stages_are_counted_by_the_size_of_each_tensor(monkeypatch):
    """Three tiles of 8192 numbers, dy in fp32 and x and z in 16 bits, take 192 KiB: too much for an A100."""
    module = importlib.import_module("liger_triton._launch")
    monkeypatch.setattr(module, "shared_memory", lambda device: 166912 - 2048)
    x, dy = torch.empty(1, dtype=torch.bfloat16), torch.empty(1)
    assert module.backward_tile(4096, x.device, x, x, x)[3] == 3
    assert module.backward_tile(4096, x.device, x, dy, x)[3] == 2
    assert module.backward_tile(4096, x.device, dy, dy, dy)[3] == 1
