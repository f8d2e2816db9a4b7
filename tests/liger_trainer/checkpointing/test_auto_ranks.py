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
    assert all(a[1] == b[1] == min(a[0], b[0]) for a, b in wanted)
    assert any(0 <= b[0] < a[0] for a, b in wanted), "or they would have agreed anyhow"
    assert 0 < ranks[0]["chosen"]["kept_most"] <= LAYERS


@pytest.mark.slow
def test_out_of_memory_on_one_rank_is_an_error_and_no_hang(tmp_path):
    with pytest.raises(AssertionError, match=r"it cannot be run again, because the other processes have gone on"):
        torchrun("auto_ranks.py", "oom", tmp_path)
