"""Under ZeRO-2 and ZeRO-3, on two gloo ranks: the weights after three steps are those of the stock trainers there."""

import pytest
import torch
from test_medusa_distributed import launch

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")


@pytest.mark.parametrize("stage", [2, 3])
def test_weights(stage, tmp_path):
    from deepspeed_ranks import OF_STAGE

    launch("deepspeed_ranks.py", stage, tmp_path, DS_ACCELERATOR="cpu")
    first = torch.load(tmp_path / "0.pt")
    assert tuple(first) == OF_STAGE[stage]
    for case, (stock, ours) in first.items():
        assert len(ours["logs"]) == 3
        for got, want in zip(ours["logs"], stock["logs"], strict=True):
            assert got == pytest.approx(want, rel=1e-4), case
        for name, want in stock["weights"].items():
            error = (ours["weights"][name] - want).norm() / want.norm()
            assert error < 1e-5, f"{case}: {name} {error:.1e}"
