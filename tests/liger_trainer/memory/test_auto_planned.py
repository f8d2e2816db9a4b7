"""With `activation_checkpointing: auto`, a micro-batch takes no more than planned, and no more than the budget."""

import memory_runs
import pytest
import torch
from memory_runs import (
    At,
    Carries,
    CountedMemory,
    build,
    frozen_model,
    memory_with,
    planned_and_real,
    rows_of_one_length,
    same_bits,
    train,
)
from tiny_models import tiny_model
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_trainer import LigerTrainer
from liger_trainer.memory.device_memory import GIB


@pytest.fixture(autouse=True)
def one_length(monkeypatch):
    monkeypatch.setattr(memory_runs, "uneven_rows", rows_of_one_length)


@pytest.fixture
def peaks(monkeypatch):
    return planned_and_real(monkeypatch)


def run(out, memory, model, steps, budget=None, **options):
    """A trainer after `steps` steps of one micro-batch."""
    trainer = build(
        out,
        "auto",
        memory,
        model=model,
        max_steps=steps,
        gradient_accumulation_steps=1,
        memory_budget=None if budget is None else budget / GIB,
        **options,
    )
    train(trainer)
    return trainer


def hooked(model):
    """Hold the layers' results until the next micro-batch."""
    held = []
    model.register_forward_pre_hook(lambda *_: held.clear())
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, args, output: held.append(output))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("with_hooks", [False, True], ids=["alone", "hooks"])
@pytest.mark.parametrize("budget, rate", [(2.6e6, 1e15), (2.6e6, 1e6), (3.2e6, 1e15)])
def test_hidden_states_that_are_held_elsewhere(budget, rate, with_hooks, peaks, tmp_path):
    """The first layer's states are held until the end of the forward pass, where a model with an adapter peaks."""
    model = hooked(frozen_model(8)) if with_hooks else frozen_model(8)
    trainer = run(tmp_path, memory_with(Carries(rate=rate)), model, 7, budget)
    assert all(real <= planned <= budget for planned, real in peaks) and len(peaks) == 5
    assert trainer.checkpointing.on_host > 0


@pytest.mark.parametrize("shrinks", [1, 8])
def test_weights_that_autocast_has_made_of_others(shrinks, peaks, tmp_path, monkeypatch):
    """A layer that keeps its activations keeps these casts too, however few tokens there are."""
    monkeypatch.setattr(memory_runs, "uneven_rows", lambda: rows_of_one_length(64))
    model = tiny_model("llama", num_hidden_layers=8, intermediate_size=512)

    class Shrinking(LigerTrainer):
        def training_step(self, model, inputs, *args, **kwargs):
            if self.state.global_step > 2:
                inputs = {name: x[:, : x.shape[1] // shrinks] for name, x in inputs.items()}
            return super().training_step(model, inputs, *args, **kwargs)

    options = {"bf16": True, "optim": "sgd", "trainer_class": Shrinking}
    trainer = run(tmp_path, CountedMemory(), model, 6, 5.6e6, **options)
    assert 0 < trainer.checkpointing.most < 8 or shrinks > 1
    assert all(real <= planned for planned, real in peaks) and len(peaks) == 4


class OfTwoSizes(LigerTrainer):
    """Calls the model with part of a row and with other rows under one autocast."""

    def compute_loss(self, model, inputs, **kwargs):
        short = {name: x[:1, : x.shape[1] // 2] for name, x in inputs.items()}
        with torch.autocast("cpu", torch.bfloat16):
            return sum(super(OfTwoSizes, self).compute_loss(model, part, **kwargs) for part in (short, inputs))


def with_shared_blocks():
    """Layers that share one MLP, as in Zamba. The MLP holds what other models checkpoint separately."""
    model = tiny_model("llama", num_hidden_layers=4)
    for layer in model.model.layers:
        layer.mlp = model.model.layers[0].mlp
        layer.self_attn.gradient_checkpointing = False
    return model


@pytest.mark.parametrize("trainer_class", [LigerTrainer, OfTwoSizes], ids=["shared", "called-twice"])
def test_autocast_remembers_weights_that_are_used_by_several_calls(trainer_class, tmp_path):
    """Their gradients are summed in 16 bits, as without checkpointing."""
    make = with_shared_blocks if trainer_class is LigerTrainer else lambda: tiny_model("llama", num_hidden_layers=4)
    options = {"max_steps": 4, "gradient_accumulation_steps": 1, "bf16": True, "optim": "sgd"}
    want = train(build(tmp_path, False, model=make(), trainer_class=trainer_class, **options))
    trainer = build(tmp_path, "auto", CountedMemory(), model=make(), trainer_class=trainer_class, **options)
    assert same_bits(train(trainer), want)


@pytest.mark.parametrize("host", [False, True])
def test_layers_of_which_some_are_frozen(host, tmp_path):
    """They keep less than trained layers. Which layers are frozen changes in the sixth step."""
    model = tiny_model("llama", num_hidden_layers=8)

    def train_others(by=1):
        for number, layer in enumerate(model.model.layers):
            layer.requires_grad_((number + by) % 2 == 0)

    train_others(0)
    memory, budget = memory_with(Carries()) if host else CountedMemory(), 2.7e6
    trainer = build(
        tmp_path,
        "auto",
        memory,
        [At(5, train_others)],
        model=model,
        max_steps=10,
        gradient_accumulation_steps=1,
        memory_budget=budget / GIB,
        optim="sgd",
    )
    trainer.create_optimizer()
    train(trainer)
    assert memory.highest <= budget
    assert trainer.checkpointing.kept > 2


class _Between(PreTrainedModel):
    """The module between the layers, one for all of them as in DAB-DETR. Each layer has its own weight."""

    config_class, supports_gradient_checkpointing = LlamaConfig, True

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleList([_Layer(config.hidden_size) for _ in range(config.num_hidden_layers)])
        self.between = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()

    def forward(self, input_ids, labels=None, **_):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
            x = x + torch.tanh(self.between(x))
        return {"loss": x.float().square().mean()}


class _Layer(GradientCheckpointingLayer):
    def __init__(self, width):
        super().__init__()
        self.up = torch.nn.Linear(width, width)

    def forward(self, x):
        return x + torch.sigmoid(self.up(x))


def test_casts_of_a_module_between_the_layers(tmp_path):
    """Autocast caches them, so their gradients are summed as with every layer checkpointed."""
    results = []
    for checkpointing in (True, "auto"):
        torch.manual_seed(0)
        model = _Between(LlamaConfig(vocab_size=131, hidden_size=32, num_hidden_layers=4))
        options = {"max_steps": 4, "bf16": True, "optim": "sgd", "learning_rate": 1.0, "use_liger": False}
        trainer = build(tmp_path, checkpointing, CountedMemory(), model=model, **options)
        results.append(train(trainer))
    assert same_bits(*results)
    assert trainer.checkpointing.most > 0
