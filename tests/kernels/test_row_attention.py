"""Row attention against float64 with all scores written out: windows, soft caps, sinks, and rows of any length."""

import pytest
import torch

from liger_triton import reference, row_attention

LENGTHS = (5, 1, 40, 0, 23)
TOKENS = sum(LENGTHS)
# Triton's interpreter cannot multiply bf16; only a GPU tests it.
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]


def offsets(device, lengths=LENGTHS):
    return torch.tensor((0, *lengths)).cumsum(0).int().to(device)


def oracle(q, k, v, sinks=None, *, lengths=LENGTHS, scale=None, window=None, softcap=None):
    """Return (T, H, D) by one softmax over all tokens."""
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(q.device)
    distance = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(q), device=q.device)
    seen = (distance >= 0) & (row[:, None] == row)
    seen = seen if window is None else seen & (distance < window)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sinks = sinks[:, None] if sinks.ndim == 1 else sinks  # one for each head, or for each of its tokens
        scores = torch.cat((scores, sinks[:, :, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., : len(q)], v)


def inputs(device, dtype=torch.float32, heads=4, groups=2, dim=16, sinks=True, tokens=TOKENS):
    shapes = (tokens, heads, dim), (tokens, groups, dim), (tokens, groups, dim), (heads,)
    made = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    return made if sinks else made[:3]


OPTIONS = [  # each pair of values
    (sinks, window, (None, 1.5)[(i + sinks) % 2])
    for i, window in enumerate((None, 2, 7, 100))
    for sinks in (True, False)
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sinks, window, softcap", OPTIONS)
def test_matches_float64(sinks, window, softcap, dtype, device, check_close):
    def ours(q, k, v, z=None):
        return row_attention(q, k, v, offsets(device), 40, window=window, softcap=softcap, sinks=z)

    check_close(ours, lambda *given: oracle(*given, window=window, softcap=softcap), inputs(device, dtype, sinks=sinks))


@pytest.mark.parametrize("heads, groups, dim", [(3, 3, 24), (4, 1, 8), (2, 2, 80)])
def test_heads_and_head_sizes(heads, groups, dim, device, check_close):
    check_close(
        lambda q, k, v, z: row_attention(q, k, v, offsets(device), 40, softcap=20.0, scale=0.4, sinks=z, window=9),
        lambda *given: oracle(*given, softcap=20.0, scale=0.4, window=9),
        inputs(device, heads=heads, groups=groups, dim=dim),
    )


def test_more_than_a_tile(device, check_close):
    """150 tokens exceed a program's 128; a window of 70 exceeds the 64 of a loop step."""
    lengths = (150, 3)
    check_close(
        lambda q, k, v, z: row_attention(q, k, v, offsets(device, lengths), 150, softcap=5.0, sinks=z, window=70),
        lambda *given: oracle(*given, lengths=lengths, softcap=5.0, window=70),
        inputs(device, heads=2, groups=1, tokens=153),
    )


def test_a_saturated_cap_and_a_large_sink(device, check_close):
    """Scores far above the cap have no gradient, and a sink of 30 takes all probability. Neither gives NaN."""
    q, k, v, z = inputs(device)
    z = torch.tensor([30.0, -30.0, 0.0, 5.0], device=device, requires_grad=True)
    given = [(20 * q).detach().requires_grad_(), (20 * k).detach().requires_grad_(), v, z]
    check_close(
        lambda q, k, v, z: row_attention(q, k, v, offsets(device), 40, softcap=3.0, sinks=z),
        lambda *given: oracle(*given, softcap=3.0),
        given,
    )


def test_float64(device):
    q, k, v, z = inputs(device, torch.float64, dim=4, tokens=6)
    at = offsets(device, (4, 2))
    assert torch.autograd.gradcheck(
        lambda *x: row_attention(*x[:3], at, 4, window=3, softcap=2.0, sinks=x[3]), (q, k, v, z)
    )


def test_a_kept_graph_is_walked_twice(device):
    given = inputs(device)
    out = row_attention(*given[:3], offsets(device), 40, softcap=2.0, sinks=given[3])
    upstream = torch.randn_like(out)
    first = torch.autograd.grad(out, given, upstream, retain_graph=True)
    for one, two in zip(first, torch.autograd.grad(out, given, upstream), strict=True):
        assert torch.equal(one, two)


def test_frozen_sinks_have_no_gradient(device):
    q, k, v, z = inputs(device)
    row_attention(q, k, v, offsets(device), 40, softcap=2.0, sinks=z.detach()).sum().backward()
    assert q.grad is not None and z.grad is None


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v, z: (q[:, :3], k, v, z), "H a multiple of G"),
        (lambda q, k, v, z: (q, k, v[1:], z), "expected q"),
        (lambda q, k, v, z: (q.half(), k, v, z), "of one dtype"),
        (lambda q, k, v, z: (q, k, v, z[:2]), "for each of 4 heads"),
    ],
)
def test_inputs_that_do_not_fit_each_other_are_errors(change, message, device):
    q, k, v, z = change(*inputs(device))
    with pytest.raises(ValueError, match=message):
        row_attention(q, k, v, offsets(device), 40, sinks=z)


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("heads, groups, dim", [(8, 1, 64), (4, 2, 128), (4, 2, 256)])
def test_at_the_sizes_of_models(heads, groups, dim, window, softcap, device, check_close):
    """Without a cap, PyTorch's flash attention runs, with the sinks added.

    Tokens contribute to a sink's gradient with both signs, and most of the sum cancels. So its error is relative to the
    size of the contributions.
    """
    lengths, options = (700, 1, 0, 333, 1024), {"window": window, "softcap": softcap}
    given = inputs(device, torch.bfloat16, heads, groups, dim, False, sum(lengths))
    z = inputs(device, heads=heads)[-1]

    def ours(q, k, v):
        return row_attention(q, k, v, offsets(device, lengths), 1024, sinks=z, **options)

    check_close(ours, lambda *x: oracle(*x, z.detach().double(), lengths=lengths, **options), given)
    z.grad = None
    out = ours(*given)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    of_tokens = z.detach().double()[:, None].expand(-1, sum(lengths)).clone().requires_grad_()
    want = oracle(*(x.detach().double() for x in given), of_tokens, lengths=lengths, **options)
    want.backward(upstream.double())
    assert (z.grad - of_tokens.grad.sum(1)).norm() <= 5e-3 * of_tokens.grad.norm()


def test_the_twin_is_the_same(device):
    given = inputs(device)
    got = row_attention(*given[:3], offsets(device), 40, window=5, softcap=2.0, sinks=given[3])
    want = reference.row_attention(*given[:3], offsets(device), 40, window=5, softcap=2.0, sinks=given[3])
    torch.testing.assert_close(got, want)
