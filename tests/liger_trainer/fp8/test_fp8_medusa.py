"""`fp8` for Medusa heads: quantises the frozen model in stage 1, the adapters' base in stage 2. Needs no GPU."""

import json

import pytest
import torch
from frozen_bases import LAYERS, fresh_state
from medusa_brute_force import medusa_trainer, model_with_heads
from peft import LoraConfig
from recipe_fixtures import command, write_model, write_recipe, write_rows
from tiny_models import tiny_model

from liger_trainer import MedusaHeads
from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear

pytestmark = pytest.mark.usefixtures("fresh_accelerator", "no_torchao", "any_device")


def frozen_in(model):
    return [name for name, module in model.named_modules() if type(module) is FrozenFloat8Linear]


def losses(trainer):
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def near(got, want):
    assert got == pytest.approx(want, rel=0.03) and got != pytest.approx(want, rel=1e-6)


@pytest.mark.diagonal
@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("has_heads", [True, False])
def test_stage_1(has_heads, bf16, tmp_path):
    """The linear layers are in FP8, but never the heads or the LM head. Only heads train."""
    make = model_with_heads if has_heads else tiny_model
    want = losses(medusa_trainer(make("llama"), tmp_path, bf16=bf16))
    fresh_state()
    trainer = medusa_trainer(make("llama"), tmp_path, fp8=True, bf16=bf16)
    assert len(frozen_in(trainer.model)) == len(trainer.liger_report["frozen_float8"].swapped) == LAYERS
    assert not any("medusa_head" in name or "lm_head" in name for name in frozen_in(trainer.model))
    assert str(trainer.accelerator.mixed_precision) == ("bf16" if bf16 else "no")
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    near(losses(trainer), want)
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "medusa_head" in name} and len(moved) == 6
    trainer.save_model(tmp_path / "saved")
    assert MedusaHeads.from_pretrained(str(tmp_path / "saved")).config.num_heads == 3
    assert not list((tmp_path / "saved").glob("model*"))


def test_heads_that_were_frozen_are_trained(tmp_path):
    model = model_with_heads()
    model.medusa_head.requires_grad_(False)
    trainer = medusa_trainer(model, tmp_path, fp8=True)
    assert len(frozen_in(trainer.model)) == LAYERS and all(p.requires_grad for p in model.medusa_head.parameters())


def test_stage_2_with_adapters(tmp_path):
    given = {"medusa_stage": 2, "trainer_options": {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])}}
    want = losses(medusa_trainer(tiny_model("llama"), tmp_path, **given))
    fresh_state()
    trainer = medusa_trainer(tiny_model("llama"), tmp_path, fp8=True, **given)
    assert len(frozen_in(trainer.model)) == LAYERS
    near(losses(trainer), want)


def test_a_recipe_of_torchao_is_refused(tmp_path):
    with pytest.raises(ValueError, match="fp8_recipe is 'rowwise', but the base of the model is frozen"):
        medusa_trainer(tiny_model("llama"), tmp_path, fp8=True, fp8_recipe="rowwise")


def test_a_recipe(tmp_path, capsys):
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl")
    recipe = write_recipe(tmp_path, trainer="medusa", use_cpu=True, fp8=True)
    code, _, err = command(capsys, "train", recipe)
    assert code == 0, err
    report = json.loads((tmp_path / "out" / "liger_report.json").read_text())["operations"]["frozen_float8"]
    assert report["found"] == LAYERS + 1 and "LM head" in report["skipped"][0]["reason"]
    assert (tmp_path / "out" / "medusa_heads" / "config.json").exists()
    code, out, err = command(
        capsys,
        "medusa-eval",
        tmp_path / "model",
        tmp_path / "out",
        "--prompts",
        tmp_path / "rows.jsonl",
        "--dtype",
        "float32",
    )
    assert code == 0 and "tokens per forward pass" in out, err
