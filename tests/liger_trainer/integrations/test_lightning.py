"""Two Lightning processes, on CPUs or sharded over GPUs, train a patched model to one process's weights."""

import importlib.util
import os
import sys

import pytest
import torch
from launching import PROCESSES
from recipe_fixtures import run_elsewhere
from tiny_models import tiny_model

has_lightning = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")


def weights_of(folder, processes, strategy):
    """The weights after a run of Lightning, gathered."""
    out = folder / f"{processes}.pt"
    done = run_elsewhere(
        sys.executable,
        PROCESSES / "lightning_ranks.py",
        out,
        processes,
        strategy,
        cwd=folder,
        PYTHONPATH=os.pathsep.join([str(PROCESSES), *sys.path]),
        CUDA_VISIBLE_DEVICES="" if strategy == "cpu" else os.environ.get("CUDA_VISIBLE_DEVICES", "0,1"),
    )
    assert done.returncode == 0, done.stderr
    return torch.load(out)


def assert_one_training(one, two):
    start = dict(tiny_model("llama").named_parameters())
    assert two.keys() == one.keys() == start.keys()
    for name, weight in one.items():
        assert not torch.equal(weight, start[name]), name
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-6, msg=name)


@has_lightning
def test_two_processes_are_one_training(tmp_path):
    assert_one_training(weights_of(tmp_path, 1, "cpu"), weights_of(tmp_path, 2, "cpu"))


@has_lightning
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_sharded_over_two_gpus(tmp_path):
    assert_one_training(weights_of(tmp_path, 1, "gpu"), weights_of(tmp_path, 2, "fsdp"))
