"""Argmax, log-probability and rank of tokens: against whole logits, with ties, for every shape of head."""

import pytest
import torch
import torch.nn.functional as F

from liger_triton import linear_token_ranks, token_ranks

H, V = 24, 211


def inputs(device, dtype=torch.float32):
    x = torch.randn(3, 9, H)
    w = torch.randn(V, H) / H**0.5
    b = torch.randn(V) * 0.3
    y = torch.randint(0, V, (3, 9))
    y[:, ::4] = -100
    return *(t.to(device, dtype) for t in (x, w, b)), y.to(device)


def expected(logits, y):
    """Compute them by sorting, row by row, in float64."""
    argmax = y.clone()
    log_probs = torch.full(y.shape, -100.0, dtype=torch.float64)
    rank = y.clone()
    for i in (y != -100).nonzero().tolist():
        row, target = logits[tuple(i)].double().cpu(), int(y[tuple(i)])
        argmax[tuple(i)] = row.tolist().index(max(row.tolist()))
        log_probs[tuple(i)] = torch.log_softmax(row, 0)[target]
        rank[tuple(i)] = sum(value > row[target].item() for value in row.tolist())
    return argmax, log_probs, rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_rows", [None, 5])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0, "logit_scale": 0.5}, {"lora": True}, {"lora": True, "lora_input": True}], ids=str
)
def test_against_sorted_logits(options, chunk_rows, dtype, device):
    x, w, b, y = inputs(device, dtype)
    options = dict(options)
    logits = F.linear(x, w, b)
    if options.pop("lora", False):
        a = torch.randn(4, H, device=device, dtype=dtype)
        up = torch.randn(V, 4, device=device, dtype=dtype)
        source = x.flip(0) if options.get("lora_input") else x
        options |= {"lora": (a, up, 0.5)} | ({"lora_input": source} if "lora_input" in options else {})
        logits = logits + 0.5 * F.linear(F.linear(source, a), up)
    logits = logits.float()
    if "softcap" in options:
        logits = 2.0 * torch.tanh(0.5 * logits / 2.0)
    got = linear_token_ranks(x, w, y, b, chunk_rows=chunk_rows, **options)
    for found in (got, token_ranks(logits, y)):
        argmax, log_probs, rank = expected(logits, y)
        assert torch.equal(found.argmax.cpu(), argmax.cpu())
        assert torch.equal(found.rank.cpu(), rank.cpu())
        assert found.log_probs.dtype == torch.float32
        torch.testing.assert_close(found.log_probs.double().cpu(), log_probs, rtol=1e-5, atol=1e-5)


def test_ties():
    """The argmax is the first of equals. A tie does not cost rank."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [1.0, 3.0, 3.0, 0.0], [1.0, 3.0, 3.0, 0.0]])
    found = token_ranks(logits, torch.tensor([2, 0, -100]))
    assert found.argmax.tolist() == [1, 1, -100]
    assert found.rank.tolist() == [0, 2, -100]


def test_nothing_to_rank_and_bad_options(device):
    x, w, b, y = inputs(device)
    for found in linear_token_ranks(x, w, torch.full_like(y, -100), b):
        assert found.shape == y.shape and (found == -100).all()
    with pytest.raises(ValueError, match="chunk_rows is 0; expected 1 or more"):
        linear_token_ranks(x, w, y, b, chunk_rows=0)
    with pytest.raises(ValueError, match="softcap is -1.0; expected a positive number"):
        linear_token_ranks(x, w, y, b, softcap=-1.0)


@pytest.mark.parametrize("wrong", [-1, 37])
def test_target_outside_the_vocabulary(wrong, device):
    logits = torch.randn(3, 37, device=device)
    target = torch.tensor([0, wrong, -100], device=device)
    with pytest.raises(IndexError, match=rf"target\[1\] is {wrong}.*expected 0 to 36"):
        token_ranks(logits, target)
    with pytest.raises(IndexError, match=rf"target\[1\] is {wrong}"):
        linear_token_ranks(torch.randn(3, 8, device=device), torch.randn(37, 8, device=device), target)
