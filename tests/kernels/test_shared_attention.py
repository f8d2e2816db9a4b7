"""Merged attention of several calls against one softmax over all keys, by autograd in float64."""

import pytest
import torch

import liger_triton.shared_attention as shared
from liger_triton.shared_attention import AttentionCall, shared_attention

PREFIXES = (5, 3)
LONE = (4,)
PRIVATE = ((2, 1, 6), (3, 2))
HEADS = 4
GROUPS = 2
DIM = 16


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def calls():
    flat = [n for parts in PRIVATE for n in parts]
    segments = offsets([*PREFIXES, *LONE, *flat])
    of_groups = offsets([sum(parts) for parts in PRIVATE])
    first = sum(PREFIXES) + sum(LONE)
    return [
        AttentionCall(0, segments, 6, int(segments[-1]), segments, 6, causal=True),
        AttentionCall(first, of_groups, 9, sum(PREFIXES), offsets(PREFIXES), 5, causal=False),
    ]


FILLING = 7


def calls_of_a_replay():
    """Both calls over all tokens and a filling row, with rows that have no keys, no queries, or neither."""
    flat = [n for parts in PRIVATE for n in parts]
    segments = offsets([*PREFIXES, *LONE, *flat, FILLING, 0, 0])
    tokens = int(segments[-1])
    begin, of_groups = sum(PREFIXES) + sum(LONE), [sum(parts) for parts in PRIVATE]
    queries = offsets([begin, *of_groups, FILLING, 0, 0])
    keys = offsets([0, *PREFIXES, 0, tokens - sum(PREFIXES), 0])
    return [
        AttentionCall(0, segments, 16, tokens, segments, 16, causal=True),
        AttentionCall(0, queries, 16, tokens, keys, tokens, causal=False),
    ]


CALLS = pytest.mark.parametrize("calls, filling", [(calls, 0), (calls_of_a_replay, FILLING)], ids=["", "replay"])


def seen(filling=0):
    """(T, T): the tokens that each token sees."""
    segments = offsets([*PREFIXES, *LONE, *(n for parts in PRIVATE for n in parts), filling]).tolist()
    tokens = segments[-1]
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for start, end in zip(segments, segments[1:], strict=False):
        mask[start:end, start:end] = torch.ones(end - start, end - start).tril().bool()
    at = sum(PREFIXES) + sum(LONE)
    begin = 0
    for prefix, parts in zip(PREFIXES, PRIVATE, strict=True):
        mask[at : at + sum(parts), begin : begin + prefix] = True
        at += sum(parts)
        begin += prefix
    return mask


def inputs(dtype, filling=0):
    tokens = len(seen(filling))
    draw = torch.Generator().manual_seed(0)
    shapes = (tokens, HEADS, DIM), (tokens, GROUPS, DIM), (tokens, GROUPS, DIM), (HEADS,), (tokens, HEADS, DIM)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def by_autograd(q, k, v, sinks, mask, scale):
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    scores = scale * torch.einsum("ihd,jhd->hij", q, k)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., : len(k)], v)


def gradients(function, given, upstream):
    leaves = [x.clone().requires_grad_() for x in given]
    out = function(*leaves)
    out.backward(upstream)
    return [out.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@CALLS
def test_two_calls_are_one_softmax(calls, filling, dtype, rtol, has_sinks):
    *given, upstream = inputs(dtype, filling)
    given = given if has_sinks else given[:3]
    scale = 0.3

    def ours(q, k, v, sinks=None):
        return shared_attention(q, k, v, calls(), scale=scale, sinks=sinks)

    def want(q, k, v, sinks=None):
        return by_autograd(q, k, v, sinks, seen(filling), scale)

    wide = [x.double() for x in given]
    for found, expected in zip(gradients(ours, given, upstream), gradients(want, wide, upstream.double()), strict=True):
        assert (found.double() - expected).norm() <= rtol * expected.norm()


def test_a_window_over_rows_with_keys_before_their_queries():
    """One causal call in which rows have more keys than queries. Keys and queries end together."""
    q, k, v, _, upstream = inputs(torch.float64)
    q, upstream = q[:5], upstream[:5]
    call = AttentionCall(0, offsets([2, 3]), 3, 12, offsets([4, 8]), 8, True, 3)
    mask = torch.zeros(5, 12, dtype=torch.bool)
    for query, end in ((0, 3), (1, 4), (2, 10), (3, 11), (4, 12)):
        mask[query, max(end - 3, 0 if query < 2 else 4) : end] = True
    given = [q, k[:12], v[:12]]
    found = gradients(lambda q, k, v: shared_attention(q, k, v, [call], scale=0.25), given, upstream)
    for got, want in zip(found, gradients(lambda *x: by_autograd(*x, None, mask, 0.25), given, upstream), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("start", [0, 5, 18])
@pytest.mark.parametrize("heads, dim", [(3, 16), (4, 24), (9, 128)])
def test_the_kernel_merges_as_the_formulas_do(start, heads, dim):
    draw = torch.Generator().manual_seed(1)
    tokens = 19
    o, other = torch.randn(tokens, heads, dim, generator=draw), torch.randn(tokens - start, heads, dim, generator=draw)
    level, other_level = 4 * torch.randn(heads, tokens, generator=draw), 4 * torch.randn(heads, tokens - start)
    other_level[:, 0] = float("inf")  # queries that have seen no key of the other call
    other_level[0] = float("-inf")
    other_level[1] = 90.0
    given = [x.to("cuda" if torch.cuda.is_available() else "cpu") for x in (o, level, other, other_level)]
    wanted = shared._merge(*(x.double() for x in (o, level, other, other_level)), start)
    for got, want in zip(shared._merge_by_kernel(*given, start), wanted, strict=True):
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-6, atol=1e-6)


def test_heads_that_are_too_wide_are_refused():
    q = torch.zeros(3, 1, 264)
    with pytest.raises(ValueError, match="wider than 256"):
        shared_attention(q, q, q, calls())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@CALLS
def test_flash_attention_gives_the_same(calls, filling, dtype, has_sinks):
    *given, upstream = inputs(dtype, filling)
    given = given if has_sinks else given[:3]
    torch.full((1 << 28,), float("nan"), dtype=dtype, device="cuda")  # so that memory nobody writes to shows
    on_gpu = [x.cuda() for x in given]
    moved = [
        call._replace(query_offsets=call.query_offsets.cuda(), key_offsets=call.key_offsets.cuda()) for call in calls()
    ]

    def ours(q, k, v, sinks=None):
        return shared_attention(q, k, v, moved, scale=0.3, sinks=sinks)

    def want(q, k, v, sinks=None):
        return by_autograd(q, k, v, sinks, seen(filling), 0.3)

    wide = [x.double() for x in given]
    found = gradients(ours, on_gpu, upstream.cuda())
    for got, expected in zip(found, gradients(want, wide, upstream.double()), strict=True):
        assert (got.cpu().double() - expected).norm() <= 5e-3 * expected.norm()
