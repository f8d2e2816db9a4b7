"""`LigerMTPTrainer` trains a frozen model's MTP head. With `mtp_targets: soft` it learns the model's distribution."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from medusa_brute_force import packed_batch, ragged_batch
from mtp_bases import SHAPES, brute_force, mtp_trainer, write_base
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_models import ragged_rows, tiny_model, tiny_tokenizer
from trainer_parity import logged_values
from transformers import AutoModelForCausalLM
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from varlen_batches import capture_on_cpu

from liger_trainer import LigerMTPConfig, LigerMTPTrainer, LigerSFTConfig

BATCHES = {"padded": ragged_batch, "packed": packed_batch}


@pytest.mark.diagonal
@pytest.mark.parametrize("varlen", [True, False], ids=["real-tokens", "with-padding"])
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize(
    "alone, targets", [(True, "hard"), (True, "soft"), (False, "soft")], ids=["alone-hard", "alone-soft", "joint-soft"]
)
def test_matches_float64(alone, targets, kind, varlen, tmp_path):
    # Layers that keep a state let it pass into the next document of a packed row if padding is not left out.
    layers = {} if varlen else {"layer_types": ["full_attention"] * 2}
    extra = write_base(tmp_path / "base", **layers)
    batch = BATCHES[kind]()
    options = {"mtp_targets": targets, "liger_config": {"varlen_attention": varlen}}
    trainer = mtp_trainer(tmp_path / "base", tmp_path / "out", alone=alone, **options)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    total, gradients, hits, count = brute_force(plain, extra, batch, soft=targets == "soft")
    labels = int(batch["labels"][:, 1:].ne(-100).sum())

    loss = trainer.compute_loss(trainer.model.train(), dict(batch))
    loss.backward()
    trainer.log({})
    logged = trainer.state.log_history[-1]
    assert logged["mtp_loss"] == pytest.approx(total / count, rel=1e-5)
    assert logged["mtp_accuracy"] == pytest.approx(hits / count)
    if alone:
        assert float(loss) == pytest.approx(total / labels, rel=1e-5)
        with_gradient = {name for name, p in trainer.model.named_parameters() if p.grad is not None}
        assert with_gradient == SHAPES.keys()
    for name, want in gradients.items():
        got = trainer.model.get_parameter(name).grad
        error = float((got - want / labels).norm() / (want / labels).norm())
        assert want.norm() > 0 and error < 1e-5, f"{name}: relative error {error:.1e}"


def test_soft_targets_give_the_model_nothing(tmp_path):
    """Next to SFT the model learns as without the head, though it is the head's teacher."""
    write_base(tmp_path / "base")
    trained = []
    for options in ({"mtp_targets": "soft"}, {"train_mtp": False}):
        trainer = mtp_trainer(tmp_path / "base", tmp_path / "out", **options)
        trainer.train()
        trained.append(trainer)
    weights = dict(trained[0].model.named_parameters())
    for name, p in trained[1].model.named_parameters():
        assert torch.equal(weights.pop(name), p), name
    assert weights.keys() == SHAPES.keys()


def test_without_labels(tmp_path):
    """A batch in which nothing has a label gives a loss of 0 and gradients of 0, so that DDP does not wait."""
    write_base(tmp_path / "base")
    batch = ragged_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    for targets in ("hard", "soft"):
        trainer = mtp_trainer(tmp_path / "base", tmp_path / "out", alone=True, mtp_targets=targets)
        loss = trainer.compute_loss(trainer.model.train(), dict(batch))
        loss.backward()
        assert float(loss) == 0.0
        for name in SHAPES:
            grad = trainer.model.get_parameter(name).grad
            assert grad is not None and not grad.any(), name


@pytest.mark.parametrize("targets, packing", [("hard", True), ("soft", False)])
def test_only_the_head_trains_and_is_saved(targets, packing, tmp_path):
    extra = write_base(tmp_path / "base")
    options = {"eval_strategy": "steps", "eval_steps": 2, "weight_decay": 0.1}
    trainer = mtp_trainer(
        tmp_path / "base", tmp_path / "out", alone=True, mtp_targets=targets, packing=packing, **options
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == SHAPES.keys()
    in_optimizer = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert in_optimizer == {id(p) for p in trainer.model.mtp.parameters()}
    logs = trainer.state.log_history
    assert any("eval_mtp_accuracy" in log and "eval_mtp_loss" in log for log in logs)
    assert all("mtp_accuracy" in log for log in logs if "loss" in log)

    trainer.save_model()
    trainer.create_model_card()
    saved = load_file(tmp_path / "out" / "mtp.safetensors")
    assert saved.keys() == extra.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, trainer.model.get_parameter(name)), name
    assert not list((tmp_path / "out").glob("model*")), "the model stays as it was"
    card = (tmp_path / "out" / "README.md").read_text()
    shown = next(log["eval_mtp_accuracy"] for log in reversed(logs) if "eval_mtp_accuracy" in log)
    assert f"Right guesses of the heads, by position ahead (evaluation): {shown:.3f}" in card
    assert "These are heads for `base`, which did not change. They were trained with liger_trainer" in card
    assert "pipeline(" not in card and "fine-tuned version" not in card and "trained with SFT" not in card
    assert f"mtp_targets: {targets}" in trainer.loss_name


@pytest.mark.parametrize("targets", ["hard", "soft"])
def test_the_loss_falls_and_a_resumed_run_continues(targets, tmp_path):
    write_base(tmp_path / "base")
    options = {"max_steps": 6, "mtp_targets": targets, "alone": True}
    whole = mtp_trainer(tmp_path / "base", tmp_path / "whole", save_strategy="steps", save_steps=3, **options)
    whole.train()
    resumed = mtp_trainer(tmp_path / "base", tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    logged = [logged_values(t, "mtp_loss") for t in (whole, resumed)]
    assert logged[0] == logged[1] and len(logged[0]) == 6 and logged[0][-1] < logged[0][0]
    for (name, p), (_, q) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    with pytest.raises(ValueError, match="base has no mtp.safetensors, .* Give a checkpoint of a LigerMTPTrainer"):
        resumed._load_from_checkpoint(str(tmp_path / "base"))


def test_the_best_head_is_loaded(tmp_path):
    write_base(tmp_path / "base")
    each = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_num_tokens", "greater_is_better": False}
    trainer = mtp_trainer(tmp_path / "base", tmp_path / "out", alone=True, **each, **best)
    trainer.train()
    folder = Path(trainer.state.best_model_checkpoint)
    assert folder.name != "checkpoint-3"
    for name, tensor in load_file(folder / "mtp.safetensors").items():
        assert torch.equal(trainer.model.get_parameter(name), tensor), name


def test_the_loss_does_not_depend_on_accumulation(tmp_path):
    write_base(tmp_path / "base")
    fc = []
    for size, steps in ((8, 1), (2, 4)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "optim": "sgd"}
        trainer = mtp_trainer(tmp_path / "base", tmp_path / str(size), alone=True, max_steps=1, **options)
        trainer.train()
        fc.append(trainer.model.mtp.fc.weight.detach())
    torch.testing.assert_close(*fc, rtol=1e-5, atol=1e-7)


def test_a_head_of_16_bits_learns_in_small_steps(tmp_path):
    """A learning rate of 5e-5 changes hardly any weight in bf16, and these are rounded again with every step."""
    write_base(tmp_path / "base")
    small = {"alone": True, "bf16": True, "learning_rate": 5e-5, "max_steps": 4, "lr_scheduler_type": "constant"}
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = mtp_trainer(tmp_path / "base", tmp_path / "whole", dtype=torch.bfloat16, **small, **saving)
    before = {name: p.detach().clone() for name, p in whole.model.mtp.named_parameters()}
    whole.train()
    for name, p in whole.model.mtp.named_parameters():
        assert (p != before[name]).float().mean() > 0.9, name
    assert whole.model.model.norm.weight.dtype == torch.bfloat16
    resumed = mtp_trainer(tmp_path / "base", tmp_path / "resumed", dtype=torch.bfloat16, **small)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for (name, p), (_, q) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(p, q), name

    in_16_bits = mtp_trainer(tmp_path / "base", tmp_path / "out", alone=True, dtype=torch.bfloat16)
    assert in_16_bits.model.mtp.fc.weight.dtype == torch.bfloat16, "without autocast it computes in its own dtype"


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "joint"])
def test_a_second_trainer_goes_on_with_the_head(alone, tmp_path):
    write_base(tmp_path / "base")
    first = mtp_trainer(tmp_path / "base", tmp_path / "first", alone=alone)
    first.train()
    trained = {name: p.detach().clone() for name, p in first.model.mtp.named_parameters()}
    second = mtp_trainer(tmp_path / "base", tmp_path / "second", alone=alone, model=first.model)
    for name, p in second.model.mtp.named_parameters():
        assert torch.equal(p, trained[name]) and p.requires_grad, name
    losses = []
    for trainer in (first, second):
        trainer.compute_loss(trainer.model.train(), ragged_batch())
        trainer.log({})
        losses.append(trainer.state.log_history[-1]["mtp_loss"])
    assert losses[0] == losses[1]
    second.train()
    assert not torch.equal(second.model.mtp.fc.weight, trained["fc.weight"])


# Refused


def test_a_frozen_model_does_not_train_with_its_head(tmp_path):
    """The head's gradient would hide that the model has none."""
    write_base(tmp_path / "base")
    model = mtp_trainer(tmp_path / "base", tmp_path / "alone", alone=True).model
    with pytest.raises(
        ValueError, match="train_mtp is true, but each parameter of the model is frozen.*requires_grad_"
    ):
        mtp_trainer(tmp_path / "base", tmp_path / "joint", model=model)
    model.requires_grad_(True)
    before = model.lm_head.weight.detach().clone()
    trainer = mtp_trainer(tmp_path / "base", tmp_path / "joint", model=model)
    trainer.train()
    assert not torch.equal(trainer.model.lm_head.weight, before)


@pytest.mark.parametrize(
    "options, trainer_options, message",
    [
        (
            {"use_liger": False},
            {},
            "use_liger is false, but the fused LM head computes the loss of an MTP head. Remove that option",
        ),
        ({"liger_config": {"fused_linear_cross_entropy": False}}, {}, "fused_linear_cross_entropy: false, but"),
        ({"train_mtp": True}, {}, "train_mtp is true, which trains the model too, but LigerMTPTrainer freezes it"),
        ({"mtp_targets": "model"}, {}, "mtp_targets is 'model'; expected 'hard' or 'soft'"),
        (
            {"loss_type": "dft"},
            {},
            "loss_type is 'dft', but the loss of an MTP head has no such option. Remove loss_type",
        ),
        (
            {"label_smoothing_factor": 0.1},
            {},
            "label_smoothing_factor is 0.1, but the loss of an MTP head has no such option",
        ),
        ({}, {"compute_loss_func": print}, "compute_loss_func is .*, but the loss of an MTP head has no such option"),
        ({}, {"peft_config": LoraConfig(r=2)}, "but LigerMTPTrainer freezes the model, .* Remove peft_config"),
        ({}, {"optimizers": (object(), None)}, "optimizers has an optimizer that was made before an MTP head"),
        ({"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha is 5.0, but LigerMTPTrainer freezes the model"),
        ({"eval_predictions": "tokens"}, {}, "eval_predictions is 'tokens', but LigerMTPTrainer"),
    ],
)
def test_options_that_would_be_ignored(options, trainer_options, message, tmp_path):
    write_base(tmp_path / "base")
    with pytest.raises(ValueError, match=message):
        mtp_trainer(tmp_path / "base", tmp_path / "out", trainer_options=trainer_options, alone=True, **options)


def test_soft_targets_without_a_head(tmp_path):
    with pytest.raises(ValueError, match="mtp_targets is 'soft', but no MTP head is trained. Set train_mtp: true"):
        LigerSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, mtp_targets="soft")


def test_a_quantized_model(tmp_path):
    write_base(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model.is_quantized = True
    model.hf_quantizer = Bnb4BitHfQuantizer.__new__(Bnb4BitHfQuantizer)
    with pytest.raises(ValueError, match=r"quantized \(Bnb4Bit\), but LigerMTPTrainer freezes .* Load it in 16 bits"):
        mtp_trainer(tmp_path / "base", tmp_path / "out", alone=True, model=model)


def test_a_batch_without_labels(tmp_path):
    write_base(tmp_path / "base")
    trainer = mtp_trainer(tmp_path / "base", tmp_path / "out", alone=True)
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.long), "position_ids": None}
    with pytest.raises(ValueError, match="The batch has input_ids, position_ids and no labels, which heads learn from"):
        trainer.compute_loss(trainer.model, batch)


def test_other_arguments_and_models(tmp_path):
    write_base(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    args = LigerSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match="args is a LigerSFTConfig; expected a LigerMTPConfig"):
        LigerMTPTrainer(model, args)
    write_base(tmp_path / "without", {})
    with pytest.raises(ValueError, match="only these two forms of MTP heads are supported. Use another model"):
        mtp_trainer(tmp_path / "without", tmp_path / "out", alone=True)
    adapted = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    args = LigerMTPConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    rows = Dataset.from_list(ragged_rows())
    model = get_peft_model(model, adapted)
    with pytest.raises(
        ValueError, match="The model has an adapter, but LigerMTPTrainer freezes the model. Merge it .* first"
    ):
        LigerMTPTrainer(model, args, train_dataset=rows, processing_class=tiny_tokenizer())
    assert any(p.requires_grad for p in model.parameters()), "the adapter of the user is not frozen"


@pytest.mark.diagonal
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "joint"])
def test_the_model_is_captured(alone, packing, monkeypatch, tmp_path):
    """Replays of the backbone give the losses and the weights of a run without captured steps."""
    capture_on_cpu(monkeypatch)
    shapes = {name: shape for name, shape in SHAPES.items() if not name.startswith("mtp.layers")}
    layers = tiny_model("llama").model.layers[0].state_dict()
    shapes |= {f"mtp.layers.0.{name}": tensor.shape for name, tensor in layers.items()}
    write_base(tmp_path / "base", shapes, kind="llama")  # a type with layers that can be captured
    options = {"alone": alone, "packing": packing, "mtp_targets": "soft", "max_steps": 6, "optim": "sgd"}
    rows = ragged_rows(24)
    runs = []
    for graphs in ("true", "false"):
        trainer = mtp_trainer(tmp_path / "base", tmp_path / graphs, rows=rows, cuda_graphs=graphs, **options)
        trainer.train()
        runs.append(trainer)
    captured, plain = runs
    assert captured.captured_steps.to_dict()["calls_replayed"] >= 2, captured.captured_steps.to_dict()
    assert logged_values(captured, "mtp_loss") == pytest.approx(logged_values(plain, "mtp_loss"), rel=1e-5)
    for (name, p), (_, q) in zip(captured.model.named_parameters(), plain.model.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
