"""Products that multiply the last words separately: here on any device, in the package on GPUs with 16 bits."""

from types import SimpleNamespace

import pytest
import torch

from liger_triton import _products, linear_cross_entropy, linear_heads_kl, reference

V = 43
H = 24
N = 9


def test_word_slices():
    gpu = SimpleNamespace(is_cuda=True, element_size=lambda: 2)
    assert _products._word_slices(50257, gpu) == [slice(50256, 50257), slice(0, 50256)]
    assert _products._word_slices(128256, gpu) == [slice(0, 128256)]
    assert _products._word_slices(5, gpu) == [slice(0, 5)]  # nothing but words past a multiple
    assert _products._word_slices(50257, torch.empty(0, dtype=torch.bfloat16)) == [slice(0, 50257)]
    assert _products._word_slices(50257, SimpleNamespace(is_cuda=True, element_size=lambda: 4)) == [slice(0, 50257)]


@pytest.fixture
def split(monkeypatch):
    """Split off the words past the last multiple of 8 on any device and in any dtype; count how often."""
    calls = []

    def word_slices(vocab, like):
        calls.append(vocab)
        return [slice(vocab // 8 * 8, vocab), slice(0, vocab // 8 * 8)]

    monkeypatch.setattr(_products, "_word_slices", word_slices)
    return calls


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_parts(bias, device, split):
    x, w, b = (torch.randn(*shape, device=device) for shape in ((N, H), (V, H), (V,)))
    logits = torch.empty(N, 64, device=device)[:, :V]
    _products.project(x, w, logits, b if bias else None)
    want = x @ w.t() + (b if bias else 0.0)
    torch.testing.assert_close(logits, want)
    _products.project(x, w, logits, add=True)
    torch.testing.assert_close(logits, want + x @ w.t())
    torch.testing.assert_close(_products.back(logits, w), logits @ w)
    out = torch.empty(N, H, device=device)
    assert _products.back(logits, w, out=out) is out
    torch.testing.assert_close(out, logits @ w)
    total = torch.empty(V, H, device=device)
    for started in (False, True):
        _products.add_outer(total, logits, x, started)
    torch.testing.assert_close(total, 2 * logits.t() @ x)


@pytest.mark.parametrize("accumulate", ["fp32", "lean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_head_of_parts_matches_float64(dtype, accumulate, device, check_close, split):
    x, w, b = (torch.randn(*shape, device=device) for shape in ((N, H), (V, H), (V,)))
    lora = [0.3 * torch.randn(*shape, device=device) for shape in ((4, H), (V, 4))]
    tensors = [t.to(dtype).requires_grad_() for t in (x, w / H**0.5, b, *lora)]
    y = torch.randint(0, V, (N,), device=device)
    y[:2] = torch.tensor([V - 1, -100])

    def loss(head, **options):
        return lambda x, w, b, lora_a, lora_b: head(x, w, y, b, lora=(lora_a, lora_b, 0.5), **options)

    check_close(
        loss(linear_cross_entropy, chunk_rows=4, accumulate=accumulate), loss(reference.linear_cross_entropy), tensors
    )
    assert {V} == set(split)


def test_soft_heads_of_parts_match_float64(device, check_close, split):
    teacher = [torch.randn(12, H, device=device), torch.randn(V, H, device=device) / H**0.5]
    heads = [torch.randn(2, 12, H, device=device).requires_grad_(), torch.randn(V, H, device=device).requires_grad_()]
    valid = torch.rand(2, 12, device=device) < 0.8

    def loss(head, *given, **options):
        return lambda x, w: head(x, w, *(t.to(x.dtype) for t in given), valid, **options).loss

    check_close(loss(linear_heads_kl, *teacher, chunk_rows=4), loss(reference.linear_heads_kl, *teacher), heads)
    assert {V} == set(split)
