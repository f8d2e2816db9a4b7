"""`fp8` for models with adapters: trainers put the frozen base into eight bits. There is no GPU and no torchao."""

import importlib.util
import json
import os
from unittest.mock import MagicMock

import frozen_ranks
import pytest
import torch
from dpo_runs import LORA
from dpo_runs import build as build_dpo
from frozen_bases import LAYERS, adapted
from launching import torchrun
from peft import LoraConfig, PeftModel, PrefixTuningConfig, VeraConfig, get_peft_model
from recipe_fixtures import command, write_model, write_recipe, write_rows
from safetensors.torch import load_file
from sft_runs import run as run_sft
from tiny_models import collate, ragged_rows, tiny_model
from torch import nn
from trainer_runs import lora, run
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from liger_trainer import LigerDPOTrainer, LigerSFTConfig, LigerSFTTrainer, LigerTrainer, LigerTrainingArguments
from liger_trainer.patching.frozen_float8 import FrozenFloat8Linear
from liger_trainer.trainers import fp8_fields


@pytest.fixture(autouse=True)
def fresh():
    """accelerate keeps the precision of the first trainer of a process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture(autouse=True)
def no_torchao(monkeypatch):
    own = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else own(name, *rest)
    )


@pytest.fixture
def any_device(monkeypatch):
    """A CPU, which computes products of eight bits in fp32, counts as a GPU that has them."""
    monkeypatch.setattr(fp8_fields, "fault_of_device", lambda device: None)


def layers_of(model):
    return [module for module in model.modules() if type(module) is FrozenFloat8Linear]


def near(got, want, rtol):
    """Near the numbers of 16 bits, and not the same."""
    torch.testing.assert_close(got, want, rtol=rtol, atol=0)
    assert not torch.equal(got, want)


@pytest.mark.parametrize("asked", ["by fp8: true", "by the launcher", "by the launcher, with the stock arguments"])
def test_losses_are_near_those_of_bf16(asked, any_device, tmp_path, monkeypatch):
    """No matrix of an adapter is converted, the base does not change, and what was done is in the report."""
    want, _ = run(LigerTrainer, adapted(), tmp_path, bf16=True)
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    options = {}
    if asked == "by fp8: true":
        options["fp8"] = True
    else:
        monkeypatch.setitem(os.environ, "ACCELERATE_MIXED_PRECISION", "fp8")
    if "stock" in asked:
        monkeypatch.setattr("trainer_runs.LigerTrainingArguments", TrainingArguments)
    model = adapted()
    got, trainer = run(LigerTrainer, model, tmp_path, **options)
    near(got[:, 0], want[:, 0], 0.03)
    near(got[:1, 1], want[:1, 1], 0.05)  # the norm of the gradients of the first step
    assert str(trainer.accelerator.mixed_precision) == "bf16" and trainer.args.mixed_precision == "fp8"
    assert len(layers_of(trainer.model)) == len(trainer.liger_report["frozen_float8"].swapped) == LAYERS
    written = json.loads((tmp_path / "LigerTrainer" / "liger_report.json").read_text())["operations"]["frozen_float8"]
    assert written["found"] == LAYERS + 1 and "LM head" in written["skipped"][0]["reason"]
    assert f"frozen_float8 {LAYERS}/{LAYERS + 1}" in trainer.liger_report.one_line()
    assert len(trainer.liger_report["lora"].swapped) == LAYERS
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * LAYERS and all("lora_" in name for name in trained)
    assert all(p.dtype == torch.float32 and not torch.equal(p, model.get_parameter(n)) for n, p in trained.items())
    again = FrozenFloat8Linear.of(model.get_base_model().model.layers[0].mlp.up_proj.base_layer)
    assert torch.equal(layers_of(trainer.model)[5].weight, again.weight)


@pytest.mark.parametrize("bf16", [None, True, False])
def test_sft_and_the_precision_of_autocast(bf16, any_device, tmp_path):
    """What the user says of `bf16` holds; with False there is no autocast, and the dtype of the base decides."""
    given = {"trainer_options": {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)}}
    want, _ = run_sft(LigerSFTTrainer, tiny_model("llama"), tmp_path, bf16=bf16 is not False, **given)
    fresh_state()
    got, trainer = run_sft(LigerSFTTrainer, tiny_model("llama"), tmp_path, fp8=True, bf16=bf16, **given)
    near(got[:, 0], want[:, 0], 0.03)
    assert str(trainer.accelerator.mixed_precision) == ("no" if bf16 is False else "bf16")
    assert len(layers_of(trainer.model)) == LAYERS


def fresh_state():
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)


def test_the_same_arguments_for_a_model_without_adapters(any_device, tmp_path):
    """Its fp8 is that of torchao, which is missing here."""
    trainer = built(adapted(), tmp_path)
    args = trainer.args
    assert trainer.freezes_in_eight_bits and args.mixed_precision == "fp8"
    with pytest.raises(ValueError, match="fp8 is true, which needs torchao for a model without adapters"):
        LigerTrainer(tiny_model("llama"), args, train_dataset=ragged_rows(), data_collator=collate)


def test_a_later_trainer_of_the_model(any_device, tmp_path):
    """It need not ask for fp8, which cannot be taken back, and says what the base is."""
    _, trainer = run(LigerTrainer, adapted(), tmp_path, fp8=True)
    model = trainer.model
    before = [layer.weight for layer in layers_of(model)]
    for options in ({"fp8": True}, {"bf16": True}):
        _, trainer = run(LigerTrainer, model, tmp_path, **options)
        assert len(trainer.liger_report["frozen_float8"].swapped) == LAYERS
    assert all(torch.equal(a.weight, b) for a, b in zip(layers_of(trainer.model), before, strict=True))
    fresh_state()
    _, trainer = run(LigerTrainer, adapted(), tmp_path)
    assert "frozen_float8" not in trainer.liger_report.operations


def test_without_a_gpu_it_is_refused_at_construction(tmp_path):
    model = adapted()
    with pytest.raises(ValueError, match="fp8 is asked for, but cpu is no GPU. Use bf16"):
        built(model, tmp_path)
    assert not layers_of(model)


def built(model, tmp_path, trainer_class=LigerTrainer, **options):
    """A trainer that asks for fp8, with `model` or, if that is a function, a `model_init`."""
    defaults = {
        "output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "fp8": True, "max_steps": 2,
        "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    args = LigerTrainingArguments(**(defaults | {k: v for k, v in options.items() if k != "use_vllm"}))
    if "use_vllm" in options:
        args.use_vllm = options["use_vllm"]
    given = {"model": model} if isinstance(model, nn.Module) else {"model_init": model}
    return trainer_class(
        **given, args=args, train_dataset=ragged_rows(), eval_dataset=ragged_rows(4), data_collator=collate
    )


class Sharding:
    """Says after the accelerator is made that it would shard the model."""

    def _apply_liger(self, *args, **kwargs):
        setattr(self, self.flag, True)
        super()._apply_liger(*args, **kwargs)


class FullySharding(Sharding, LigerTrainer):
    flag = "is_fsdp_enabled"


class Speeding(Sharding, LigerTrainer):
    flag = "is_deepspeed_enabled"


@pytest.mark.parametrize("trainer_class, name", [(FullySharding, r"FSDP \(fsdp\)"), (Speeding, r"DeepSpeed \(deepsp")])
def test_sharded_weights_are_refused(trainer_class, name, any_device, tmp_path):
    model = adapted()
    with pytest.raises(ValueError, match=f"{name}.* is to shard the weights.*one GPU or with DDP, or leave out fp8"):
        built(model, tmp_path, trainer_class)
    assert not layers_of(model)


@pytest.mark.parametrize("flag", ["is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit"])
def test_a_base_that_is_quantised_already_is_refused(flag, any_device, tmp_path, monkeypatch):
    model = adapted()
    base = type(model.get_base_model())
    monkeypatch.setattr(base, flag, True, raising=False)
    monkeypatch.setattr(base, "hf_quantizer", MagicMock(), raising=False)
    with pytest.raises(ValueError, match="the base is quantised already.*without load_in_4bit, load_in_8bit"):
        built(model, tmp_path)
    assert not layers_of(model)


def test_vllm_is_refused(any_device, tmp_path):
    """TRL would merge the adapters into the base, to send it."""
    with pytest.raises(ValueError, match="use_vllm is True.*Set use_vllm to False"):
        built(adapted(), tmp_path, use_vllm=True)


def test_another_method_is_refused(any_device, tmp_path):
    model = get_peft_model(tiny_model("llama"), VeraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="PEFT's method VERA"):
        built(model, tmp_path)


def test_a_model_of_which_nothing_can_be_converted_is_refused(any_device, tmp_path):
    model = tiny_model("llama", hidden_size=24, intermediate_size=40)
    with pytest.raises(ValueError, match="no layer of the base of LlamaForCausalLM can be put into eight bits.*of 16"):
        built(adapted(model=model), tmp_path)


def test_layers_of_gpt2_are_none_of_torch_s(any_device, tmp_path):
    sizes = {"vocab_size": 131, "n_embd": 32, "n_layer": 1, "n_head": 4, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    with pytest.raises(ValueError, match=r"no layer of the base of GPT2LMHeadModel.*\(it is a Conv1D, whose product"):
        built(model, tmp_path)


def test_a_model_init_with_adapters_is_refused(any_device, tmp_path, monkeypatch):
    """accelerate has been told to convert before the model is there."""
    monkeypatch.setattr(fp8_fields, "refuse_without_torchao", lambda args: None)
    monkeypatch.setattr(fp8_fields, "without_needless_wrappers", lambda accelerator: None)
    config = type("Config", (), {"emulate": True})
    handler = type("Handler", (), {"module_filter_func": None, "config": config})
    monkeypatch.setattr(fp8_fields, "handler_of", lambda accelerator: handler)
    monkeypatch.setattr(fp8_fields, "apply", lambda args: None)  # accelerate would ask for torchao
    with pytest.raises(ValueError, match="comes from model_init, has adapters.*Pass the model itself"):
        built(lambda: adapted(), tmp_path)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[5, 9, 11, 40, 3]])).logits


def losses_of(trainer, name="loss"):
    return [log[name] for log in trainer.state.log_history if name in log]


def test_a_run_that_is_resumed(any_device, tmp_path):
    """Checkpoints hold adapters alone, and the base is quantised anew to the same bits."""
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
    model = lora(tiny_model("llama"), ["q_proj", "down_proj"])
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
    """With the adapters disabled, or with another adapter: both are on the same eight bits."""
    model = lora(tiny_model("llama"), LORA)
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
    if not other:  # the policy is its reference at the beginning, to the bit
        assert first["loss"] == pytest.approx(0.6931, abs=1e-3) and abs(first["rewards/margins"]) < 1e-3


def test_prefixes(any_device, tmp_path):
    """A method without a LoRA: all of the base is in eight bits."""
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(tiny_model("llama"), config)
    losses, trainer = run(LigerTrainer, model, tmp_path, fp8=True)
    assert losses.isfinite().all() and len(layers_of(trainer.model)) == LAYERS


def test_adapters_inside_a_model_of_transformers(any_device, tmp_path):
    model = tiny_model("llama")
    torch.manual_seed(3)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    losses, trainer = run(LigerTrainer, model, tmp_path, fp8=True)
    assert losses.isfinite().all() and len(layers_of(trainer.model)) == LAYERS
    trainer.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()


def test_ddp(tmp_path, any_device):
    """Two processes with half of the rows each: the losses and the gradients of one process with all of them."""
    lines = torchrun("frozen_ranks.py", str(tmp_path / "two")).stdout.splitlines()
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
    """The adapter of a base in eight bits is merged into the model in its own precision."""
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
    """What is recomputed is rounded to the same bits."""
    from counted_memory import CountedMemory

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
