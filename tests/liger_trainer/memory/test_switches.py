"""Checkpointing that is turned off and on again, as TRL does around each pass of a reference."""

import torch
from tiny_models import tiny_model
from torch import nn

from liger_trainer.memory import switches


def decide(switch, function, args):
    return switch.checkpointed(function, *args)


def test_weights_are_those_of_pytorch():
    layer = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3, bias=False), nn.ModuleList([nn.LayerNorm(3)]))
    layer.append(nn.Linear(2, 3))
    layer[3].weight = layer[0].weight
    found = switches._weights_of(layer)
    want = list(layer.parameters())
    assert len(found) == len(want) == 6
    assert all(one is other for one, other in zip(found, want, strict=True))


def test_switches_come_back_without_a_walk_of_pytorch_s(monkeypatch):
    """An 8B model with adapters has 2,665 modules, and `named_modules` takes microseconds for each."""
    model = tiny_model("llama")
    stock = nn.Module.named_modules
    walked = []

    def counting(self, *args, **kwargs):
        walked.append(self)
        return stock(self, *args, **kwargs)

    def toggle():
        walked.clear()
        model.gradient_checkpointing_disable()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return len(walked)

    monkeypatch.setattr(nn.Module, "named_modules", counting)
    of_stock = toggle()
    switches.install(model, decide)
    before = switches.switches_of(model)
    assert toggle() == of_stock > 0
    after = switches.switches_of(model)
    assert before == after and len(after) >= len(model.model.layers)
    assert [switch.group for switch in before] == [switch.group for switch in after]

    model.train()
    ids = torch.ones(1, 4, dtype=torch.long)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.model.layers.parameters())
