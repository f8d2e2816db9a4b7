"""A patched model that was pickled, saved, copied, unpatched or trained before trains like a stock one."""

import copy
import gc
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from side_by_side import (
    FIRST,
    SETTINGS,
    as_at_real_size,
    assert_same_step,
    first_or_slow,
    model_of,
    outcome,
    patched,
    step,
)
from tiny_models import VOCAB, LogitRows, tiny_model
from trainer_parity import run as run_sft
from trainer_parity import run as run_trainer
from transformers import Trainer
from trl import SFTTrainer

from liger_trainer import LigerSFTTrainer, LigerTrainer, apply_liger, remove_liger


@pytest.fixture(autouse=True)
def real_size(monkeypatch):
    as_at_real_size(monkeypatch)


def pickled(model, folder):
    return pickle.loads(pickle.dumps(model))


def saved(model, folder):
    torch.save(model, folder / "model.pt")
    return torch.load(folder / "model.pt", weights_only=False)


def saved_after_a_step(model, folder):
    step(model)
    model.zero_grad()
    return saved(model, folder)


def copied_after_a_step(model, folder):
    step(model)
    model.zero_grad()
    return copy.deepcopy(model)


def unpatched_and_patched(model, folder):
    remove_liger(model)
    return patched(model)


def patched_twice(model, folder):
    return patched(model)


COPIES = {
    f.__name__: f
    for f in (pickled, saved, saved_after_a_step, copied_after_a_step, unpatched_and_patched, patched_twice)
}


# With checkpointing, a stock model has a hook of transformers that cannot be pickled.
KEPT = [setting for setting in SETTINGS if setting[1] == "kept"]


@pytest.mark.parametrize(
    "name, setting",
    [
        first_or_slow(name, setting, first=setting == FIRST)
        for name in COPIES
        for setting in (KEPT if name.startswith(("pickled", "saved")) else SETTINGS)
    ],
)
def test_a_copy_trains_as_stock(name, setting, tmp_path):
    """It has its own weights, so the original's may change."""
    model = patched(model_of(setting))
    twin = COPIES[name](model, tmp_path)
    if twin is not model:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    assert_same_step(outcome(step, twin), step(model_of(setting)), setting[2])


@pytest.mark.diagonal
@pytest.mark.parametrize("trainer_class", [LigerTrainer, LigerSFTTrainer])
@pytest.mark.parametrize("name", COPIES)
def test_a_trainer_on_a_copy(name, trainer_class, tmp_path, monkeypatch):
    """It logs what the stock trainer logs on a fresh model, and builds no logits either."""
    monkeypatch.setattr("liger_triton._chunks._CPU_CHUNK_BYTES", 4 * VOCAB * 3)  # three rows a chunk
    run = {LigerTrainer: run_trainer, LigerSFTTrainer: run_sft}[trainer_class]
    want, _ = run(STOCK[trainer_class], tiny_model("llama"), tmp_path)
    model = COPIES[name](patched(tiny_model("llama").train()), tmp_path)
    with LogitRows() as seen:
        got, trainer = run(trainer_class, model, tmp_path)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    assert trainer.uses_fused_head and seen.rows == 3
    for operation in ("rms_norm", "rope", "swiglu"):
        assert trainer.liger_report[operation].swapped, operation


LOADS_ALONE = """
import sys
sys.modules["liger_trainer"] = sys.modules["liger_triton"] = None
import torch
model = torch.load(sys.argv[1], weights_only=False)
print(model(input_ids=torch.arange(3, 9)[None], labels=torch.arange(3, 9)[None]).loss.item())
"""


def test_a_model_that_a_trainer_leaves_is_saved_without_this_package(tmp_path):
    """After `torch.save` of the whole model, loading needs only transformers and PEFT."""
    torch.manual_seed(3)
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"]))
    _, trainer = run_sft(LigerSFTTrainer, model, tmp_path, gradient_checkpointing=False, bf16=True)
    torch.save(trainer.model, tmp_path / "model.pt")
    want = trainer.model(input_ids=torch.arange(3, 9)[None], labels=torch.arange(3, 9)[None]).loss.item()
    command = [sys.executable, "-c", LOADS_ALONE, tmp_path / "model.pt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize(
    "model_type, way",
    [
        ("llama", "patched"),
        ("llama", "copied"),
        ("llama", "pickled and patched"),
        ("llama", "hooked"),
        ("qwen3_moe", "patched"),
        ("phi", "patched"),
    ],
)
def test_a_patched_model_is_freed_with_its_last_reference(model_type, way):
    """It is freed like a stock one. The garbage collector might run only gigabytes later."""
    gc.collect()
    gc.disable()
    try:
        model = tiny_model(model_type).train()
        apply_liger(model)
        if way == "copied":
            model = copy.deepcopy(model)
        if way == "pickled and patched":
            model = pickled(model, None)
            apply_liger(model)
        if way == "hooked":
            model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: None)
        step(model)
        modules = weakref.WeakSet(model.modules())
        del model
        assert not list(modules)
    finally:
        gc.enable()


STOCK = {LigerTrainer: Trainer, LigerSFTTrainer: SFTTrainer}
COPY = copy.deepcopy
ONE_AFTER_THE_OTHER = [
    (LigerTrainer, LigerTrainer),
    (LigerTrainer, LigerSFTTrainer),
    (LigerSFTTrainer, LigerTrainer),
    (LigerSFTTrainer, LigerSFTTrainer),
    (LigerTrainer, Trainer),
    (LigerSFTTrainer, Trainer),
    (LigerTrainer, SFTTrainer),
]


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("first, second", ONE_AFTER_THE_OTHER, ids=lambda trainer: trainer.__name__)
def test_two_trainers_one_after_the_other_on_one_model(first, second, kind, tmp_path, monkeypatch):
    """The second may be a stock trainer while the model is still patched.

    Compares with two stock trainers on one model.
    """
    # other tests' runs leave their model unchanged by these
    monkeypatch.setattr(copy, "deepcopy", lambda x, memo=None: x if isinstance(x, torch.nn.Module) else COPY(x, memo))
    logged = []
    for classes in ((STOCK.get(first, first), STOCK.get(second, second)), (first, second)):
        model = tiny_model("llama")
        if kind == "lora":
            torch.manual_seed(3)
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        runs = []
        for trainer_class in classes:
            run = run_sft if issubclass(trainer_class, SFTTrainer) else run_trainer
            steps, trainer = run(trainer_class, model, tmp_path)
            assert trainer.model is model
            runs.append(steps[:, :2])  # loss and gradient norm
        logged.append(torch.cat(runs))
    torch.testing.assert_close(logged[1], logged[0], rtol=1e-5, atol=0)
