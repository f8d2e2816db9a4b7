"""Two gloo ranks have the gradients, logs and saved heads of one process.

They run DDP, FSDP2, and ZeRO-3 if DeepSpeed is installed.
"""

import json

import medusa_sharded
import pytest
import torch
from launching import in_processes, in_processes_fsdp2, torchrun_deepspeed
from medusa_two_ranks import DDP, ddp
from recipe_fixtures import write_model
from safetensors.torch import load_file
from tiny_models import assert_same_gradients

from liger_trainer import MedusaHeads


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """(folder, what rank 0 saved, what rank 1 saved)."""
    out = tmp_path_factory.mktemp("ranks")
    in_processes("medusa_two_ranks.py", out)
    return out, *(torch.load(out / f"{rank}.pt") for rank in range(2))


@pytest.mark.parametrize("case", DDP)
def test_ddp(case, ranks, tmp_path):
    out, first, second = ranks[0], *(rank[case] for rank in ranks[1:])
    one_process = ddp(DDP[case], str(tmp_path))
    for name, grad in first["grads"].items():
        assert torch.equal(grad, second["grads"][name]), f"{name} differs between ranks"
    assert_same_gradients(first["grads"], one_process["grads"], floor=0)
    assert first["logs"] == second["logs"] and "medusa_head3_accuracy" in first["logs"]
    assert first["logs"] == pytest.approx(one_process["logs"], rel=1e-5)
    saved, own = (MedusaHeads.from_pretrained(folder).state_dict() for folder in (out / case, tmp_path))
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, own[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp2", "zero3"])
def test_sharded(mode, tmp_path):
    """Trains, evaluates, saves and resumes sharded over two ranks, with one process's losses and weights."""
    model = str(write_model(tmp_path / "model"))
    if mode == "fsdp2":
        in_processes_fsdp2(tmp_path, "medusa_sharded.py", mode, model, tmp_path / "ranks")
    else:
        torchrun_deepspeed("medusa_sharded.py", mode, model, tmp_path / "ranks")
    for name in medusa_sharded.CASES:
        own = tmp_path / "own" / name
        medusa_sharded.train(name, model, str(own))
        for folder in (tmp_path / "ranks" / name, tmp_path / "ranks" / f"{name}-resumed"):
            for got, want in zip(*(json.loads((f / "log.json").read_text()) for f in (folder, own)), strict=True):
                assert got == pytest.approx(want, rel=1e-5)
            files = [path.relative_to(own) for path in own.glob("*.safetensors")]
            assert len(files) == (1 if "stage2" in name else 0)
            for file in (*files, "medusa_heads/medusa_lm_head.safetensors"):
                assert_same_gradients(load_file(folder / file), load_file(own / file), floor=0)
