"""`LigerMedusaTrainer`: what trains and what does not, learning rates, schedules, checkpoints, and refusals."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from medusa_brute_force import brute_force, medusa_trainer, model_with_heads, ragged_batch
from peft import LoraConfig, PeftModel, PromptTuningConfig
from recipe_fixtures import write_recipe
from safetensors.torch import load_file
from tiny_models import ragged_rows, tiny_model
from trainer_parity import logged_values
from transformers import AutoModelForCausalLM

from liger_trainer import LigerMedusaConfig, LigerSFTConfig, MedusaHeads
from liger_trainer.command.recipe.read import parse_recipe
from liger_trainer.errors import RecipeError
from liger_trainer.medusa.config import schedule_of
from liger_trainer.medusa.heads import heads_of
from liger_trainer.medusa.init_checks import check_setup

LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])


def state(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def moved(model, before):
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


# What is trained


@pytest.mark.parametrize("tied", [True, False])
def test_stage_1_moves_every_head_parameter_and_nothing_else(tied, tmp_path):
    """Heads start with two blocks each. A block that the loss misses would stay zero. The model is bit-identical."""
    model = tiny_model("llama")
    trainer = medusa_trainer(model, tmp_path, medusa_tied=tied, medusa_num_layers=2, weight_decay=0.1)
    before = state(model)
    trainer.train()
    heads = {name for name in before if "medusa_head" in name}
    assert len(heads) == 3 * (4 if tied else 5)
    assert moved(model, before) == heads


def test_stage_2_moves_the_whole_model(tmp_path):
    model = tiny_model("llama")
    trainer = medusa_trainer(model, tmp_path, medusa_stage=2)
    before = state(model)
    trainer.train()
    assert moved(model, before) == before.keys()


def test_stage_2_with_lora_moves_adapter_and_heads(tmp_path):
    trainer = medusa_trainer(tiny_model("llama"), tmp_path, trainer_options={"peft_config": LORA}, medusa_stage=2)
    before = state(trainer.model)
    trainer.train()
    assert moved(trainer.model, before) == {name for name in before if "medusa_head" in name or "lora_" in name}


def test_stage_2_trains_what_was_left_trainable(tmp_path):
    """The trainer itself freezes nothing: an earlier choice holds."""
    model = tiny_model("llama").requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    trainer = medusa_trainer(model, tmp_path, medusa_stage=2)
    before = state(model)
    trainer.train()
    assert moved(model, before) == {name for name in before if "medusa_head" in name or "layers.1." in name}


@pytest.mark.parametrize("multiplier", [4.0, None])
def test_every_head_parameter_has_its_learning_rate(multiplier, tmp_path):
    """Matrices and biases have it, where some trainers scale only what decays. The weight decay split stays."""
    trainer = medusa_trainer(
        tiny_model("llama"),
        tmp_path,
        medusa_stage=2,
        medusa_tied=False,
        medusa_lr_multiplier=multiplier,
        weight_decay=0.1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
    )
    optimizer = trainer.create_optimizer()
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    decayed = trainer.get_decay_parameter_names(trainer.model)
    seen = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = names[id(p)]
            seen.append(name)
            assert group["lr"] == pytest.approx(4e-3 if "medusa_head" in name else 1e-3), name
            assert group["weight_decay"] == (0.1 if name in decayed else 0.0), name
    assert sorted(seen) == sorted(names.values())
    trainer.create_scheduler(10, optimizer)  # it takes the rates for the initial ones
    assert {group["initial_lr"] for group in optimizer.param_groups} == {1e-3, 4e-3}


def test_stage_1_multiplier(tmp_path):
    for multiplier, rate in ((None, 1e-3), (3.0, 3e-3)):
        trainer = medusa_trainer(tiny_model("llama"), tmp_path, medusa_lr_multiplier=multiplier, learning_rate=1e-3)
        for group in trainer.create_optimizer().param_groups:
            assert not group["params"] or group["lr"] == pytest.approx(rate)


@pytest.mark.parametrize(
    "name, values",
    [
        ("constant", (1, 1, 1, 1)),
        ("linear", (0, 0.25, 0.5, 1)),
        ("sine", (0, math.sin(math.pi / 8), math.sin(math.pi / 4), 1)),
        ("sine_0.5", (0, math.sin(math.pi / 4), 1, 1)),
        ("sine_1", (0, math.sin(math.pi / 8), math.sin(math.pi / 4), 1)),
    ],
)
def test_schedules(name, values):
    assert [schedule_of(name)(share) for share in (0, 0.25, 0.5, 1)] == pytest.approx(values)


def test_the_schedule_weighs_the_loss_of_the_step(tmp_path):
    model, batch = model_with_heads(), ragged_batch(4)
    trainer = medusa_trainer(model, tmp_path, medusa_stage=2, medusa_schedule="sine_0.5", medusa_heads_coefficient=0.6)
    trainer.state.global_step, trainer.state.max_steps = 2, 16
    got = trainer.compute_loss(model.train(), dict(batch))
    want, _ = brute_force(model, batch, 2, "hard", decay=0.7, coefficient=0.6 * math.sin(math.pi / 2 * 0.25))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


def test_mixed_precision(tmp_path):
    losses = []
    for bf16 in (False, True):
        trainer = medusa_trainer(model_with_heads(tied=False), tmp_path, medusa_stage=2, medusa_tied=False, bf16=bf16)
        trainer.train()
        losses.append(logged_values(trainer, "loss"))
    assert losses[1] == pytest.approx(losses[0], rel=2e-2) and losses[0] != losses[1]


# Checkpoints

KINDS = {"stage1": {}, "stage2": {"medusa_stage": 2, "medusa_tied": False}, "lora": {"medusa_stage": 2}}


def built(kind, tmp_path, **options):
    extra = {"trainer_options": {"peft_config": LORA}} if kind == "lora" else {}
    return medusa_trainer(
        tiny_model("llama", attention_dropout=0.1),
        tmp_path,
        ragged_rows(16),
        **extra,
        **(KINDS[kind] | {"max_steps": 4, "per_device_train_batch_size": 4} | options),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_resumes_exactly_and_saves_what_loads(kind, tmp_path):
    whole = built(kind, tmp_path / "whole", save_strategy="steps", save_steps=2)
    whole.train()
    resumed = built(kind, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/medusa/checkpoint-2"))
    logged = [logged_values(t, "loss") for t in (whole, resumed)]
    assert logged[0] == logged[1] and len(logged[0]) == 4
    for (name, p), (_, q) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(p, q), name

    folder = tmp_path / "saved"
    whole.save_model(folder)
    ids = torch.tensor([[5, 9, 11, 40, 3]])
    heads = MedusaHeads.from_pretrained(folder)
    if kind == "stage1":
        assert not list(folder.glob("*.safetensors")) and not (folder / "config.json").exists()
        model = tiny_model("llama")
    elif kind == "stage2":
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        assert not any("medusa" in name for name in load_file(folder / "model.safetensors"))
    else:
        model = PeftModel.from_pretrained(tiny_model("llama"), folder)
    seen = []
    for m in (model.eval(), whole.model.eval()):
        with torch.no_grad():
            hidden = m(ids, output_hidden_states=True).hidden_states[-1]
            own = heads if m is model else heads_of(m)
            seen.append(own.logits(hidden, m.get_output_embeddings()))
    torch.testing.assert_close(*seen, rtol=1e-5, atol=1e-5)
    assert (folder / "tokenizer_config.json").exists()


@pytest.mark.parametrize("kind", ["stage1", "stage2"])
def test_the_best_checkpoint_is_loaded_at_the_end(kind, tmp_path):
    trainer = built(
        kind,
        tmp_path,
        save_strategy="steps",
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        learning_rate=10.0,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        lr_scheduler_type="constant",
    )
    trainer.train()
    best = trainer.state.best_model_checkpoint
    want = MedusaHeads.from_pretrained(best).state_dict()
    for name, tensor in heads_of(trainer.model).state_dict().items():
        assert torch.equal(tensor, want[name]), name
    other = {"checkpoint-2": "checkpoint-4", "checkpoint-4": "checkpoint-2"}[best.rsplit("/", 1)[1]]
    other = MedusaHeads.from_pretrained(best.rsplit("/", 1)[0] + "/" + other).state_dict()
    assert not all(torch.equal(other[name], want[name]) for name in want)


def test_heads_of_an_earlier_stage_are_trained_on(tmp_path):
    model = model_with_heads(tied=False)
    model.medusa_head.save_pretrained(tmp_path / "stage1" / "medusa_heads")
    trainer = medusa_trainer(
        tiny_model("llama"),
        tmp_path,
        medusa_tied=False,
        medusa_stage=2,
        medusa_init_heads_from=str(tmp_path / "stage1"),
    )
    for p, q in zip(heads_of(trainer.model).parameters(), model.medusa_head.parameters(), strict=True):
        assert torch.equal(p, q) and p.requires_grad


# Refused


@pytest.mark.parametrize(
    "options, message",
    [
        ({"medusa_num_heads": 0}, "medusa_num_heads is 0; expected 1 or more"),
        ({"medusa_num_layers": -1}, "medusa_num_layers is -1; expected 0 or more"),
        ({"medusa_num_layers": 0}, "medusa_num_layers is 0 and medusa_tied is true.*nothing to train"),
        ({"medusa_decay": 0.0}, "medusa_decay is 0.0; expected a number above 0 and at most 1"),
        ({"medusa_decay": 1.1}, "medusa_decay is 1.1"),
        ({"medusa_stage": 3}, "medusa_stage is 3; expected 1"),
        ({"medusa_targets": "kl"}, "medusa_targets is 'kl'; expected 'hard' or 'soft'"),
        ({"medusa_heads_coefficient": 0.0}, "medusa_heads_coefficient is 0.0; expected a number above 0"),
        ({"medusa_lr_multiplier": -1.0}, "medusa_lr_multiplier is -1.0; expected a number above 0"),
        ({"medusa_schedule": "cosine"}, "medusa_schedule is 'cosine'; expected 'constant'"),
        ({"medusa_schedule": "sine_2"}, "medusa_schedule is 'sine_2'"),
        ({"medusa_schedule": "sine_"}, "medusa_schedule is 'sine_'"),
    ],
)
def test_bad_arguments(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        LigerMedusaConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


IGNORED = [
    ({"use_liger": False}, {}, "use_liger is false, but the fused LM head computes the loss of Medusa heads. Remove"),
    (
        {"liger_config": {"fused_linear_cross_entropy": False}},
        {},
        "fused_linear_cross_entropy: false, but the fused LM head computes the loss of Medusa heads. Remove",
    ),
    (
        {"label_smoothing_factor": 0.1},
        {},
        "label_smoothing_factor is 0.1, but the loss of Medusa heads has no such option",
    ),
    ({"loss_type": "dft"}, {}, "loss_type is 'dft', but the loss of Medusa heads has no such option"),
    (
        {"neftune_noise_alpha": 5.0},
        {},
        "neftune_noise_alpha is 5.0, but LigerMedusaTrainer freezes .* or set medusa_stage to 2",
    ),
    (
        {},
        {"compute_loss_func": print},
        "compute_loss_func is .*print>, but the loss of Medusa heads has no such option",
    ),
    (
        {},
        {"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)},
        "optimizers has an optimizer that was made before",
    ),
    (
        {},
        {"peft_config": LORA},
        "peft_config is .*, but LigerMedusaTrainer freezes .* Remove peft_config, or set medusa_stage to 2",
    ),
    (
        {"medusa_stage": 2},
        {"peft_config": LoraConfig(r=2, target_modules=["lm_head"])},
        "The LM head of LlamaForCausalLM has an adapter.*lora_modules_to_save",
    ),
    (
        {"medusa_stage": 2},
        {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)},
        "is PROMPT_TUNING, which puts tokens without labels before the text. Use LoRA",
    ),
    ({"eval_predictions": "tokens"}, {}, "eval_predictions is 'tokens', but LigerMedusaTrainer"),
]


@pytest.mark.parametrize("options, trainer_options, message", IGNORED, ids=[message[:30] for *_, message in IGNORED])
def test_options_that_would_be_ignored_or_train_wrongly_are_refused(options, trainer_options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        medusa_trainer(tiny_model("llama"), tmp_path, trainer_options=trainer_options, **options)


def test_models_and_heads_that_do_not_fit(tmp_path):
    with pytest.raises(ValueError, match="medusa_stage is 2, but all parameters of the model are frozen"):
        medusa_trainer(tiny_model("llama").requires_grad_(False), tmp_path, medusa_stage=2)
    with pytest.raises(ValueError, match="medusa_num_heads is 3, but the model has heads with 2"):
        medusa_trainer(model_with_heads(num_heads=2), tmp_path)
    model_with_heads().medusa_head.save_pretrained(tmp_path / "heads")
    from_heads = {"medusa_init_heads_from": str(tmp_path / "heads")}
    with pytest.raises(ValueError, match="but the model has heads already. Remove one of the two"):
        medusa_trainer(model_with_heads(), tmp_path, **from_heads)
    with pytest.raises(ValueError, match="medusa_tied is False, but medusa_init_heads_from has heads with True"):
        medusa_trainer(tiny_model("llama"), tmp_path, medusa_tied=False, **from_heads)
    with pytest.raises(ValueError, match="vocab_size 131, but the LM head of LlamaForCausalLM has 140. Use the model"):
        medusa_trainer(tiny_model("llama", vocab_size=140), tmp_path, **from_heads)
    trainer = medusa_trainer(model_with_heads(), tmp_path)
    model_with_heads(num_layers=2).medusa_head.save_pretrained(tmp_path / "other")
    with pytest.raises(RuntimeError, match="Unexpected key.*0.1.linear"):
        trainer._load_from_checkpoint(str(tmp_path / "other"))


SETUPS = [
    ({"parallelism_config": SimpleNamespace(cp_enabled=True, sp_enabled=False)}, {}, "cp_size or sp_size above 1"),
    ({"parallelism_config": SimpleNamespace(cp_enabled=False, sp_enabled=True)}, {}, "cp_size or sp_size above 1"),
    (
        {},
        {"deepspeed_plugin": SimpleNamespace(deepspeed_config={"optimizer": {"type": "AdamW"}})},
        "medusa_lr_multiplier is 4.0, but the DeepSpeed config has an `optimizer`, which has one learning rate",
    ),
    (
        {},
        {"fsdp_plugin": SimpleNamespace(state_dict_type="StateDictType.SHARDED_STATE_DICT")},
        "SHARDED_STATE_DICT, so the heads would not be saved. Set it to FULL_STATE_DICT",
    ),
    ({"mixed_precision": "fp8", "ao_recipe_handler": object()}, {}, "needs the weights of all heads in 16-bit"),
]


@pytest.mark.parametrize("own, state, message", SETUPS, ids=["cp", "sp", "deepspeed-optimizer", "fsdp-sharded", "fp8"])
def test_launches_that_would_train_or_save_wrongly(own, state, message, tmp_path):
    trainer = medusa_trainer(tiny_model("llama"), tmp_path, medusa_stage=2)
    accelerator = SimpleNamespace(
        **({"parallelism_config": None, "mixed_precision": "no"} | own), state=SimpleNamespace(**state)
    )
    with pytest.raises(ValueError, match=message):
        check_setup(trainer.model, trainer.args, accelerator)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_save_without_gathered_weights(stage, tmp_path):
    """DeepSpeed's ZeRO-3 asks for one before its own checkpoint, and deletes the file."""
    trainer = medusa_trainer(tiny_model("llama"), tmp_path, medusa_stage=stage)
    trainer._save(str(tmp_path / "dummy"), state_dict={})
    assert not (tmp_path / "dummy" / "medusa_heads").exists()
    trainer._save(str(tmp_path / "whole"))
    assert (tmp_path / "whole" / "medusa_heads").is_dir()


def test_a_model_on_several_devices(tmp_path):
    trainer = medusa_trainer(tiny_model("llama"), tmp_path)
    trainer.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(ValueError, match="Medusa heads are trained, but device_map has spread the model"):
        check_setup(trainer.model, trainer.args, trainer.accelerator)


def test_arguments_of_another_class(tmp_path):
    from liger_trainer import LigerMedusaTrainer

    args = LigerSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match="args is a LigerSFTConfig; expected a LigerMedusaConfig"):
        LigerMedusaTrainer(tiny_model("llama"), args)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_card_loads_a_model_only_where_one_is_saved(stage, tmp_path):
    trainer = medusa_trainer(tiny_model("llama"), tmp_path, medusa_stage=stage)
    trainer.create_model_card()
    card = Path(trainer.args.output_dir, "README.md").read_text()
    assert ("pipeline(" in card) == (stage == 2)
    assert "## Training procedure" in card
    assert trainer.loss_name == f"of Medusa heads, medusa_stage: {stage}, medusa_targets: hard"


def test_recipe(tmp_path):
    path = write_recipe(tmp_path, trainer="medusa", medusa_num_heads=5, medusa_stage=2, medusa_schedule="sine_0.1")
    recipe = parse_recipe(str(path), ["--medusa_decay", "0.9"])
    assert isinstance(recipe.training, LigerMedusaConfig) and recipe.entry.trainer == "LigerMedusaTrainer"
    assert (recipe.training.medusa_num_heads, recipe.training.medusa_stage) == (5, 2)
    assert (recipe.training.medusa_decay, recipe.training.medusa_lr_multiplier) == (0.9, 4.0)
    for keys, message in (
        ({"medusa_stage": 3}, r"medusa_stage is 3\..*expected one of \(1, 2\)"),
        ({"medusa_num_head": 3}, "Did you mean medusa_num_heads"),
        ({"medusa_decay": 2.0}, "medusa_decay is 2.0; expected a number above 0"),
    ):
        with pytest.raises(RecipeError, match=message):
            parse_recipe(str(write_recipe(tmp_path, trainer="medusa", **keys)))
