"""MLPs of a width of which products are slow: as one function, where their projections are plain layers."""

import copy

import pytest
import torch
from image_models import image_batch, image_model, image_step
from peft import LoraConfig, get_peft_model
from torch import nn
from varlen_batches import assert_same_step

from liger_trainer import apply_liger
from liger_trainer.patching import mlps


@pytest.fixture
def calls(monkeypatch):
    """The calls of our function. Every MLP counts as slow: on a GPU, it is the width that decides."""
    found, aligned = [], mlps.aligned_mlp
    monkeypatch.setattr(mlps, "_is_slow", lambda x, down: True)
    monkeypatch.setattr(mlps, "aligned_mlp", lambda *given, **more: found.append(1) or aligned(*given, **more))
    return found


def test_a_tower(calls):
    model = image_model("qwen2_5_vl")
    batch = image_batch(model)
    want = image_step(model, batch)
    apply_liger(model)
    calls.clear()
    assert_same_step(image_step(model, batch), want)
    assert len(calls) == 4  # two layers of the tower, two of the decoder


@pytest.mark.parametrize("change", ["hook", "forward", "lora", "class", "dtype", "strides"])
def test_other_projections_are_called_as_modules(change, calls):
    model = image_model("qwen2_5_vl")
    batch = image_batch(model)
    apply_liger(model)
    mlp = model.model.visual.blocks[0].mlp
    seen = []
    if change == "hook":
        mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
    elif change == "forward":
        own = mlp.up_proj.forward
        mlp.up_proj.forward = lambda x: seen.append(1) or own(x)
    elif change == "class":
        mlp.up_proj.__class__ = type("Mine", (nn.Linear,), {})
    elif change == "lora":
        model = get_peft_model(model, LoraConfig(target_modules=r".*visual.*up_proj"))
    elif change == "dtype":
        assert mlps._weight_and_bias(copy.deepcopy(mlp.up_proj).double(), torch.ones(2, 64)) is None
        return
    else:
        mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight.t().contiguous().t())
    calls.clear()
    image_step(model, batch)
    assert len(calls) == (3 if change != "lora" else 2)
    assert bool(seen) == (change in ("hook", "forward"))


def test_which_are_slow():
    assert not mlps._is_slow(torch.ones(4096, 64), nn.Linear(12, 64)), "not on a CPU"
