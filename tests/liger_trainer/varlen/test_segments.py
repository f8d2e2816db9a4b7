"""Attention within the segments of a sequence equals float64 with the mask written out."""

import pytest
import torch

from liger_trainer.varlen.registry import sdpa_attention
from liger_trainer.varlen.segments import NotInSegments, segments_of, use_segments

LENGTHS = (8, 3, 8, 0, 1, 8)
TOKENS = sum(LENGTHS)


def offsets(lengths=LENGTHS, dtype=torch.int32, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)


def inputs(heads=4, kv_heads=4, dim=16, tokens=TOKENS, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    return tuple(
        torch.randn(1, tokens, n, dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )


def exact(query, key, value, lengths, scale, upstream):
    """Output and gradients in float64."""
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(query.device)
    given = [x.detach().double().requires_grad_() for x in (query, key, value)]
    q, k, v = given[0], *(x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in given[1:])
    scores = (q @ k.mT * scale).masked_fill(segment[:, None] != segment, float("-inf"))
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    return out, *torch.autograd.grad(out, given, upstream.double())


def attend(query, key, value, segments, **options):
    with use_segments(segments):
        return sdpa_attention(torch.nn.Module(), query, key, value, None, is_causal=False, **options)[0]


@pytest.mark.parametrize("lengths", [LENGTHS, (7, 7, 7, 7), (1, 2, 3, 4, 18), (28,)])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_values_and_gradients(lengths, kv_heads, dtype):
    given = inputs(kv_heads=kv_heads)
    got = attend(*given, segments_of(offsets(lengths, dtype)), scaling=0.3)
    upstream = torch.randn_like(got)
    grads = torch.autograd.grad(got, given, upstream)
    for mine, want in zip((got, *grads), exact(*given, lengths, 0.3, upstream), strict=True):
        assert (mine.double() - want).norm() <= 1e-6 * want.norm()


def test_one_call_for_each_length(monkeypatch):
    calls, own = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda q, *a, **k: calls.append(q.shape) or own(q, *a, **k)
    )
    attend(*inputs(), segments_of(offsets()))
    assert [shape[:3] for shape in calls] == [(1, 4, 1), (1, 4, 3), (3, 4, 8)]


def test_the_second_gradient():
    given = tuple(x.detach().double().requires_grad_() for x in inputs(heads=1, kv_heads=1, dim=4, tokens=5))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(lambda *x: attend(*x, segments_of(offsets((2, 1, 2)))), given)


def test_segments_are_read_once_and_again_after_a_change():
    x = offsets()
    assert segments_of(x) is segments_of(x)
    x[1] -= 1
    assert segments_of(x).lengths == [7, 4, 8, 0, 1, 8]
    assert x.clone().__dict__ == {}


@pytest.mark.parametrize(
    "more", [{"attention_mask": torch.ones(1)}, {"is_causal": True}, {"softcap": 5.0}, {"tokens": TOKENS + 1}]
)
def test_calls_that_segments_cannot_serve_are_refused(more):
    given = inputs(tokens=more.pop("tokens", TOKENS))
    with use_segments(segments_of(offsets())), pytest.raises(NotInSegments):
        sdpa_attention(torch.nn.Module(), *given, **({"attention_mask": None} | more))


def test_without_segments_it_is_transformers_own():
    given = inputs()
    got, _ = sdpa_attention(torch.nn.Module(), *given, None, is_causal=False)
    want = torch.nn.functional.scaled_dot_product_attention(*given)
    assert torch.equal(got, want.transpose(1, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dim", [64, 72, 80, 128])
@pytest.mark.parametrize("lengths", [(64,) * 9, (130, 1, 517, 0, 64, 300)])
def test_the_kernel(dim, lengths):
    given = inputs(dim=dim, tokens=sum(lengths), dtype=torch.bfloat16, device="cuda")
    segments = segments_of(offsets(lengths, device="cuda"))
    torch.cuda.set_sync_debug_mode("error")  # the lengths are known now
    try:
        got = attend(*given, segments, scaling=0.1)
        upstream = torch.randn_like(got)
        grads = torch.autograd.grad(got, given, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for mine, want in zip((got, *grads), exact(*given, lengths, 0.1, upstream), strict=True):
        assert (mine.double() - want).norm() <= 3 * torch.finfo(torch.bfloat16).eps * want.norm()
