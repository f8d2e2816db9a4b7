"""Sharded over two gloo ranks by FSDP2, ZeRO-2 or ZeRO-3, three steps end with the weights of the stock trainers."""

import importlib.util

import pytest
import torch
from launching import HERE, accelerate_fsdp2, torchrun
from sharded_ranks import OF_MODE


@pytest.mark.parametrize("mode", OF_MODE)
def test_weights(mode, tmp_path):
    if mode == "fsdp2":
        done = accelerate_fsdp2(tmp_path, HERE / "sharded_ranks.py", mode, tmp_path)
    elif importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    else:
        done = torchrun("sharded_ranks.py", mode, tmp_path, DS_ACCELERATOR="cpu")
    assert "fused_linear_cross_entropy 1/1" in done.stderr and "not fused" not in done.stderr
    first = torch.load(tmp_path / "0.pt")
    assert tuple(first) == OF_MODE[mode]
    for case, (stock, ours) in first.items():
        assert len(ours["logs"]) == 4 and len(stock["weights"]) >= 21
        for got, want in zip(ours["logs"], stock["logs"], strict=True):
            assert got == pytest.approx(want, rel=1e-4), case
        for name, want in stock["weights"].items():
            error = (ours["weights"][name] - want).norm() / want.norm()
            assert error < 1e-5, f"{case}: {name} {error:.1e}"
