"""`activation_checkpointing: auto` on two ranks with other rows and other memories: one plan, and the same bits."""

import pytest
import torch
from auto_runs import LAYERS, same_bits
from launching import HERE, accelerate_fsdp2, torchrun


@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_both_ranks_follow_the_more_careful_plan(mode, tmp_path):
    if mode == "ddp":
        torchrun("auto_ranks.py", mode, tmp_path)
    else:
        accelerate_fsdp2(tmp_path, HERE / "auto_ranks.py", mode, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
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
def test_out_of_memory_on_one_rank_is_an_error_and_no_hang(tmp_path):
    with pytest.raises(AssertionError, match=r"it cannot be run again, because the other processes have gone on"):
        torchrun("auto_ranks.py", "oom", tmp_path)
