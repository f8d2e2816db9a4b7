"""Rollout attention against float64 with all scores written out: rows of any length, and one to three later steps."""

import pytest
import torch

from liger_triton import reference, rollout_attention, row_attention

LENGTHS = (5, 1, 40, 0, 23)
TOKENS = sum(LENGTHS)
# Triton's interpreter cannot multiply bf16; only a GPU tests it.
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]


def offsets(device):
    return torch.tensor((0, *LENGTHS)).cumsum(0).int().to(device)


def oracle(q, k, v, *own, scale=None):
    """Return (T, H, D) by one softmax over all keys of step 0 and all keys of all later steps, most of them masked."""
    steps = len(own) // 2
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(q.device)
    at = torch.arange(len(q), device=q.device)
    causal = (at[:, None] >= at) & (row[:, None] == row)
    seen = torch.cat([causal, *[torch.eye(len(q), dtype=torch.bool, device=q.device)] * steps], 1)
    keys = torch.cat([k, *own[:steps]]).repeat_interleave(q.shape[1] // k.shape[1], 1)
    values = torch.cat([v, *own[steps:]]).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("ihd,jhd->hij", q, keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, values)


def ours(q, k, v, *own, scale=None):
    steps = len(own) // 2
    return rollout_attention(q, k, v, own[:steps], own[steps:], offsets(q.device), max(LENGTHS), scale=scale)


def inputs(device, dtype=torch.float32, heads=4, groups=2, dim=16, steps=2):
    shapes = [(TOKENS, heads, dim), *[(TOKENS, groups, dim)] * (2 + 2 * steps)]
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("steps", [1, 3])
def test_matches_float64(steps, dtype, device, check_close):
    check_close(ours, oracle, inputs(device, dtype, steps=steps))


@pytest.mark.parametrize("heads, groups, dim", [(3, 3, 24), (4, 1, 8), (2, 2, 80), (6, 2, 16)])
def test_heads_and_head_sizes(heads, groups, dim, device, check_close):
    given = inputs(device, heads=heads, groups=groups, dim=dim)
    check_close(lambda *x: ours(*x, scale=0.4), lambda *x: oracle(*x, scale=0.4), given)


def test_the_twin(device, check_close):
    def twin(q, k, v, *own):
        return reference.rollout_attention(q, k, v, own[:2], own[2:], offsets(q.device), max(LENGTHS))

    check_close(twin, oracle, inputs(device))


PLACES = (0, 3, 4, 7, 30, 31, 44, 60, 68)  # of five rows, and no token of the row of one


@pytest.mark.parametrize("twin", [False, True], ids=["kernel", "twin"])
def test_rollouts_of_some_tokens(twin, device, check_close):
    """The tokens that are left out are keys, and get no gradient of their own queries."""
    places = torch.tensor(PLACES, device=device)
    q, k, v, *own = inputs(device)
    few = [x.detach()[places].requires_grad_() for x in (q, *own)]
    attention = reference.rollout_attention if twin else rollout_attention

    def some(k, v, q, *own):
        return attention(q, k, v, own[:2], own[2:], offsets(device), max(LENGTHS), places=places)

    def all_of_them(k, v, q, *own):
        q, *own = (x.new_zeros(TOKENS, *x.shape[1:]).index_copy(0, places, x) for x in (q, *own))
        return oracle(q, k, v, *own)[places]

    check_close(some, all_of_them, [k, v, *few])


def test_two_calls_give_the_same_bits(device):
    given = inputs(device, steps=3)
    upstream = torch.randn_like(given[0])
    first = torch.autograd.grad(ours(*given), given, upstream)
    second = torch.autograd.grad(ours(*given), given, upstream)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_keys_far_below_the_others_change_nothing(device):
    """If a rollout's own keys have no weight, it equals row attention on its first part's one-token rows."""
    q, k, v, *_ = inputs(device)
    low = -1e3 * q.detach().unflatten(1, (2, 2)).mean(2)
    got = rollout_attention(q, k, v, [low], [torch.zeros_like(v)], offsets(device), max(LENGTHS))
    want = row_attention(q, k, v, offsets(device), max(LENGTHS))
    rest = (q.detach().unflatten(1, (2, 2)) * low.unsqueeze(2)).sum(-1).flatten(1) < -400  # no weight left in fp32
    torch.testing.assert_close(got[rest], want[rest], rtol=1e-5, atol=1e-6)
    assert rest.any()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda own: own.__setitem__("own_keys", []), "own_keys has 0 tensors and own_values 1"),
        (lambda own: own.__setitem__("own_values", [own["v"].half()]), "expected .* as k has"),
        (lambda own: own.__setitem__("v", own["v"][:5]), "v is .* as k is"),
        (lambda own: own.__setitem__("q", own["q"][:5]), "a row for each of the 69 tokens of k"),
        (lambda own: own.__setitem__("places", torch.tensor([1])), "a row for each of the 1 places"),
        (lambda own: own.__setitem__("q", own["q"][:, :3]), "H a multiple of G"),
    ],
)
def test_refusals(change, message, device):
    q, k, v, key, value = inputs(device, steps=1)
    given = {"q": q, "k": k, "v": v, "own_keys": [key], "own_values": [value]}
    change(given)
    with pytest.raises(ValueError, match=message):
        rollout_attention(**given, offsets=offsets(device), longest=40)
