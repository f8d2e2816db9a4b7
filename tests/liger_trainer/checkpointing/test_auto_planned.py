"""With `activation_checkpointing: auto` a micro-batch takes no more than was planned, and no more than the budget."""

import auto_runs
import pytest
import torch
from auto_runs import At, build, frozen_model, memory_with, rows_of_one_length, same_bits, train
from counted_memory import Carries, CountedMemory
from tiny_models import tiny_model

from liger_trainer import LigerTrainer
from liger_trainer.checkpointing import chooser, switches
from liger_trainer.checkpointing.agreement import Ranks
from liger_trainer.checkpointing.memory import GIB


@pytest.fixture(autouse=True)
def one_length(monkeypatch):
    monkeypatch.setattr(auto_runs, "uneven_rows", rows_of_one_length)


def planned_and_real(out, memory, model, steps, budget=None, **options):
    """Train `steps` steps of a micro-batch. Returns the trainer, and [planned, real] peaks from the third step on."""
    found = []

    def next_step():
        if found:
            found[-1] = [trainer.checkpointing.peak, memory.peak()]
        memory.start_peak()
        found.append(None)

    trainer = build(
        out, "auto", memory, [At(step, next_step) for step in range(2, steps)], model=model, max_steps=steps,
        gradient_accumulation_steps=1, memory_budget=None if budget is None else budget / GIB, **options,
    )  # fmt: skip
    train(trainer)
    found[-1] = [trainer.checkpointing.peak, memory.peak()]
    return trainer, found


def hooked(model):
    """Somebody holds what the layers return until the next micro-batch."""
    held = []
    model.register_forward_pre_hook(lambda *_: held.clear())
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, args, output: held.append(output))
    return model


@pytest.mark.parametrize("with_hooks", [False, True], ids=["alone", "hooks"])
@pytest.mark.parametrize("budget, rate", [(2.6e6, 1e15), (2.6e6, 1e6), (3.2e6, 1e15)])
def test_hidden_states_that_somebody_else_holds(budget, rate, with_hooks, tmp_path):
    """The first layer's are held until the end of the forward pass, where an adapter has its peak. Where nobody holds
    those of the others, the next plan reckons with that."""
    model = hooked(frozen_model(8)) if with_hooks else frozen_model(8)
    trainer, peaks = planned_and_real(tmp_path, memory_with(Carries(rate=rate)), model, 4, budget)
    assert all(real <= planned <= budget for planned, real in peaks)
    assert trainer.checkpointing.on_host > 0
    assert with_hooks or rate < 1e15 or peaks[1][0] < peaks[0][0]


def test_a_tensor_that_is_too_large_for_what_is_used_of_it(tmp_path):
    """It stays on the GPU. The first plan does not know of it, and the second one does."""
    model = frozen_model(8)
    for layer in model.model.layers:

        def forward(x, of_layer=layer.mlp.forward):
            one, other = (torch.cat([x] * 12, -1) for _ in range(2))
            return of_layer(x) + torch.tanh(one[..., :32].clone()) * other[..., :32].detach()

        layer.mlp.forward = forward
    trainer, peaks = planned_and_real(tmp_path, memory_with(Carries()), model, 5, 3.6e6)
    (planned, real), *others = peaks
    assert real > planned, "or there is nothing to be learned"
    assert all(real <= planned <= 3.6e6 for planned, real in others)
    assert trainer.checkpointing.on_host > 0


@pytest.mark.parametrize("length", [16, 64])
def test_weights_that_autocast_has_made_of_others(length, tmp_path, monkeypatch):
    """A layer that keeps its activations keeps these too, others only as long as they are called."""
    monkeypatch.setattr(auto_runs, "uneven_rows", lambda: rows_of_one_length(length))
    model = tiny_model("llama", num_hidden_layers=8, intermediate_size=512)
    trainer, peaks = planned_and_real(tmp_path, CountedMemory(), model, 4, bf16=True, optim="sgd")
    assert trainer.checkpointing.kept == 8
    assert all(real <= planned for planned, real in peaks)


def test_weights_that_are_used_by_several_calls():
    model = tiny_model("llama", num_hidden_layers=3)
    first, second, third = model.model.layers
    assert not switches.share_weights(model, [first, second, third])
    assert switches.share_weights(model, [first, second, third, first]), "one is called twice"
    third.mlp.up_proj.weight = first.mlp.up_proj.weight
    assert switches.share_weights(model, [first, second, third])
    assert switches.share_weights(model, [first, second]), "the other one is no layer that is called"
    assert not switches.share_weights(model, [second])


class OfTwoSizes(LigerTrainer):
    """Calls the model with a part of a row, and with other rows, under one autocast."""

    def compute_loss(self, model, inputs, **kwargs):
        short = {name: x[:1, : x.shape[1] // 2] for name, x in inputs.items()}
        with torch.autocast("cpu", torch.bfloat16):
            return sum(super(OfTwoSizes, self).compute_loss(model, part, **kwargs) for part in (short, inputs))


def with_shared_blocks():
    """Layers with one MLP, which hold what is checkpointed by itself elsewhere, as in Zamba."""
    model = tiny_model("llama", num_hidden_layers=4)
    for layer in model.model.layers:
        layer.mlp, layer.self_attn.gradient_checkpointing = model.model.layers[0].mlp, False
    return model


@pytest.mark.parametrize("trainer_class", [LigerTrainer, OfTwoSizes], ids=["shared", "called-twice"])
def test_autocast_remembers_weights_that_are_used_by_several_calls(trainer_class, tmp_path):
    """Their gradients are added up in 16 bits, as without checkpointing."""
    make = with_shared_blocks if trainer_class is LigerTrainer else lambda: tiny_model("llama", num_hidden_layers=4)
    options = {"max_steps": 4, "gradient_accumulation_steps": 1, "bf16": True, "optim": "sgd"}
    want = train(build(tmp_path, False, model=make(), trainer_class=trainer_class, **options))
    trainer = build(tmp_path, "auto", CountedMemory(), model=make(), trainer_class=trainer_class, **options)
    assert same_bits(train(trainer), want)


@pytest.mark.parametrize("host", [False, True])
def test_layers_of_which_some_are_frozen(host, tmp_path):
    """They keep less than those that are trained, which are others from the sixth step on."""
    model = tiny_model("llama", num_hidden_layers=8)

    def train_others(by=1):
        for number, layer in enumerate(model.model.layers):
            layer.requires_grad_((number + by) % 2 == 0)

    def next_step():
        peaks.append([trainer.checkpointing.peak, memory.peak()])
        memory.start_peak()

    train_others(0)
    memory, peaks, budget = memory_with(Carries()) if host else CountedMemory(), [], 2.7e6
    trainer = build(
        tmp_path, "auto", memory, [At(5, train_others), *(At(step, next_step) for step in range(2, 10))], model=model,
        max_steps=10, gradient_accumulation_steps=1, memory_budget=budget / GIB, optim="sgd",
    )  # fmt: skip
    trainer.create_optimizer()
    train(trainer)
    assert all(real <= budget for _, real in peaks), peaks
    assert trainer.checkpointing.kept > 2


def test_layers_of_which_other_weights_are_trained_are_of_one_kind():
    """Or there would be as many kinds as layers where it was chosen for each weight."""
    model = tiny_model("llama", num_hidden_layers=3)
    layers = model.model.layers
    layers[0].mlp.requires_grad_(False)
    layers[1].requires_grad_(False)
    groups = [switches.Switch(None, layer, None).group for layer in layers]
    assert groups[0] == groups[2] != groups[1]


@pytest.mark.parametrize("start, lag", [(0, 4), (2, 1), (0, 1)])
def test_a_process_with_a_slower_link_does_not_take_the_memory_of_others(start, lag, tmp_path, monkeypatch):
    """The agreed plan holds activations for longer than this process has reckoned with."""

    class OfTwo(Ranks):
        def least(self, *numbers):
            if len(numbers) == 3:
                return numbers
            other = (99, 99, 3, -start, -lag)
            return tuple(map(min, numbers, (*other, *(-number for number in other))))

    monkeypatch.setattr(chooser, "Ranks", OfTwo)
    trainer, peaks = planned_and_real(tmp_path, memory_with(Carries()), frozen_model(8), 3, 2.6e6)
    assert all(real <= planned <= 2.6e6 for planned, real in peaks)
    assert trainer.checkpointing.kept > 1


@pytest.mark.parametrize("rate, room", [(1.0, 1 << 30), (1e15, 3 << 20)], ids=["slow", "little-room"])
def test_layers_that_keep_their_activations_keep_their_inputs_too(rate, room, tmp_path):
    """Also where the inputs of checkpointed layers are on the host, where they are not part of what was measured.

    What they take of the host's memory is not there for other activations.
    """
    model = frozen_model(52, attention_dropout=0.0)
    trainer, peaks = planned_and_real(tmp_path, memory_with(Carries(room, rate)), model, 5, 3.65e6)
    assert trainer.checkpointing.inputs_on_host and trainer.checkpointing.kept > 1
    assert peaks[-1][1] <= peaks[-1][0] <= 3.65e6
