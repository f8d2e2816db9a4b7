"""A saved model is a plain transformers model, and a killed run resumes to the same losses."""

import copy
import os
import signal
import subprocess
import sys
import threading

import killed_run
import pytest
import torch
from killed_run import train_with_dropout
from peft import PeftModel
from tiny_models import collate, ragged_rows, tiny_model
from trainer_parity import run, with_lora
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM, TrainerCallback, TrainerState

from liger_trainer import LigerTrainer, apply_liger, remove_liger


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[5, 9, 11, 40, 3]])).logits


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_trained_model_loads_in_plain_transformers(model_type, tmp_path):
    _, trainer = run(LigerTrainer, tiny_model(model_type), tmp_path)
    trainer.save_model(tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
    assert plain.state_dict().keys() == trainer.model.state_dict().keys()
    torch.testing.assert_close(logits(plain), logits(trainer.model), rtol=1e-5, atol=1e-5)
    remove_liger(trainer.model)
    assert torch.equal(logits(plain), logits(trainer.model))


def test_an_adapter_loads_in_plain_peft(tmp_path):
    _, trainer = run(LigerTrainer, with_lora(tiny_model("llama"), ["q_proj", "down_proj", "lm_head"]), tmp_path)
    trainer.save_model(tmp_path / "saved")
    plain = PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "saved")
    torch.testing.assert_close(logits(plain), logits(trainer.model), rtol=1e-4, atol=1e-4)


def test_peft_after_patching():
    rows = collate(ragged_rows(4))
    before = with_lora(tiny_model("llama"), ["q_proj", "gate_proj", "lm_head"])
    apply_liger(before)
    after = tiny_model("llama")
    apply_liger(after)
    after = with_lora(after, ["q_proj", "gate_proj", "lm_head"])
    plain = with_lora(tiny_model("llama"), ["q_proj", "gate_proj", "lm_head"])
    for model in (before, after, plain):
        model.train()(**rows).loss.backward()
    for name, p in plain.named_parameters():
        for model in (before, after):
            grad = model.get_parameter(name).grad
            assert (grad is None) == (p.grad is None)
            if grad is not None:
                torch.testing.assert_close(grad, p.grad, rtol=1e-4, atol=1e-7, msg=name)


def test_generate_after_training(tmp_path):
    _, trainer = run(tiny_sft(), tiny_model("llama"), tmp_path)
    model = trainer.model.eval()
    prompt = torch.tensor([[5, 9, 11]])
    got = model.generate(prompt, max_new_tokens=8, do_sample=False)
    remove_liger(model)
    assert torch.equal(got, model.generate(prompt, max_new_tokens=8, do_sample=False))


def tiny_sft():
    from liger_trainer import LigerSFTTrainer

    return LigerSFTTrainer


def test_a_killed_run_resumes_to_the_same_losses_and_weights(tmp_path):
    want, model = train_with_dropout(tmp_path / "whole")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    code = [sys.executable, killed_run.__file__, str(tmp_path / "killed")]
    killed = subprocess.run(code, env=env, capture_output=True, text=True, timeout=240)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert TrainerState.load_from_json(tmp_path / "killed/checkpoint-3/trainer_state.json").global_step == 3
    got, resumed = train_with_dropout(tmp_path / "killed", resume_from_checkpoint=True)
    assert got == want
    for p, ref in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, ref)


def test_experts_that_are_saved_one_by_one_are_loaded_again(tmp_path):
    """Checkpoints hold each expert of `qwen3_moe` separately.

    The stock trainer warns of missing weights and goes on.
    """
    steps = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    want, whole = run(tiny_sft(), tiny_model("qwen3_moe"), tmp_path, **steps)
    checkpoint = tmp_path / "LigerSFTTrainer" / "checkpoint-2"
    _, trainer = run(tiny_sft(), tiny_model("qwen3_moe", seed=3), tmp_path, train=False, **steps)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert [log["loss"] for log in trainer.state.log_history if "loss" in log] == want[:, 0].tolist()
    for (name, p), ref in zip(trainer.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, ref), name


def test_a_router_in_another_dtype_is_loaded_again(tmp_path):
    """The weights are equal bit for bit; they are not rounded to the first weight's dtype."""
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.gate.float()
    _, trainer = run(tiny_sft(), model, tmp_path, save_strategy="steps", save_steps=1, max_steps=1, bf16=True)
    saved = {name: p.clone() for name, p in trainer.model.state_dict().items()}
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.zero_()
    trainer._load_from_checkpoint(str(tmp_path / "LigerSFTTrainer" / "checkpoint-1"))
    for name, p in trainer.model.state_dict().items():
        assert torch.equal(p, saved[name]), name


def test_the_best_model_has_its_own_experts(tmp_path):
    best = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }
    _, trainer = run(tiny_sft(), tiny_model("qwen3_moe"), tmp_path, **best)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    want = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    for (name, p), ref in zip(trainer.model.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(p, ref), name


class WithAnotherArgument(Qwen3MoeForCausalLM):
    def __init__(self, config, scale):
        super().__init__(config)
        self.scale = scale


def with_a_head(model):
    model.value_head = torch.nn.Linear(model.config.hidden_size, 1)
    return model


def with_a_layer_less(model):
    model.model.layers = model.model.layers[:1]
    return model


def of_another_constructor(model):
    torch.manual_seed(0)
    return WithAnotherArgument(model.config, scale=2.0)


def tied(model):
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    return type(model)(config)


@pytest.mark.parametrize(
    "change", [with_a_head, with_a_layer_less, of_another_constructor, tied], ids=lambda f: f.__name__
)
def test_the_best_model_is_loaded_into_the_model_that_is_there(change, tmp_path):
    """The model's class and config would build another model."""
    best = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }
    model = change(tiny_model("qwen3_moe"))
    at_step_1 = {}

    class Remembers(TrainerCallback):
        def on_save(self, args, state, control, model, **kwargs):
            if state.global_step == 1:
                at_step_1.update({name: p.detach().clone() for name, p in model.state_dict().items()})

    _, trainer = run(tiny_sft(), model, tmp_path, train=False, **best)
    trainer.add_callback(Remembers())
    trainer.model.lock = threading.Lock()  # it cannot be copied
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    found = trainer.model.state_dict()
    assert found.keys() == at_step_1.keys()
    for name, p in found.items():
        assert torch.equal(p, at_step_1[name]), name
    assert trainer.liger_report["experts"].swapped and all(p.device.type == "cpu" for p in trainer.model.parameters())


def test_a_checkpoint_that_lacks_weights_of_the_model_is_an_error(tmp_path):
    """A head may have been added between two runs. `from_pretrained` would draw its weights at random."""
    _, trainer = run(tiny_sft(), tiny_model("qwen3_moe"), tmp_path, save_strategy="steps", save_steps=1, max_steps=1)
    with_a_head(trainer.model)
    with pytest.raises(RuntimeError, match="checkpoint-1 lacks 2 weights of the model, such as value_head.bias"):
        trainer._load_from_checkpoint(str(tmp_path / "LigerSFTTrainer" / "checkpoint-1"))
