"""`activation_checkpointing: auto` with host memory, in a trainer on a counted memory: the same bits, faster."""

import json

import memory_runs
import pytest
import torch
from memory_runs import Carries, CountedMemory, build, memory_with, rows_of_one_length, same_bits, train
from tiny_models import tiny_model

from liger_trainer.memory.device_memory import GIB


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    found = {}
    for checkpointing in (False, True):
        memory = CountedMemory()
        trainer = build(tmp_path_factory.mktemp("run"), checkpointing, memory)
        found[checkpointing] = (*train(trainer), memory.highest)
    return found


def between(runs, share):
    return (runs[True][2] + share * (runs[False][2] - runs[True][2])) / GIB


@pytest.mark.parametrize(
    "share, patched",
    [pytest.param(0.3, False, marks=pytest.mark.slow), pytest.param(0.6, False, marks=pytest.mark.slow), (0.3, True)],
)
def test_the_same_bits_within_the_budget(share, patched, runs, tmp_path, caplog):
    """Rows of uneven lengths, dropout, two micro-batches in a step."""
    options = {"use_liger": patched, "liger_config": {"rebuild_above_mib": 0} if patched else None}
    want = train(build(tmp_path / "none", False, **options)) if patched else runs[False]
    budget, carries = between(runs, share), Carries()
    memory = memory_with(carries)
    trainer = build(tmp_path, "auto", memory, memory_budget=budget, **options)
    assert same_bits(train(trainer), want)
    chosen = trainer.checkpointing
    assert memory.highest <= budget * GIB * 1.005
    assert 0 < carries.most <= carries.host.room
    assert chosen.most_on_host > 0
    without = build(tmp_path / "without", "auto", CountedMemory(), memory_budget=budget, **options)
    train(without)
    assert chosen.kept + chosen.on_host > without.checkpointing.kept
    assert f"{chosen.most_on_host} had them in the host's memory" in caplog.text
    assert carries.host.taken == 0, "it is given back at the end"
    report = json.loads(json.dumps(chosen.to_dict()))
    assert report["host_most"] == chosen.most_on_host and report["largest"]["host"] == chosen.on_host


def test_layers_that_fit_stay_on_the_gpu(runs, tmp_path):
    carries = Carries()
    trainer = build(tmp_path, "auto", memory_with(carries), memory_budget=between(runs, 1.5))
    assert same_bits(train(trainer), runs[False])
    assert carries.most == 0 and trainer.checkpointing.most_on_host == 0


def test_a_full_host_keeps_the_rest_on_the_gpu(runs, tmp_path):
    carries = Carries(room=1 << 20)
    trainer = build(tmp_path, "auto", memory_with(carries), memory_budget=between(runs, 0.3))
    assert same_bits(train(trainer), runs[False])
    assert carries.most <= 1 << 20


class PinsLess(Carries):
    """A host that can pin less than it has free."""

    def _pin(self, size):
        if self.most > 200_000:
            raise RuntimeError("CUDA error: out of memory")
        return super()._pin(size)


@pytest.mark.slow
def test_a_host_that_takes_less_than_promised(tmp_path, monkeypatch, caplog):
    """Once activations have to stay on the GPU, the other layers are checkpointed, and no more go to the host."""
    monkeypatch.setattr(memory_runs, "uneven_rows", rows_of_one_length)
    highest = {}
    runs = {}
    options = {"max_steps": 6, "gradient_accumulation_steps": 1}
    for checkpointing in (False, True, "auto"):
        memory = memory_with(PinsLess() if checkpointing == "auto" else None)
        if checkpointing == "auto":
            options["memory_budget"] = (highest[True] + 0.3 * (highest[False] - highest[True])) / GIB
        model = tiny_model("llama", attention_dropout=0.1, num_hidden_layers=12)
        trainer = build(tmp_path, checkpointing, memory, model=model, **options)
        runs[checkpointing], highest[checkpointing] = train(trainer), memory.highest
    assert same_bits(runs["auto"], runs[False])
    assert memory.highest <= options["memory_budget"] * GIB
    assert trainer.checkpointing.most_on_host > 0 == trainer.checkpointing.on_host
    assert caplog.text.count("and no more") == 1


@pytest.mark.slow
def test_a_second_training_in_the_same_process(runs, tmp_path):
    for _ in range(2):
        carries = Carries()
        trainer = build(tmp_path, "auto", memory_with(carries), memory_budget=between(runs, 0.3))
        assert same_bits(train(trainer), runs[False])
        assert carries.most > 0
    again = train(trainer)
    assert carries.host.taken == 0 and len(again[0]) > 0


def test_others_saved_tensor_hooks_are_respected(runs, tmp_path):
    """Inside such hooks the layers are checkpointed, because PyTorch asks only one pair of hooks."""
    seen = []

    def pack(x):
        seen.append(x.shape)
        return x

    carries = Carries()
    trainer = build(tmp_path, "auto", memory_with(carries), memory_budget=between(runs, 0.3))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        assert same_bits(train(trainer), runs[False])
    assert seen and carries.most == 0


@pytest.mark.parametrize("value", [-1, "a lot", True, float("nan"), float("inf")])
def test_a_wrong_host_memory_budget_is_refused(value, tmp_path):
    with pytest.raises(ValueError, match="host_memory_budget is .*; expected a number of GiB of 0 or more"):
        build(tmp_path, "auto", host_memory_budget=value)


@pytest.mark.parametrize(
    ("checkpointing", "found"), [(True, "it is True"), (None, "activation_checkpointing is not set")]
)
def test_a_budget_without_auto(checkpointing, found, tmp_path):
    message = f"reads, but {found}. Set activation_checkpointing: auto, or remove host_memory_budget"
    with pytest.raises(ValueError, match=message):
        build(tmp_path, checkpointing, host_memory_budget=4)
