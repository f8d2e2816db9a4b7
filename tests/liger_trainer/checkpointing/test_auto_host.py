"""`activation_checkpointing: auto` with the host's memory, in a trainer on a counted memory: the same bits, faster."""

import json

import pytest
import torch
from auto_runs import At, build, frozen_model, memory_with, same_bits, train
from counted_memory import Carries, CountedMemory

from liger_trainer.checkpointing.memory import GIB


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    found = {}
    for checkpointing in (False, True):
        trainer = build(tmp_path_factory.mktemp("run"), checkpointing, memory := CountedMemory())
        found[checkpointing] = (*train(trainer), memory.highest)
    return found


def between(runs, share):
    return (runs[True][2] + share * (runs[False][2] - runs[True][2])) / GIB


@pytest.mark.parametrize("share, patched", [(0.15, False), (0.3, False), (0.6, False), (0.3, True)])
def test_the_same_bits_within_the_budget(share, patched, runs, tmp_path, caplog):
    """Rows of uneven lengths, dropout, two micro-batches in a step."""
    options = {"use_liger": patched, "liger_config": {"rebuild_above_mib": 0} if patched else None}
    want = train(build(tmp_path / "none", False, **options)) if patched else runs[False]
    budget, carries = between(runs, share), Carries()
    without = build(tmp_path / "without", "auto", CountedMemory(), memory_budget=budget, **options)
    train(without)
    trainer = build(tmp_path, "auto", memory := memory_with(carries), memory_budget=budget, **options)
    assert same_bits(train(trainer), want)
    chosen = trainer.checkpointing
    assert memory.highest <= budget * GIB * 1.02
    assert chosen.run_again == 0 and not chosen.inputs_on_host
    assert 0 < carries.most <= carries.host.room
    assert chosen.most_on_host > 0
    assert chosen.kept + chosen.on_host > without.checkpointing.kept or share < 0.2
    assert f"those of {chosen.most_on_host} in the host's memory" in caplog.text
    assert carries.host.taken == 0, "it is given back at the end"
    report = json.loads(json.dumps(chosen.to_dict()))
    assert report["host_most"] == chosen.most_on_host and report["largest"]["host"] == chosen.on_host


def test_nothing_goes_there_that_fits(runs, tmp_path):
    carries = Carries()
    trainer = build(tmp_path, "auto", memory_with(carries), memory_budget=between(runs, 1.5))
    assert same_bits(train(trainer), runs[False])
    assert carries.most == 0 and trainer.checkpointing.most_on_host == 0


def test_a_full_host_keeps_the_rest_on_the_gpu(runs, tmp_path):
    carries = Carries(room=1 << 20)
    trainer = build(tmp_path, "auto", memory_with(carries), memory_budget=between(runs, 0.3))
    assert same_bits(train(trainer), runs[False])
    assert carries.most <= 1 << 20


@pytest.mark.parametrize("second", [False, True], ids=["first-micro-batch", "second-micro-batch"])
@pytest.mark.parametrize("share", [0.1, 0.25])
def test_out_of_memory_is_run_again_with_the_same_bits(share, second, runs, tmp_path):
    """The device has less than it claims from the middle of the training on."""
    memory = memory_with(Carries())
    memory.claims = 1 << 40
    shrink = At(4, lambda: setattr(memory, "size", int(between(runs, share) * GIB)), second)
    trainer = build(tmp_path, "auto", memory, [shrink])
    assert same_bits(train(trainer), runs[False])
    assert memory.failures == trainer.checkpointing.run_again > 0


def test_the_inputs_of_layers_go_there_when_a_budget_is_not_met(tmp_path):
    full = build(tmp_path, True, memory := CountedMemory(), model=frozen_model(14), max_steps=6)
    want, budget = train(full), 0.97 * memory.highest / GIB
    found = []
    for carries in (None, Carries(rate=1.0)):
        trainer = build(
            tmp_path, "auto", memory_with(carries), model=frozen_model(14), max_steps=6, memory_budget=budget
        )
        assert same_bits(train(trainer), want)
        found.append(trainer.checkpointing)
    without, chosen = found
    assert chosen.inputs_on_host and not without.inputs_on_host
    assert chosen.peak <= budget * GIB < without.peak
    assert "inputs of checkpointed layers waited in the host's memory" in str(chosen)
    assert chosen.to_dict()["inputs_on_host"] is True


@pytest.mark.parametrize("step", [0, 4])
def test_the_inputs_of_layers_go_there_when_nothing_else_helps(step, runs, tmp_path, caplog):
    """A micro-batch that does not fit with every layer checkpointed is run again without their inputs."""
    size = int(runs[True][2] * 0.985)
    memory = memory_with(Carries())
    memory.claims = 1 << 40
    trainer = build(tmp_path, "auto", memory, [At(step, lambda: setattr(memory, "size", size))])
    assert same_bits(train(trainer), runs[False])
    chosen = trainer.checkpointing
    assert chosen.inputs_on_host and memory.failures == chosen.run_again > 0
    assert "every layer checkpointed, their inputs in the host's memory" in caplog.text
    with pytest.raises(torch.OutOfMemoryError, match="though every layer is checkpointed"):
        memory = CountedMemory()
        train(build(tmp_path, "auto", memory, [At(step, lambda: setattr(memory, "size", size))]))


def test_what_fits_in_no_way_is_an_error_still(runs, tmp_path):
    memory = memory_with(Carries())
    trainer = build(tmp_path, "auto", memory, [At(4, lambda: setattr(memory, "size", 1_000_000))])
    with pytest.raises(torch.OutOfMemoryError, match=r"every layer is checkpointed.*rows of at most \d+ tokens"):
        train(trainer)


def test_a_second_training_in_the_same_process(runs, tmp_path):
    for _ in range(2):
        carries = Carries()
        trainer = build(tmp_path, "auto", memory_with(carries), memory_budget=between(runs, 0.3))
        assert same_bits(train(trainer), runs[False])
        assert carries.most > 0
    again = train(trainer)
    assert carries.host.taken == 0 and len(again[0]) > 0


def test_hooks_of_others_for_kept_tensors_have_their_way(runs, tmp_path):
    """Inside them the layers are checkpointed, since only one pair of hooks is asked."""
    seen = []

    def pack(x):
        seen.append(x.shape)
        return x

    trainer = build(tmp_path, "auto", memory_with(carries := Carries()), memory_budget=between(runs, 0.3))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        assert same_bits(train(trainer), runs[False])
    assert seen and carries.most == 0


@pytest.mark.parametrize("value", [-1, "a lot", True, float("nan"), float("inf")])
def test_a_budget_that_is_none(value, tmp_path):
    with pytest.raises(ValueError, match="host_memory_budget is .*; expected a number of GiB of 0 or more"):
        build(tmp_path, "auto", host_memory_budget=value)


def test_a_budget_without_auto(tmp_path):
    with pytest.raises(ValueError, match="Set activation_checkpointing: auto, or remove host_memory_budget"):
        build(tmp_path, True, host_memory_budget=4)
