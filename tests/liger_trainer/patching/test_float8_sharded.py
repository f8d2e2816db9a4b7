"""torchao's fp8 layers under FSDP2, which frees and gathers their weights: two processes on CPUs."""

import json

import pytest
import torch
from launching import torchrun

pytest.importorskip("torchao", reason="torchao is not installed")


@pytest.fixture(scope="module")
def found():
    lines = torchrun("fp8_ranks.py").stdout.splitlines()
    return json.loads(next(line for line in lines if line.startswith("{")))


@pytest.mark.parametrize("patched", ["before", "after"])
def test_weights_in_16_bits_are_cast_where_they_are_gathered(patched, found):
    """Two steps of two layers of seven projections; the second one with the weights of the first one's update."""
    ours, stock = found[f"False {patched}"], found["False never"]
    assert ours["calls"] == 2 * 14 and not ours["skipped"]
    torch.testing.assert_close(torch.tensor(ours["steps"]), torch.tensor(stock["steps"]), rtol=5e-3, atol=0)


@pytest.mark.parametrize("patched", ["before", "after"])
def test_weights_that_are_gathered_in_eight_bits_are_torchao_s(patched, found):
    ours = found[f"True {patched}"]
    assert ours["calls"] == 0 and ours["steps"] == found["True never"]["steps"]
    assert ours["skipped"] == ["its weight is gathered in fp8 (enable_fsdp_float8_all_gather)"]
