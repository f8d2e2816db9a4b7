"""`fp8: true` under FSDP2, with weights gathered in 16 bits, on two CPU processes."""

import os

import pytest
import torch
from launching import in_processes_fsdp2

from liger_trainer.command.run.launch import load_on_every_process

pytest.importorskip("torchao", reason="torchao is not installed")

LAYERS = 13  # two layers of seven projections; accelerate leaves the first projection alone
STEP = 2 + 1  # two micro-batches, and an evaluation of one batch
VARIABLE = "FSDP_CPU_RAM_EFFICIENT_LOADING"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    in_processes_fsdp2(folder, "fp8_trainer_ranks.py", folder)
    return torch.load(folder / "found.pt")


def assert_same_training(got, want):
    assert got["logs"] == want["logs"] and len(got["logs"]) == 2 * 4
    for name, weight in want["weights"].items():
        assert torch.equal(got["weights"][name], weight), name


@pytest.mark.parametrize("dtype", ["", ", 16 bits"])
def test_the_numbers_are_torchao_s(dtype, found):
    """Bit-equal, for products without rounding. A 16-bit model trains in fp32, as accelerate does it."""
    ours, stock = found["ours" + dtype], found["torchao" + dtype]
    assert ours["swapped"] == LAYERS and ours["of"] == ["Parameter"] and ours["calls"] == 4 * STEP * LAYERS
    assert not stock["swapped"] and not stock["calls"]
    assert_same_training(ours, stock)
    assert {weight.dtype for weight in ours["weights"].values()} == {torch.float32}


def test_all_weights_are_trained(found):
    before = found["ours"]["before"]
    for name, weight in found["ours"]["weights"].items():
        assert not torch.equal(weight, before[name]), name


def test_checkpointed(found):
    ours = found["ours, checkpointed"]
    assert ours["calls"] > found["ours"]["calls"] and ours["of"] == ["Parameter"]
    assert_same_training(ours, found["ours"])


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_saved_and_resumed(kind, found):
    """Resumes from a checkpoint of the second step, whole or sharded."""
    resumed = found[f"resumed, {kind}"]
    assert resumed["calls"] == 2 * STEP * LAYERS
    assert_same_training(resumed, found["ours"])


def test_the_best_weights_are_loaded_at_the_end(found):
    first, second, at_two, *_, at_four, again = found["best"]["logs"]
    assert again == at_two > at_four and at_two == found["ours"]["logs"][3]


def test_saved_weights_are_plain_numbers(found):
    for name, saved in found["ours"]["saved"].items():
        assert type(saved) is torch.Tensor and torch.equal(saved, found["ours"]["weights"][name]), name


@pytest.mark.parametrize(
    "given, launched, sharded, read",
    [
        ((True, None, None), "no", "true", True),
        ((None, None, None), "fp8", "true", True),
        ((None, None, None), "bf16", "true", False),
        ((False, True, None), "fp8", "true", False),
        ((None, None, True), "fp8", "true", False),
        ((True, None, None), "no", "false", False),
    ],
)
def test_every_process_reads_the_model(given, launched, sharded, read, monkeypatch, capsys):
    """Only where accelerate could not go on otherwise. In all other cases the launcher's variable stays."""
    for name, value in {
        VARIABLE: "true",
        "ACCELERATE_USE_FSDP": sharded,
        "ACCELERATE_MIXED_PRECISION": launched,
    }.items():
        monkeypatch.setitem(os.environ, name, value)
    load_on_every_process(*given)
    assert os.environ[VARIABLE] == ("false" if read else "true")
    assert ("every process reads the whole model" in capsys.readouterr().err) == read
    load_on_every_process(*given)
    assert not capsys.readouterr().err, "said once"
