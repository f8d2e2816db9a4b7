"""While a model is trained, its `train`, `zero_grad` and `parameters` do the same as PyTorch's."""

import copy
import pickle
from types import MethodType

import pytest
import torch
from tiny_models import tiny_model
from torch import nn
from trainer_parity import run, with_lora

from liger_trainer import LigerSFTTrainer
from liger_trainer.trainers import module_walks


def model_of(kind):
    model = tiny_model("llama")
    return with_lora(model, ["q_proj", "v_proj"]) if kind == "lora" else model


def build(folder, **options):
    """A trainer of four steps with two micro-batches."""
    return run(LigerSFTTrainer, tiny_model("llama"), folder, (2, 2), train=False, **options)[1]


def bound(model):
    """`model` as it is during training."""
    for method in (module_walks.train, module_walks.zero_grad):
        model.__dict__[method.__name__] = MethodType(method, model)
    return model


def same(found, wanted):
    return len(found) == len(wanted) and all(x is y for x, y in zip(found, wanted, strict=True))


class Odd(nn.Module):
    """Shares a module and a weight, has None for both, and contains itself."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.ModuleList([nn.Linear(2, 2), self.first])
        self.second[0].bias = self.first.bias
        self.nothing = None
        self.register_module("none", None)
        self.register_parameter("neither", None)
        self.second[0].back = self


@pytest.mark.parametrize("model", [model_of("full"), model_of("lora"), Odd()], ids=["full", "lora", "odd"])
def test_parameters_are_pytorch_s_in_its_order(model):
    assert same(module_walks.modules_of(model), list(model.modules()))
    assert same(module_walks.parameters_of(model), list(model.parameters()))


def test_train_reaches_a_module_that_was_switched_by_hand():
    model = bound(model_of("lora"))
    model.train()
    layer = model.get_base_model().model.layers[1].mlp
    layer.eval()
    assert not module_walks.is_training(model)
    assert model.train() is model
    assert all(module.training for module in model.modules())
    assert not any(module.training for module in model.eval().modules())
    with pytest.raises(ValueError, match="boolean"):
        model.train(1)


def count_train(owner):
    calls = []

    def train(self, mode=True):
        calls.append(mode)
        return nn.Module.train(self, mode)

    owner.train = train if isinstance(owner, type) else train.__get__(owner)
    return calls


@pytest.mark.parametrize("where", ["class", "instance", "added child"])
def test_a_train_of_the_users_is_called_each_time(where):
    class Own(nn.Linear):
        pass

    model = bound(model_of("full")).train()
    layer = model.model.layers[0].mlp
    layer.own = Own(1, 1)
    if where == "added child":
        model.train()
        layer.another = Own(1, 1)
    calls = count_train(layer.own if where == "instance" else Own)
    model.train()
    model.train()
    assert calls == [True] * (4 if where == "added child" else 2)


def test_a_setattr_of_the_users_hears_of_training():
    class Hears(nn.Linear):
        heard = 0

        def __setattr__(self, name, value):
            Hears.heard += name == "training"
            super().__setattr__(name, value)

    model = bound(model_of("full"))
    model.model.own = Hears(1, 1)
    before = Hears.heard
    model.train()
    assert Hears.heard == before + 1


def test_methods_that_are_replaced_on_nn_module_are_called(monkeypatch):
    model = bound(model_of("full")).train()
    calls = []
    for name in ("train", "zero_grad"):
        monkeypatch.setattr(nn.Module, name, lambda *args, name=name: calls.append(name))
    model.train()
    model.zero_grad()
    assert calls == ["train", "zero_grad"]


def test_zero_grad_reaches_a_weight_that_was_added():
    model = bound(model_of("lora"))
    model.get_base_model().added = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("where", ["class", "instance"])
def test_parameters_of_the_users_are_asked(where):
    class Own(nn.Linear):
        def named_modules(self, *args, **kwargs):
            return iter(())

    model = model_of("full")
    model.model.own = Own(1, 1) if where == "class" else nn.Linear(1, 1)
    if where == "instance":
        model.model.own.named_modules = lambda *args, **kwargs: iter(())
    assert module_walks.parameters_of(model) is None
    found = list(module_walks.WithParameters(model).parameters())
    assert same(found, list(model.parameters())) and not any(p is model.model.own.weight for p in found)


def test_copies_and_pickles_are_of_their_own_weights():
    model = bound(model_of("full"))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for parameter in (*model.parameters(), *twin.parameters()):
            parameter.grad = torch.ones_like(parameter)
        twin.zero_grad()
        twin.eval()
        assert all(p.grad is None for p in twin.parameters()) and all(p.grad is not None for p in model.parameters())
        assert model.training != twin.training or not model.train().training


def test_a_trainer_binds_them_while_it_trains(tmp_path, monkeypatch):
    trainer = build(tmp_path)
    walks = []
    stock = module_walks.modules_of
    monkeypatch.setattr(module_walks, "modules_of", lambda model: walks.append(model) or stock(model))
    trainer.train()
    micro_batches, steps = 8, 4
    once = 2  # zero_grad before the first step, and Trainer's search for gradients on several meshes
    assert len(walks) == micro_batches + 2 * steps + once, "train; zero_grad and parameters"
    assert all(model is trainer.model for model in walks)
    assert not {"train", "zero_grad"} & vars(trainer.model).keys()


def test_the_norm_is_the_same_to_the_last_digit(tmp_path, monkeypatch):
    def norms():
        trainer = build(tmp_path, max_grad_norm=0.5)
        trainer.train()
        return [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]

    got = norms()
    monkeypatch.setattr(module_walks, "parameters_of", lambda model: None)
    assert got == norms()
