"""`activation_checkpointing: auto` on two ranks with different rows and memories recomputes the same layers."""

import pytest
import torch
from launching import in_processes, in_processes_fsdp2
from memory_runs import LAYERS, same_bits


def run_ranks(mode, out):
    if mode.startswith("ddp"):
        in_processes("auto_ranks.py", mode, out)
    else:
        in_processes_fsdp2(out, "auto_ranks.py", mode, out)
    return [torch.load(out / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_both_ranks_follow_the_more_careful_plan(mode, tmp_path):
    ranks = run_ranks(mode, tmp_path)
    for rank in ranks:
        assert same_bits(rank["runs"]["auto"], rank["runs"][False])
        assert rank["highest"][True] < 0.9 * rank["highest"][False], "or there would be nothing to choose"
    wanted = list(zip(*(rank["agreed"] for rank in ranks), strict=True))
    for (one, agreed), (other, also_agreed) in wanted:
        assert agreed == also_agreed == tuple(map(min, one, other))
    assert any(sum(other) < sum(one) for (one, _), (other, _) in wanted if len(one) > 1), "or they had agreed anyhow"
    assert ranks[0]["chosen"] == ranks[1]["chosen"] | {"largest": ranks[0]["chosen"]["largest"]}
    assert 0 < ranks[0]["chosen"]["kept_most"] <= LAYERS
    assert 0 < ranks[0]["chosen"]["attention_most"] < LAYERS


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp-host", "fsdp2-host"])
def test_both_ranks_have_layers_on_the_host(mode, tmp_path):
    """One rank may keep a layer on its GPU that the other has on the host. Both compute it once."""
    ranks = run_ranks(mode, tmp_path)
    for rank in ranks:
        assert same_bits(rank["runs"]["auto"], rank["runs"][False])
        assert rank["chosen"]["host_most"] > 0
    of_each = [rank["chosen"]["largest"] for rank in ranks]
    assert of_each[0]["kept"] + of_each[0]["host"] == of_each[1]["kept"] + of_each[1]["host"]


@pytest.mark.slow
def test_out_of_memory_on_one_rank_is_an_error_and_no_hang(tmp_path):
    with pytest.raises(AssertionError, match="does not fit the memory of the device"):
        in_processes("auto_ranks.py", "oom", tmp_path)
