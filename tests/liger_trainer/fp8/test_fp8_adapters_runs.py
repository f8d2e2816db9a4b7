"""Runs with `fp8` and adapters: resumed, evaluated, as DPO's policy, on two processes, from a recipe."""

import json
import os

import frozen_ranks
import pytest
import torch
from frozen_bases import LAYERS, adapted, add_inside, built, fresh_state
from launching import in_processes
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from recipe_fixtures import command, write_model, write_recipe, write_rows
from safetensors.torch import load_file
from tiny_models import ragged_rows, tiny_model
from torch import nn
from trainer_parity import LORA, build_dpo, run, with_lora
from transformers import AutoModelForCausalLM

from liger_trainer import LigerDPOTrainer, LigerSFTConfig, LigerTrainer
from liger_trainer.fp8.frozen_layer import FrozenFloat8Linear

pytestmark = pytest.mark.usefixtures("fresh_accelerator", "no_torchao")


def layers_of(model):
    return [module for module in model.modules() if type(module) is FrozenFloat8Linear]


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[5, 9, 11, 40, 3]])).logits


def losses_of(trainer, name="loss"):
    return [log[name] for log in trainer.state.log_history if name in log]


def test_a_run_that_is_resumed(any_device, tmp_path):
    """Checkpoints hold only adapters, and quantising the base again gives the same bits."""
    whole = built(adapted(), tmp_path / "whole", save_strategy="steps", save_steps=1)
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-1"
    assert (checkpoint / "adapter_model.safetensors").exists() and not (checkpoint / "model.safetensors").exists()
    resumed = built(adapted(), tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses_of(resumed) == losses_of(whole) and len(losses_of(whole)) == 2
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, whole.model.get_parameter(name)), name


def test_the_best_checkpoint_evaluation_prediction_and_generation(any_device, tmp_path):
    model = with_lora(tiny_model("llama"), ["q_proj", "down_proj"])
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    best |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = built(model, tmp_path, save_strategy="steps", learning_rate=30.0, optim="sgd", **best)
    trainer.train()
    first, last = losses_of(trainer, "eval_loss")
    assert first > last, "the best of the two checkpoints is not the last one here"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(first, rel=1e-5)
    assert trainer.predict(ragged_rows(4)).predictions.shape[-1] == 131
    written = trainer.model.eval().generate(input_ids=torch.tensor([[5, 9, 11]]), max_new_tokens=4, do_sample=False)
    assert written.shape == (1, 7)
    trainer.save_model(tmp_path / "saved")
    whole = PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "saved")
    got, want = logits(trainer.model), logits(whole)
    assert (got - want).norm() < 0.15 * want.norm()
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and "float8" not in json.dumps(config)
    assert (logits(whole.merge_and_unload()) - want).norm() < 1e-4 * want.norm()


@pytest.mark.parametrize("other", [False, True], ids=["disabled", "another-adapter"])
def test_the_reference_of_dpo_is_the_base(other, any_device, tmp_path):
    """With the adapters disabled, or with another adapter. Both use the same FP8 base."""
    model = with_lora(tiny_model("llama"), LORA)
    if not other:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.zeros_(parameter)
    want = build_dpo(LigerDPOTrainer, model, tmp_path, bf16=True)
    want.train()
    fresh_state()
    trainer = build_dpo(LigerDPOTrainer, model, tmp_path, fp8=True, bf16=None)
    trainer.train()
    assert len(layers_of(trainer.model)) == LAYERS
    first, other_first = (t.state.log_history[0] for t in (trainer, want))
    assert first["loss"] == pytest.approx(other_first["loss"], rel=0.03)
    if not other:  # the policy equals its reference at first, bit for bit
        assert first["loss"] == pytest.approx(0.6931, abs=1e-3) and abs(first["rewards/margins"]) < 1e-3


def test_prefixes(any_device, tmp_path):
    """Prefix tuning has no LoRA layers: the whole base is in FP8."""
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(tiny_model("llama"), config)
    losses, trainer = run(LigerTrainer, model, tmp_path, fp8=True)
    assert losses.isfinite().all() and len(layers_of(trainer.model)) == LAYERS


def test_adapters_inside_a_model_of_transformers(any_device, tmp_path):
    model = tiny_model("llama")
    torch.manual_seed(3)
    add_inside(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    losses, trainer = run(LigerTrainer, model, tmp_path, fp8=True)
    assert losses.isfinite().all() and len(layers_of(trainer.model)) == LAYERS
    trainer.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_ddp(tmp_path, any_device):
    """Two processes with half of the rows each have the losses and gradients of one process with all rows."""
    lines = in_processes("frozen_ranks.py", str(tmp_path / "two")).stdout.splitlines()
    two = json.loads(next(line for line in lines if line.startswith('{"wrapped')))
    one = frozen_ranks.main(str(tmp_path / "one"), 1)
    assert two["wrapped"] == "DistributedDataParallel" and one["wrapped"] != two["wrapped"]
    for name in ("layers", "bits", "dtypes"):
        assert one[name] == two[name]
    assert one["layers"] == LAYERS and one["dtypes"] == ["torch.float32"]
    assert two["losses"] == pytest.approx(one["losses"], rel=2e-2)
    assert two["grads"].keys() == one["grads"].keys() and len(one["grads"]) == 2 * LAYERS
    for name, norm in one["grads"].items():
        assert two["grads"][name] == pytest.approx(norm, rel=0.1), name


def test_a_recipe_and_the_merge_after_it(any_device, tmp_path, capsys):
    """The adapter of an FP8 base is merged into the model in its original precision."""
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl")
    projections = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    adapter = {"use_peft": True, "lora_r": 4, "lora_target_modules": projections}
    recipe = write_recipe(tmp_path, use_cpu=True, fp8=True, **adapter)
    code, out, err = command(capsys, "train", recipe)
    assert code == 0, err
    saved = tmp_path / "out"
    report = json.loads((saved / "liger_report.json").read_text())["operations"]["frozen_float8"]
    assert report["found"] == LAYERS + 1 and not (saved / "model.safetensors").exists()
    adapter = load_file(saved / "adapter_model.safetensors")
    assert len(adapter) == 2 * LAYERS and all(t.is_floating_point() for t in adapter.values())
    code, out, err = command(capsys, "merge", saved, tmp_path / "merged")
    assert code == 0, err
    merged, base = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("merged", "model"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert merged.keys() == base.keys() and merged[name].dtype == base[name].dtype
    assert 0 < (merged[name] - base[name]).norm() < 0.5 * base[name].norm()


def test_the_launcher_and_trl_s_bf16(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "ACCELERATE_MIXED_PRECISION", "fp8")
    given = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    assert LigerSFTConfig(**given).fp8 and not LigerSFTConfig(**given, bf16=True).fp8


def test_layers_that_are_checkpointed_as_memory_allows(any_device, tmp_path):
    """Recomputed tensors are rounded to the same bits."""
    from memory_runs import CountedMemory

    found = []
    for way in ("true", "auto"):
        trainer = built(adapted(), tmp_path, activation_checkpointing=way, max_steps=4)
        trainer.device_memory = CountedMemory(1 << 40) if way == "auto" else None
        if way == "auto":
            with trainer.device_memory:
                trainer.train()
            assert trainer.checkpointing.kept == 2
        else:
            trainer.train()
        found.append(losses_of(trainer))
    assert found[0] == found[1] and len(found[0]) == 4
