"""Sharded over two ranks, the writing process keeps weights of the base that transformers does not load."""

import pytest
from base_checkpoints import assert_kept, names_of, write_base
from launching import in_processes_fsdp2, torchrun_deepspeed


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp2", "zero3"])
def test_kept_once(mode, tmp_path):
    extra = write_base(tmp_path / "base", "qwen3_next")
    given = ("base_weights_ranks.py", mode, tmp_path / "base", tmp_path / "out")
    if mode == "fsdp2":
        in_processes_fsdp2(tmp_path, *given)
    else:
        torchrun_deepspeed(*given)
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-2"):
        assert_kept(folder, extra)
        assert names_of(folder) == names_of(tmp_path / "base")
