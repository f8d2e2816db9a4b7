"""A drafter and an MTP head on two gloo ranks under DDP: the gradients, logs and files of one process."""

import pytest
import torch
from heads_two_ranks import CASES, ddp
from launching import in_processes
from mtp_bases import write_base
from safetensors.torch import load_file
from tiny_models import assert_same_gradients


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """(folder, what rank 0 saved, what rank 1 saved)."""
    out = tmp_path_factory.mktemp("ranks")
    write_base(out / "base")
    in_processes("heads_two_ranks.py", out, out / "base")
    return out, *(torch.load(out / f"{rank}.pt") for rank in range(2))


@pytest.mark.parametrize("case", CASES)
def test_ddp(case, ranks, tmp_path):
    out, first, second = ranks[0], *(rank[case] for rank in ranks[1:])
    one_process = ddp(case, str(tmp_path), out / "base")
    for name, grad in first["grads"].items():
        assert torch.equal(grad, second["grads"][name]), f"{name} differs between ranks"
    # The states of Qwen3.5's linear attention lose more accuracy than the heads do.
    assert_same_gradients(first["grads"], one_process["grads"], 1e-4 if case.startswith("mtp") else 1e-5, floor=0)
    assert any("mtp." in name or "eagle_drafter." in name for name in first["grads"])
    assert first["logs"] == second["logs"] and {"eagle_step3_accuracy", "mtp_accuracy"} & first["logs"].keys()
    assert first["logs"] == pytest.approx(one_process["logs"], rel=1e-5)
    files = {"mtp": "model.safetensors", "mtp-alone": "mtp.safetensors"}
    file = files.get(case, "eagle_drafter/model.safetensors")
    own = load_file(tmp_path / file)
    for name, tensor in load_file(out / case / file).items():
        torch.testing.assert_close(tensor, own[name], rtol=1e-4, atol=1e-6)
