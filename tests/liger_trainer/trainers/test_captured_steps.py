"""Trainers with captured steps train as with `cuda_graphs: false`, and as the stock trainers.

Here recorded Python runs again (`RerunRecorder`). `varlen/graphs/test_captured_gpu.py` compares CUDA graphs by bits.
"""

import copy
import gc
import itertools
import weakref

import pytest
import torch
import trainer_parity
from peft import LoraConfig
from tiny_models import ragged_pairs, ragged_rows, tiny_model
from trainer_parity import DPO_LIMITS, assert_same_run, build_dpo, trained
from transformers import Trainer, TrainerCallback
from trl import DPOTrainer, SFTTrainer
from varlen_batches import capture_on_cpu, model_of

from liger_trainer import LigerDPOTrainer, LigerSFTTrainer, LigerTrainer

SGD = {"optim": "sgd", "learning_rate": 0.1}  # Adam's first steps take the sign of gradients, even of mere rounding
TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture
def recorders(monkeypatch):
    return capture_on_cpu(monkeypatch)


def weights_of(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def assert_same_weights(got, want):
    got, want = weights_of(got), weights_of(want)
    assert got.keys() == want.keys()
    for name, p in want.items():
        torch.testing.assert_close(got[name], p, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def replayed(trainer):
    return trainer.captured_steps.to_dict()["calls_replayed"]


def assert_same_three(run, classes, least):
    """Captured equals uncaptured, and stock. `run(class, options)` returns logs as a tensor, and the trainer."""
    ours, stock = classes
    got, captured = run(ours, {"cuda_graphs": "true"})
    want, plain = run(ours, {"cuda_graphs": "false"})
    of_stock, theirs = run(stock, {})
    assert replayed(captured) >= least, captured.captured_steps.to_dict()
    assert plain.captured_steps is None
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(got, of_stock, rtol=1e-5, atol=1e-7)
    assert_same_weights(captured, plain)
    assert_same_weights(captured, theirs)
    return captured


CASES = {
    "full": {},
    "accumulation": {"split": (2, 4)},
    "checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "split": (4, 2),
    },
    "clipped": {"max_grad_norm": 0.05},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4},
}
PACKED = {
    "padding_free": {"padding_free": True, "max_length": None},
    "packing": {"packing": True, "max_length": 48, "split": (2, 1)},
}


OFTEN = [("accumulation", "full"), ("checkpointing", "lora"), ("evaluation", "full"), ("packing", "full")]
CELLS = [  # slow: rarely used options
    pytest.param(*cell, marks=() if cell in OFTEN else pytest.mark.slow)
    for cell in itertools.product([*CASES, *PACKED], ("full", "lora"))
]


@pytest.mark.parametrize(("case", "adapters"), CELLS)
def test_sft(case, adapters, recorders, tmp_path):
    model = model_of("llama")
    if adapters == "lora":
        model = trainer_parity.with_lora(model, TARGETS)
    options = SGD | (CASES | PACKED)[case]

    def run(trainer_class, more):
        return trainer_parity.run(trainer_class, model, tmp_path, rows=ragged_rows(48), **(options | more))

    assert_same_three(run, (LigerSFTTrainer, SFTTrainer), least=4)


@pytest.mark.parametrize(("case", "adapters"), [("accumulation", "full"), ("checkpointing", "lora")])
def test_trainer(case, adapters, recorders, tmp_path):
    model = model_of("llama")
    if adapters == "lora":
        model = trainer_parity.with_lora(model, TARGETS)
    options = {"optim": "sgd"} | CASES[case]

    def run(trainer_class, more):
        return trainer_parity.run(trainer_class, model, tmp_path, rows=ragged_rows(48), **(options | more))

    assert_same_three(run, (LigerTrainer, Trainer), least=4)


@pytest.mark.parametrize("reference", ["model", "adapters off"])
@pytest.mark.parametrize("split", [pytest.param((4, 1), marks=pytest.mark.slow), (2, 2)], ids=str)
def test_dpo(reference, split, recorders, tmp_path):
    model, other = model_of("llama"), tiny_model("llama", seed=7)
    other.set_attn_implementation("sdpa")
    with_adapters = reference == "adapters off"
    config = LoraConfig(r=4, target_modules=TARGETS, lora_dropout=0.0)
    trainers = []

    def run(trainer_class, more):
        torch.manual_seed(5)  # of new adapters
        given = {"peft_config": config} if with_adapters else {"ref_model": copy.deepcopy(other)}
        trainer = build_dpo(trainer_class, model, tmp_path, split, ragged_pairs(24), trainer_options=given, **more)
        trainers.append(trainer)
        return trained(trainer)

    got = run(LigerDPOTrainer, {"cuda_graphs": "true"})
    assert_same_run(got, run(LigerDPOTrainer, {"cuda_graphs": "false"}), limits=DPO_LIMITS)
    assert_same_run(got, run(DPOTrainer, {}), limits=DPO_LIMITS)
    assert replayed(trainers[0]) >= 10, trainers[0].captured_steps.to_dict()  # of the model, and of the reference
    assert_same_weights(trainers[0], trainers[1])
    assert_same_weights(trainers[0], trainers[2])


def test_a_run_that_goes_on_from_a_checkpoint(recorders, tmp_path):
    """It captures again after its first step."""
    model = model_of("llama")
    options = {"save_strategy": "steps", "save_steps": 3, "rows": ragged_rows(48), "cuda_graphs": "true"}
    want, whole = trainer_parity.run(LigerSFTTrainer, model, tmp_path, **options)
    _, again = trainer_parity.run(LigerSFTTrainer, model, tmp_path, train=False, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "LigerSFTTrainer" / "checkpoint-3"))
    assert replayed(again) == 2
    assert_same_weights(again, whole)


class Changes(TrainerCallback):
    """Calls `change(model)` after the third step."""

    def __init__(self, change):
        self.change = change

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 3:
            self.change(model)


def freeze_first_layer(model):
    model.model.layers[0].requires_grad_(False)


def watch(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: 0.5 * output)


def rescale(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2


def checkpoint(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})


@pytest.mark.parametrize("change", [freeze_first_layer, watch, rescale, checkpoint], ids=lambda change: change.__name__)
def test_a_callback_that_changes_the_model_takes_effect_at_once(change, recorders, tmp_path):
    model = model_of("llama")
    options = SGD | {"max_grad_norm": 0.0}

    def run(trainer_class, more):
        given = {"callbacks": [Changes(change)]}
        return trainer_parity.run(
            trainer_class, model, tmp_path, rows=ragged_rows(48), trainer_options=given, **options, **more
        )

    assert_same_three(run, (LigerSFTTrainer, SFTTrainer), least=2)


class KeepsGradients(TrainerCallback):
    """Keeps the gradients of each step, for example to plot them later."""

    def __init__(self):
        self.kept, self.copies = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.kept.append([p.grad for p in model.parameters()] + [p.grad[:1] for p in model.parameters()])
        self.copies.append([gradient.clone() for gradient in self.kept[-1]])


def test_gradients_and_metrics_that_a_callback_keeps(recorders, tmp_path):
    keeps = KeepsGradients()
    given = {"callbacks": [keeps]}
    rows = ragged_rows(48)
    model = model_of("llama")
    got, trainer = trainer_parity.run(
        LigerSFTTrainer, model, tmp_path, rows=rows, trainer_options=given, max_grad_norm=0.0, cuda_graphs="true", **SGD
    )
    want, _ = trainer_parity.run(
        LigerSFTTrainer, model, tmp_path, rows=rows, max_grad_norm=0.0, cuda_graphs="false", **SGD
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
    assert len(keeps.kept) == 6
    for kept, copies in zip(keeps.kept[:-1], keeps.copies, strict=False):
        assert all(map(torch.equal, kept, copies))


def test_two_trainers_in_turn_on_one_model(recorders, tmp_path):
    rows = ragged_rows(48)
    models = [model_of("llama"), model_of("llama")]
    for mode, model in zip(("true", "false"), models, strict=True):
        for _ in range(2):
            args = {"rows": rows, "cuda_graphs": mode} | SGD
            _, trainer = trainer_parity.run(LigerSFTTrainer, model, tmp_path, train=False, **args)
            trainer.model.load_state_dict(model.state_dict())
            trainer.train()
            model.load_state_dict(trainer.model.state_dict())
    for (name, got), want in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=name)
    assert len(recorders) == 2


def test_a_trainer_that_is_gone_frees_its_model(recorders, tmp_path):
    _, trainer = trainer_parity.run(
        LigerSFTTrainer, model_of("llama"), tmp_path, rows=ragged_rows(48), cuda_graphs="true"
    )
    assert replayed(trainer) > 0
    model = weakref.ref(trainer.model)
    twin = copy.deepcopy(trainer.model)
    del trainer
    gc.collect()
    assert model() is None
    assert all(p.grad is None for p in twin.parameters())


class Breaks(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise ValueError("a callback has failed")


def test_an_error_of_a_callback_releases_all(recorders, tmp_path):
    rows = ragged_rows(48)
    given = {"callbacks": [Breaks()]}
    _, trainer = trainer_parity.run(
        LigerSFTTrainer, model_of("llama"), tmp_path, rows=rows, train=False, trainer_options=given, cuda_graphs="true"
    )
    with pytest.raises(ValueError, match="a callback has failed"):
        trainer.train()
    assert replayed(trainer) == 2
    trainer.remove_callback(Breaks)
    trainer.train()  # its step count restarts
    assert replayed(trainer) == 5
