"""`activation_checkpointing: auto` on two ranks with other rows and other memories: one plan, and the same bits."""

import pytest
import torch
from auto_runs import LAYERS, same_bits
from launching import HERE, accelerate_fsdp2, torchrun


def run_ranks(mode, out):
    if mode.startswith("ddp"):
        torchrun("auto_ranks.py", mode, out)
    else:
        accelerate_fsdp2(out, HERE / "auto_ranks.py", mode, out)
    return [torch.load(out / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_both_ranks_follow_the_more_careful_plan(mode, tmp_path):
    ranks = run_ranks(mode, tmp_path)
    for rank in ranks:
        assert same_bits(rank["runs"]["auto"], rank["runs"][False])
        assert rank["highest"][True] < 0.9 * rank["highest"][False], "or there would be nothing to choose"
    wanted = list(zip(*(rank["agreed"] for rank in ranks), strict=True))
    for (one, agreed), (other, also_agreed) in wanted:
        assert agreed == also_agreed == tuple(map(min, one, other)), "of both numbers, whole layers and attention"
    assert any(0 <= other[0] < one[0] for (one, _), (other, _) in wanted), "or they would have agreed anyhow"
    assert ranks[0]["chosen"] == ranks[1]["chosen"] | {"largest": ranks[0]["chosen"]["largest"]}
    assert 0 < ranks[0]["chosen"]["kept_most"] <= LAYERS
    assert 0 < ranks[0]["chosen"]["attention_most"] < LAYERS


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp-host", "fsdp2-host"])
def test_both_ranks_have_as_many_layers_on_the_host(mode, tmp_path):
    ranks = run_ranks(mode, tmp_path)
    for rank in ranks:
        assert same_bits(rank["runs"]["auto"], rank["runs"][False])
        assert rank["chosen"]["host_most"] == ranks[0]["chosen"]["host_most"] > 0
    wanted = list(zip(*(rank["agreed"] for rank in ranks), strict=True))
    assert all(agreed == also == tuple(map(min, one, other)) for (one, agreed), (other, also) in wanted)
    assert any(one[2] != other[2] and agreed[2] for (one, agreed), (other, _) in wanted), "or they had agreed anyhow"


@pytest.mark.slow
def test_out_of_memory_on_one_rank_is_an_error_and_no_hang(tmp_path):
    with pytest.raises(AssertionError, match=r"it cannot be run again, because the other processes have gone on"):
        torchrun("auto_ranks.py", "oom", tmp_path)
