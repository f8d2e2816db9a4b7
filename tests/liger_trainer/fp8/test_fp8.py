"""fp8 in trainers: accelerate converts the model when training starts, which is after patching.

On a CPU torchao multiplies in fp32 (`emulate`). The twins run, because Triton's interpreter rounds to FP8 wrongly.
"""

import dataclasses
import importlib
import os
import types

import checkout
import pytest
import torch
from memory_runs import same_training
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from trainer_parity import run
from transformers import Trainer, TrainingArguments

from liger_trainer import LigerSFTConfig, LigerTrainer, LigerTrainingArguments
from liger_trainer.command.recipe.read import parse_recipe
from liger_trainer.command.run.launch import apply_precision
from liger_trainer.errors import RecipeError
from liger_trainer.fp8 import feature as fp8_fields

LAYERS = 13  # two layers of seven projections, without the first
OTHERS = dict.fromkeys(("rms_norm", "rope", "swiglu", "fused_linear_cross_entropy"), False)


@pytest.fixture(autouse=True)
def twins(monkeypatch):
    for name in ("float8_cast",):
        monkeypatch.setattr(importlib.import_module(f"liger_triton.{name}"), "runs_triton", lambda *tensors: False)


@pytest.fixture
def torchao():
    return pytest.importorskip("torchao.float8", reason="torchao is not installed")


@pytest.fixture
def ours(monkeypatch):
    """The weights that our function multiplied by."""
    seen, module = [], importlib.import_module("liger_trainer.fp8.layers")

    def counted(x, weight, *args, own=module.float8_linear, **options):
        seen.append(tuple(weight.shape))
        return own(x, weight, *args, **options)

    monkeypatch.setattr(module, "float8_linear", counted)
    return seen


@pytest.fixture
def fresh():
    """Forget the precision of the process's first trainer, which accelerate keeps."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture
def launched(fresh, monkeypatch):
    monkeypatch.setitem(os.environ, "ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setitem(os.environ, "ACCELERATE_FP8_BACKEND", "AO")


class Emulated:
    """Makes accelerate convert with emulated products, because there is no GPU."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        handler = self.accelerator.ao_recipe_handler
        handler.config = dataclasses.replace(handler.config, emulate=True)


class EmulatedLigerTrainer(Emulated, LigerTrainer):
    pass


class EmulatedTrainer(Emulated, Trainer):
    """The stock trainer without wrappers around weights: with them, the optimizer would not train FP8 layers."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        fp8_fields.prepare(types.SimpleNamespace(), self.accelerator)


@pytest.mark.parametrize("asked", ["by the launcher", "by fp8: true"])
def test_losses_and_weights_equal_stock(asked, torchao, fresh, ours, tmp_path, monkeypatch):
    """The first and the last layer stay. The report lists what was swapped when training started."""
    model, options = tiny_model("llama"), {}
    monkeypatch.setitem(os.environ, "ACCELERATE_FP8_BACKEND", "AO")
    if asked == "by the launcher":
        monkeypatch.setitem(os.environ, "ACCELERATE_MIXED_PRECISION", "fp8")
    else:
        options["fp8"] = True
    got, trainer = run(EmulatedLigerTrainer, model, tmp_path, liger_config=OTHERS, optim="sgd", **options)
    assert len(trainer.liger_report["float8"].swapped) == LAYERS
    assert ours  # without layers whose input has the dtype of a CPU's autocast, which torchao does not ask for
    assert '"found": 13' in (tmp_path / "EmulatedLigerTrainer" / "liger_report.json").read_text()
    name = "model.layers.0.mlp.up_proj.weight"
    weight = trainer.model.get_parameter(name)
    assert type(weight) is torch.nn.Parameter and not torch.equal(weight, model.get_parameter(name)), "it is trained"
    trainer.save_model(str(tmp_path / "saved"))
    trainer.train()  # a second time
    assert len(trainer.liger_report["float8"].swapped) == LAYERS
    monkeypatch.setitem(os.environ, "ACCELERATE_MIXED_PRECISION", "fp8")
    want, _ = run(EmulatedTrainer, model, tmp_path, optim="sgd")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=0)


class EmulatedByRow(EmulatedTrainer):
    """The stock trainer with a recipe in accelerate's handler."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        handler = self.accelerator.ao_recipe_handler
        recipe = type(handler.config).from_recipe_name("rowwise")
        handler.config = dataclasses.replace(recipe, emulate=True)


def test_a_recipe_by_name_trains_like_stock(torchao, fresh, ours, tmp_path, monkeypatch):
    """All layers that accelerate converts have the recipe's scales, and accelerate's other settings hold."""
    monkeypatch.setitem(os.environ, "ACCELERATE_FP8_BACKEND", "AO")
    model = tiny_model("llama")
    options = {"liger_config": OTHERS, "fp8": True, "fp8_recipe": "rowwise"}
    got, trainer = run(EmulatedLigerTrainer, model, tmp_path, optim="sgd", **options)
    swapped = trainer.liger_report["float8"].swapped
    assert len(swapped) == LAYERS and set(swapped.values()) == {"rowwise, scales in powers of 2"}
    assert ours
    config = trainer.accelerator.ao_recipe_handler.config
    assert config.pad_inner_dim and not config.enable_fsdp_float8_all_gather
    monkeypatch.setitem(os.environ, "ACCELERATE_MIXED_PRECISION", "fp8")
    want, _ = run(EmulatedByRow, model, tmp_path, optim="sgd")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=0)
    other, _ = run(EmulatedTrainer, model, tmp_path, optim="sgd")
    assert not torch.equal(want, other), "the recipe makes a difference"


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", None])
def test_what_a_recipe_leaves_as_it_is(recipe, gathers, torchao):
    config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, pad_inner_dim=True)
    handler = types.SimpleNamespace(config=config)
    accelerator = types.SimpleNamespace(ao_recipe_handler=handler, mixed_precision="fp8")
    fp8_fields.prepare(types.SimpleNamespace(fp8_recipe=recipe), accelerator)
    by_tensor = recipe in ("tensorwise", None)
    assert handler.config.pad_inner_dim
    assert not handler.config.enable_fsdp_float8_all_gather
    assert (handler.config.cast_config_weight.scaling_granularity.value == "axiswise") is not by_tensor
    handler.config = config
    fp8_fields.prepare(types.SimpleNamespace(), accelerator)  # the stock class's
    assert handler.config == dataclasses.replace(config, enable_fsdp_float8_all_gather=False)


@pytest.mark.parametrize("first", [False, True], ids=["by accelerate", "before the trainer"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_optimizer_in_backward(checkpointing, first, torchao, fresh, ours, tmp_path):
    """Weights are bit-equal to the ordinary step: accelerate's layers have the weights that the optimizer knows."""

    def model():
        made = tiny_model("llama")
        config = torchao.Float8LinearConfig(emulate=True)
        if first:
            torchao.convert_to_float8_training(made, config=config, module_filter_fn=lambda m, name: name != "lm_head")
        return made

    options = {} if first else {"trainer_class": EmulatedLigerTrainer, "fp8": True}
    made = same_training(
        tmp_path, model=model, checkpointing=checkpointing, max_steps=4, use_liger=True, liger_config=OTHERS, **options
    )
    assert ours
    before, after = model().state_dict(), made[1][1]
    name = "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(before[name], after[name]), "it is trained"


def test_switched_off_in_liger_config(torchao, launched, tmp_path):
    _, trainer = run(EmulatedLigerTrainer, tiny_model("llama"), tmp_path, liger_config=OTHERS | {"float8": False})
    layer = trainer.model.model.layers[0].mlp.up_proj
    assert type(layer).__name__ == "Float8Linear" and "forward" not in layer.__dict__
    assert not trainer.liger_report["float8"].enabled


def test_without_a_gpu_it_is_refused_at_construction(torchao, launched, tmp_path):
    with pytest.raises(ValueError, match="torchao's fp8 is asked for .* cpu is not a GPU. Use bf16"):
        run(LigerTrainer, tiny_model("llama"), tmp_path)


def test_a_converted_model_without_a_gpu_is_refused_at_construction(torchao, fresh, tmp_path):
    model = torchao.convert_to_float8_training(tiny_model("llama"), module_filter_fn=lambda m, name: name != "lm_head")
    with pytest.raises(ValueError, match="convert_to_float8_training.*cpu is not a GPU"):
        run(LigerTrainer, model, tmp_path)


def test_a_later_trainer_converts_in_the_same_way(torchao, fresh, tmp_path):
    _, earlier = run(EmulatedLigerTrainer, tiny_model("llama"), tmp_path, liger_config=OTHERS, fp8=True)
    _, later = run(EmulatedLigerTrainer, earlier.model, tmp_path, liger_config=OTHERS, fp8=True)
    assert len(later.liger_report["float8"].swapped) == LAYERS


def test_a_model_of_which_no_layer_would_be_converted(torchao, fresh, tmp_path):
    """It would silently train in bf16."""
    model = tiny_model("llama", hidden_size=40, num_attention_heads=5, num_key_value_heads=5)
    with pytest.raises(ValueError, match="accelerate would convert no layer of LlamaForCausalLM.*Leave out fp8"):
        run(EmulatedLigerTrainer, model, tmp_path, liger_config=OTHERS, fp8=True)


def test_adapters_on_a_model_that_was_converted_before(torchao, fresh, tmp_path):
    """Their layers are linear too, with widths that torchao would convert. See `test_fp8_adapters.py` for `fp8` on
    adapters."""
    config = torchao.Float8LinearConfig(emulate=True)
    model = torchao.convert_to_float8_training(
        tiny_model("llama"), config=config, module_filter_fn=lambda m, name: name != "lm_head"
    )
    model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    losses, trainer = run(LigerTrainer, model, tmp_path)
    assert losses.isfinite().all() and len(trainer.liger_report["float8"].swapped) == 14


def options_of(tmp_path):
    return {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}


def test_the_launcher_s_precision_wins_though_trl_sets_bf16(torchao, launched, tmp_path, monkeypatch):
    """A precision that the user sets wins over the launcher's, as in the stock classes."""
    assert LigerTrainingArguments(**options_of(tmp_path)).mixed_precision == "fp8"
    both = ({}, "fp8"), ({"bf16": False}, "fp8"), ({"bf16": True}, "bf16"), ({"use_liger": False}, "bf16")
    for given, precision in both:
        args = LigerSFTConfig(**options_of(tmp_path), **given)
        assert args.mixed_precision == precision and args.fp8 == (given == {})


@pytest.mark.parametrize("given", [None, True, False])
def test_a_recipe_and_the_launcher(given, launched, capsys):
    apply_precision(given, None)
    assert ("has no effect" in capsys.readouterr().err) == (given is not None)
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == ("no" if given is False else "fp8")


def test_in_a_recipe(torchao, fresh, monkeypatch):
    monkeypatch.setitem(os.environ, "ACCELERATE_USE_CPU", "true")
    assert parse_recipe("quickstart").training.fp8 is False
    training = parse_recipe("quickstart", ["--fp8", "true"]).training
    assert training.fp8 and training.mixed_precision == "fp8" and training.fp8_recipe is None
    training = parse_recipe("quickstart", ["--fp8", "true", "--fp8_recipe", "rowwise"]).training
    assert training.mixed_precision == "fp8" and training.fp8_recipe == "rowwise"


@pytest.mark.parametrize("others", [(), ("--fp8", "true", "--use_peft", "true")], ids=["without fp8", "with adapters"])
def test_a_recipe_with_a_name_that_would_have_no_effect(others, torchao, fresh):
    with pytest.raises(
        RecipeError, match="fp8_recipe is 'rowwise', which has no effect without fp8: true and use_peft"
    ):
        parse_recipe("quickstart", ["--fp8_recipe", "rowwise", *others])


def test_a_name_in_the_file_goes_with_what_the_command_line_switches_off(torchao, fresh, tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "ACCELERATE_USE_CPU", "true")
    path = tmp_path / "recipe.yaml"
    path.write_text((checkout.ROOT / "recipes" / "quickstart.yaml").read_text() + "\nfp8: true\nfp8_recipe: rowwise\n")
    assert parse_recipe(str(path)).training.fp8_recipe == "rowwise"
    training = parse_recipe(str(path), ["--fp8", "false"]).training
    assert training.fp8 is False and training.fp8_recipe is None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"fp8": "yes"}, "fp8 is 'yes'; expected true or false"),
        ({"fp8": True, "use_liger": False}, "fp8 is true, but it does not work with use_liger = False"),
        ({"fp8": True, "fp16": True}, "fp8 is true, but it does not work with fp16 = True"),
        ({"fp8_recipe": "rowwise"}, "fp8_recipe is 'rowwise', but it has no effect: fp8 is false. Set fp8 to true"),
    ],
)
def test_bad_options(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        LigerTrainingArguments(**options_of(tmp_path), **options)


def test_a_recipe_and_the_launcher_s_precision(torchao, launched, tmp_path):
    """A recipe name is valid with fp8, and with nothing else, however fp8 was asked for."""
    assert LigerTrainingArguments(**options_of(tmp_path), fp8_recipe="rowwise").mixed_precision == "fp8"
    assert LigerSFTConfig(**options_of(tmp_path), fp8_recipe="rowwise").fp8
    with pytest.raises(ValueError, match="fp8_recipe is 'rowwise', but it has no effect: fp8 is false"):
        LigerSFTConfig(**options_of(tmp_path), fp8_recipe="rowwise", bf16=True)
    with pytest.raises(ValueError, match="fp8_recipe is 'rowwise', but it has no effect: use_liger is False"):
        LigerTrainingArguments(**options_of(tmp_path), fp8_recipe="rowwise", use_liger=False)


def test_a_name_that_torchao_does_not_know(torchao, tmp_path):
    with pytest.raises(ValueError, match="fp8_recipe is 'rows'; expected one of 'tensorwise', 'rowwise', 'rowwise_wi"):
        LigerTrainingArguments(**options_of(tmp_path), fp8=True, fp8_recipe="rows")


def test_a_recipe_with_adapters(torchao, fresh, tmp_path):
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=16, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="fp8_recipe is 'rowwise', but the base.*is frozen.*Remove fp8_recipe"):
        run(LigerTrainer, model, tmp_path, fp8=True, fp8_recipe="rowwise")


def test_torchao_is_missing(fresh, tmp_path, monkeypatch):
    monkeypatch.setattr(fp8_fields.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="fp8 is true, which needs torchao for a model without adapters: pip install"):
        run(LigerTrainer, tiny_model("llama"), tmp_path, fp8=True, fp8_recipe="rowwise")
    with pytest.raises(ValueError, match="fp8 is true, which needs torchao for a model without adapters: pip install"):
        run(LigerTrainer, tiny_model("llama"), tmp_path, fp8=True)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="It also needs a GPU with fp8, but cpu is not a GPU"):
            run(LigerTrainer, tiny_model("llama"), tmp_path, fp8=True)


def test_the_stock_class_is_as_it_was(fresh, tmp_path):
    assert TrainingArguments(**options_of(tmp_path)).mixed_precision == "no"
    assert LigerTrainingArguments(**options_of(tmp_path)).mixed_precision == "no"
