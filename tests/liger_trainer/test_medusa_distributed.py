"""Two gloo ranks: the gradients, the logs and the saved heads of one process.

Under DDP, in the units of FSDP2, and under ZeRO-3 where DeepSpeed is installed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import medusa_zero3
import pytest
import torch
from medusa_brute_force import assert_gradients, brute_force, gradients, model_with_heads
from medusa_two_ranks import COUNT, DDP, FSDP2, ddp
from recipe_fixtures import write_model
from safetensors.torch import load_file
from tiny_models import collate, ragged_rows, tiny_model

from liger_trainer import MedusaHeads

HERE = Path(__file__).parent


def launch(script, *arguments, **variables):
    """Run `script` of this folder in two processes."""
    env = os.environ | variables | {
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    result = subprocess.run(
        [*command, str(HERE / script), *map(str, arguments)], env=env, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """(folder, what rank 0 saved, what rank 1 saved)."""
    out = tmp_path_factory.mktemp("ranks")
    launch("medusa_two_ranks.py", out)
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


def test_zero3(tmp_path):
    """Trained, saved and resumed in parts on two ranks: the losses and the weights of one process."""
    pytest.importorskip("deepspeed")
    model = str(write_model(tmp_path / "model"))
    launch("medusa_zero3.py", model, tmp_path / "ranks", DS_ACCELERATOR="cpu")
    for name in medusa_zero3.CASES:
        own = tmp_path / "own" / name
        medusa_zero3.train(name, model, str(own))
        for folder in (tmp_path / "ranks" / name, tmp_path / "ranks" / f"{name}-resumed"):
            for got, want in zip(*(json.loads((f / "log.json").read_text()) for f in (folder, own)), strict=True):
                assert got == pytest.approx(want, rel=1e-5)
            files = [path.relative_to(own) for path in own.glob("*.safetensors")]
            assert len(files) == (1 if "stage2" in name else 0)
            for file in (*files, "medusa_heads/medusa_lm_head.safetensors"):
                assert_gradients(load_file(folder / file), load_file(own / file))
