"""torchao's FP8 layers under FSDP2, which frees and gathers their weights, on two CPU processes."""

import json

import pytest
import torch
from launching import in_processes

pytest.importorskip("torchao", reason="torchao is not installed")

FORWARDS = 2 * 2 * 2 * 14  # two steps of two micro-batches, each trained and evaluated, two layers of seven projections
TWICE = 3 * FORWARDS // 2  # trained ones run once more in the backward pass
CASES = {
    "plain, before": FORWARDS,
    "plain, after": FORWARDS,
    "not freed, before": FORWARDS,
    "bf16, before": FORWARDS,
    "checkpointed, before": TWICE,
    "checkpointed, reentrant, before": TWICE,
    "rebuilding, before": FORWARDS,
}


@pytest.fixture(scope="module")
def found():
    lines = in_processes("fp8_ranks.py").stdout.splitlines()
    return json.loads(next(line for line in lines if line.startswith("{")))


def stock_of(case):
    return f"{case.rpartition(', ')[0]}, never"


@pytest.mark.parametrize("case", CASES)
def test_weights_are_cast_where_they_are_gathered(case, found):
    """The second step uses weights that the first one updated."""
    ours, stock = found[case], found[stock_of(case)]
    assert ours["calls"] == CASES[case] and ours["of"] == ["Parameter"] and not ours["skipped"]
    assert not stock["calls"]
    assert ours["steps"] == stock["steps"]


def test_losses_and_norms_equal_one_process(found):
    """A weight's scale covers all its shards."""
    ours, whole = found["plain, before"], found["one process"]
    losses, grads = torch.tensor(ours["steps"]).split([4, 4], 1)
    of_both, want = torch.tensor(whole["steps"]).split([6, 4], 1)
    torch.testing.assert_close(losses, of_both[:, [0, 1, 3, 4]], rtol=1e-6, atol=0)  # the first rank's steps
    torch.testing.assert_close(grads, want, rtol=1e-6, atol=0)
