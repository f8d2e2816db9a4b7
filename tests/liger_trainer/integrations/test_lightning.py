"""Lightning: two CPU processes train a patched model to the weights of one process with all rows."""

import importlib.util
import os
import sys

import pytest
import torch
from launching import HERE
from recipe_fixtures import run_elsewhere
from tiny_models import collate, ragged_rows, tiny_model
from torch import nn

from liger_trainer.integrations.lightning import configure_model, shard


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_two_processes_are_one_training(tmp_path):
    weights = {}
    for processes in (1, 2):
        out = tmp_path / f"{processes}.pt"
        done = run_elsewhere(
            sys.executable, HERE / "lightning_ranks.py", out, processes, cwd=tmp_path,
            PYTHONPATH=os.pathsep.join([str(HERE), *sys.path]),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        weights[processes] = torch.load(out)
    start = dict(tiny_model("llama").named_parameters())
    for name, one in weights[1].items():
        assert not torch.equal(one, start[name]), name
        torch.testing.assert_close(weights[2][name], one, rtol=1e-4, atol=1e-6, msg=name)


def test_it_needs_nothing_of_lightning_to_patch_and_to_load_once():
    module, loaded = nn.Module(), []
    configure_model(module, lambda: loaded.append(1) or tiny_model("llama"), liger_config={"rope": False})
    configure_model(module, lambda: loaded.append(1))
    assert loaded == [1]
    batch = collate(ragged_rows(2))
    outputs = module.model(**batch)
    assert outputs.logits is None and torch.isfinite(outputs.loss)


def test_sharding_refuses_what_it_would_not_shard():
    class Mesh(dict):
        mesh_dim_names = ("data_parallel", "tensor_parallel")

    class Two:
        def size(self):
            return 2

    with pytest.raises(ValueError, match="tensor_parallel_size is 2"):
        shard(tiny_model("llama"), Mesh(tensor_parallel=Two()))
    with pytest.raises(ValueError, match="does not name its layers"):
        shard(nn.Linear(2, 2), type("OneWay", (dict,), {"mesh_dim_names": ("data_parallel",)})())
