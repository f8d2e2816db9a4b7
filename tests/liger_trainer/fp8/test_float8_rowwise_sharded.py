"""torchao's FP8 layers with row scales under FSDP2, which gathers their weights in 16 bits, on two processes."""

import json

import pytest
import torch
from launching import in_processes

pytest.importorskip("torchao", reason="torchao is not installed")


@pytest.fixture(scope="module")
def found():
    lines = in_processes("fp8_rowwise_ranks.py").stdout.splitlines()
    return json.loads(next(line for line in lines if line.startswith("{")))


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_weights_are_cast_where_they_are_gathered(recipe, found):
    """Two steps of two layers with seven projections. The second uses weights that the first updated."""
    ours, stock = found[f"{recipe} True"], found[f"{recipe} False"]
    assert ours["theirs"] == 0 and stock["theirs"] == 2 * 14
    torch.testing.assert_close(torch.tensor(ours["steps"]), torch.tensor(stock["steps"]), rtol=5e-3, atol=1e-6)
    assert ours["steps"][0][0] != ours["steps"][1][0]
