import importlib

import pytest
import torch
import torch.nn.functional as F

from liger_triton import lora_mlp
from liger_triton.gates import gate_of_sums, gradients_of_sums, takes

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"), "gelu": F.gelu}


def given(rows, columns, ranks, dtype, device):
    """Return da, g, u and their products; rank 0 means no product.

    Factors are slices of wider tensors, one of them in the other memory order.
    """
    tiles = [torch.randn(rows, columns, device=device).to(dtype) for _ in range(3)]
    products = []
    for k, rank in enumerate(ranks):
        h = torch.randn(rows, rank + 3, device=device).to(dtype)[:, 2 : 2 + rank]
        f = torch.randn(rank, columns, device=device) if k == 0 else torch.randn(columns, rank + 1, device=device).t()
        products.append((h, f.to(dtype)[:rank]) if rank else None)
    return tiles, products


def in_float64(tiles, products, activation):
    da, g, u = (
        (t.double() + (0 if product is None else product[0].double() @ product[1].double()))
        for t, product in zip(tiles, products, strict=True)
    )
    g, u = g.requires_grad_(), u.requires_grad_()
    a = ACTIVATIONS[activation](g) * u
    return *torch.autograd.grad(a, (g, u), da), a.detach()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "rows, columns, ranks",
    [
        pytest.param(64, 256, (16, 16, 16), id="full-tiles"),
        pytest.param(37, 200, (4, 3, 21), id="tails"),
        pytest.param(1, 8, (1, 1, 1), id="one-row"),
        pytest.param(33, 136, (0, 5, 0), id="gate-alone"),
        pytest.param(33, 136, (64, 0, 2), id="without-gate"),
        pytest.param(33, 136, (7, 0, 0), id="gradient-alone"),
    ],
)
def test_matches_float64(rows, columns, ranks, dtype, activation, device, triton_only):
    (da, g, u), (to_da, to_g, to_u) = tiles, products = given(rows, columns, ranks, dtype, device)
    *want, want_a = in_float64(tiles, products, activation)
    if any(ranks[1:]):
        a = gate_of_sums(g, u, to_g, to_u, activation)
        assert a.dtype == dtype and (a.double() - want_a).norm() <= 5e-3 * want_a.norm()
    got = gradients_of_sums(da, g, u, to_da, to_g, to_u, activation)
    assert got[2].data_ptr() == da.data_ptr()
    for name, t, w in zip("dg du a".split(), got, (*want, want_a), strict=True):
        assert (t.double() - w).norm() <= 5e-3 * w.norm(), name


def test_what_it_takes(device, triton_only):
    x = torch.zeros(2, 2, device=device)
    assert takes(torch.bfloat16, x, [16, 0]) and takes(torch.float16, x, [64, 64])
    assert not takes(torch.bfloat16, x, [0, 0]) and not takes(torch.bfloat16, x, [16, 65])
    assert not takes(torch.float32, x, [16, 16])  # its products would be rounded to TF32


def test_a_nan_is_not_hidden(device, triton_only):
    (da, g, u), (to_da, to_g, to_u) = given(5, 40, (2, 2, 2), torch.bfloat16, device)
    g[3, 17] = float("nan")
    assert gate_of_sums(g, u, to_g, to_u, "silu").isnan().nonzero().tolist() == [[3, 17]]
    dg, du, a = gradients_of_sums(da, g, u, to_da, to_g, to_u, "silu")
    assert all(t.isnan().nonzero().tolist() == [[3, 17]] for t in (dg, du, a))


@pytest.mark.parametrize("ranks", [(3, 5, 4), (0, 0, 4), (3, 0, 0), (0, 5, 4), (3, 5, 0)], ids=str)
@pytest.mark.parametrize("retain", [False, True])
def test_an_mlp_is_as_near_to_float64_as_with_products_of_their_own(ranks, retain, device, triton_only, monkeypatch):
    """In bf16 g and u are rounded either way. Backward runs twice; the first keeps the graph."""
    torch.manual_seed(0)
    x = torch.randn(45, 24, device=device).bfloat16().requires_grad_()
    projections = []
    for (n, k), rank in zip(((56, 24), (56, 24), (40, 56)), ranks, strict=True):
        weight = (torch.randn(n, k, device=device) / k**0.5).bfloat16()
        a = torch.randn(rank, k, device=device) / k**0.5
        b = torch.randn(n, rank, device=device) / (rank + 1) ** 0.5
        projections.append((weight, None, (a.requires_grad_(), b.requires_grad_(), 0.5) if rank else None))
    leaves = [x, *[t for *_, lora in projections if lora is not None for t in lora[:2]]]
    dy = torch.randn(45, 40, device=device).bfloat16()

    def results():
        y = lora_mlp(x, *projections)
        first = torch.autograd.grad(y, leaves, dy, retain_graph=retain)
        for again, t in zip(torch.autograd.grad(y, leaves, dy), first, strict=True) if retain else ():
            assert torch.equal(again, t)
        return [y, *first]

    def exact():
        wide = [t.detach().double().requires_grad_() for t in leaves]
        rest = iter(wide[1:])

        def call(x, weight, lora):
            y = x @ weight.double().t()
            return y if lora is None else y + 0.5 * (x @ next(rest).t()) @ next(rest).t()

        gate, up = (call(wide[0], weight, lora) for weight, _, lora in projections[:2])
        y = call(F.silu(gate) * up, projections[2][0], projections[2][2])
        return [y, *torch.autograd.grad(y, wide, dy.double())]

    got = results()
    monkeypatch.setattr(importlib.import_module("liger_triton.lora_mlp"), "takes", lambda *_: False)
    for ours, apart, want in zip(got, results(), exact(), strict=True):
        assert (ours.double() - want).norm() <= 1.3 * (apart.double() - want).norm()
