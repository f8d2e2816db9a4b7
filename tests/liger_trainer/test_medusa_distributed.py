"""Two gloo ranks: the gradients, the logs and the saved heads of one process, under DDP and in the units of FSDP2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from medusa_brute_force import assert_gradients, brute_force, gradients, model_with_heads
from medusa_two_ranks import COUNT, DDP, FSDP2, ddp
from tiny_models import collate, ragged_rows, tiny_model

from liger_trainer import MedusaHeads

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """(folder, what rank 0 saved, what rank 1 saved)."""
    out = tmp_path_factory.mktemp("ranks")
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    result = subprocess.run(
        [*command, str(HERE / "medusa_two_ranks.py"), str(out)], env=env, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return out, *(torch.load(out / f"{rank}.pt") for rank in range(2))


@pytest.mark.parametrize("case", DDP)
def test_ddp(case, ranks, tmp_path):
    out, first, second = ranks[0], *(rank[f"ddp-{case}"] for rank in ranks[1:])
    one_process = ddp(DDP[case], str(tmp_path))
    for name, grad in first["grads"].items():
        assert torch.equal(grad, second["grads"][name]), f"{name} differs between ranks"
    assert_gradients(first["grads"], one_process["grads"])
    assert first["logs"] == second["logs"] and "medusa_head3_accuracy" in first["logs"]
    assert first["logs"] == pytest.approx(one_process["logs"], rel=1e-5)
    saved, own = (MedusaHeads.from_pretrained(folder).state_dict() for folder in (out / f"ddp-{case}", tmp_path))
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, own[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", FSDP2)
def test_fsdp2(case, ranks):
    out, first, second = ranks[0], *(rank[f"fsdp2-{case}"] for rank in ranks[1:])
    options = FSDP2[case]
    stage, tied, targets = (
        options.get(f"medusa_{n}", d) for n, d in (("stage", 1), ("tied", True), ("targets", "hard"))
    )
    model, rows = model_with_heads(tied=tied), ragged_rows(16)
    for half in (rows[0::2], rows[1::2]):
        loss, _ = brute_force(model, collate(half), stage, targets, 0.7, 1.0 if stage == 1 else 0.2, COUNT)
        (loss / 2).backward()
    want = {name: grad for name, grad in gradients(model).items() if stage == 2 or "medusa_head" in name}
    assert_gradients(first["grads"], want)
    assert_gradients(second["grads"], want)
    assert first["loaded"] and second["loaded"]
    saved = MedusaHeads.from_pretrained(out / f"fsdp2-{case}").state_dict()
    for name, tensor in model.medusa_head.state_dict().items():
        assert torch.equal(saved[name], tensor), name
    assert (out / f"fsdp2-{case}" / "model.safetensors").exists() == (stage == 2)


def test_the_plain_head_in_units_of_fsdp2(ranks):
    """accelerate makes one unit of the final norm and the LM head: the loss stays fused, its gradients right."""
    model, rows = tiny_model("llama").train(), ragged_rows(16)
    for half in (rows[0::2], rows[1::2]):
        (model(**collate(half), num_items_in_batch=torch.tensor(COUNT)).loss / 2).backward()
    for rank in ranks[1:]:
        assert rank["fsdp2-plain"]["fused"]
        assert_gradients(rank["fsdp2-plain"]["grads"], gradients(model))
