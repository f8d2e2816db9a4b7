"""`train_mtp` loads a base's MTP head, trains it with the model, and saves it under its own names."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from base_checkpoints import names_of, tensor_of
from medusa_brute_force import packed_batch, ragged_batch
from mtp_bases import SHAPES, brute_force, mtp_trainer, write_base
from peft import LoraConfig, PromptTuningConfig
from recipe_fixtures import command
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from trainer_parity import logged_values
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from liger_trainer import LigerMedusaConfig, LigerMedusaTrainer
from liger_trainer.mtp.training import TrainedPredictor
from liger_trainer.varlen.rows import Rows

SPLIT_ROWS = SimpleNamespace(cp_enabled=True, sp_enabled=False, tp_enabled=False)


@pytest.mark.parametrize("kind, checkpointing", [("padded", False), ("packed", False), ("packed", True)])
def test_matches_float64(kind, checkpointing, tmp_path):
    extra = write_base(tmp_path / "base")
    batch = {"padded": ragged_batch, "packed": packed_batch}[kind]()
    trainer = mtp_trainer(tmp_path / "base", tmp_path / "out", activation_checkpointing=checkpointing)
    if checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    total, gradients, hits, count = brute_force(plain, extra, batch)
    labels = int(batch["labels"][:, 1:].ne(-100).sum())

    trainer.compute_loss(trainer.model.train(), dict(batch)).backward()
    logs = {}
    trainer.log(logs)
    logged = trainer.state.log_history[-1]
    assert logged["mtp_loss"] == pytest.approx(total / count, rel=1e-5)
    assert logged["mtp_accuracy"] == pytest.approx(hits / count)
    for name, want in gradients.items():
        got = trainer.model.get_parameter(name).grad
        error = float((got - want / labels).norm() / (want / labels).norm())
        assert want.norm() > 0 and error < 2e-5, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_the_head_is_patched_and_attends_by_rows(kind, monkeypatch, tmp_path):
    """As the model's own layers do: no mask of all tokens by all tokens, and fused norms, rotation and MLP."""
    write_base(tmp_path / "base")
    made = []

    class Noted(Rows):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr("liger_trainer.mtp.predictor.Rows", Noted)
    batch = {"padded": ragged_batch, "packed": packed_batch}[kind]()
    trainer = mtp_trainer(tmp_path / "base", tmp_path / "out")
    head = trainer.model.mtp
    for module in (head.norm, head.fc, head.layers[0].mlp, head.layers[0].self_attn):
        assert ("forward" in vars(module)) == (module is not head.fc)
    trainer.compute_loss(trainer.model.train(), dict(batch))
    assert len(made) == 1 and made[0].attention_kinds == {"causal"}
    off = mtp_trainer(tmp_path / "base", tmp_path / "off", liger_config={"varlen_attention": False, "swiglu": False})
    assert "forward" not in vars(off.model.mtp.layers[0].mlp)
    off.compute_loss(off.model.train(), dict(batch))
    assert len(made) == 1


def test_documents_stay_apart_with_an_attention_of_the_users(monkeypatch, tmp_path):
    """It does not ask for rows, and gets a mask."""
    write_base(tmp_path / "base", layer_types=["full_attention"] * 2)
    batch = packed_batch()
    losses = []
    for own in (False, True):
        trainer = mtp_trainer(tmp_path / "base", tmp_path / str(own))
        if own:
            monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", partial(sdpa_attention_forward))
            monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", partial(sdpa_mask))
        trainer.compute_loss(trainer.model.train(), dict(batch))
        trainer.log({})
        losses.append(trainer.state.log_history[-1]["mtp_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_the_model_learns_as_without_it(packing, tmp_path):
    """Losses, gradients and weights are bit-equal, and padding is still left out."""
    write_base(tmp_path / "base")
    trained = []
    for train_mtp in (True, False):
        trainer = mtp_trainer(tmp_path / "base", tmp_path / str(train_mtp), train_mtp=train_mtp, packing=packing)
        trainer.train()
        trained.append(trainer)
    ours, plain = trained
    reports = [str(trainer.liger_report["varlen_attention"]) for trainer in trained]
    assert reports[0] == reports[1]
    for log, want in zip(ours.state.log_history, plain.state.log_history, strict=True):
        same = {"loss", "entropy", "mean_token_accuracy", "num_tokens", "train_loss"} & want.keys()
        assert same and all(log[name] == want[name] for name in same)
    weights = dict(ours.model.named_parameters())
    for name, p in plain.model.named_parameters():
        assert torch.equal(weights.pop(name), p), name
    assert weights.keys() == SHAPES.keys()


def test_every_parameter_of_the_head_moves_and_is_saved(tmp_path):
    extra = write_base(tmp_path / "base")
    trainer = mtp_trainer(tmp_path / "base", tmp_path / "out", eval_strategy="steps", eval_steps=2)
    for name, tensor in extra.items():
        assert torch.equal(trainer.model.get_parameter(name), tensor), name
    trainer.train()
    trainer.save_model()
    assert names_of(tmp_path / "out") == names_of(tmp_path / "base")
    for name, tensor in extra.items():
        saved = tensor_of(tmp_path / "out", name)
        assert torch.equal(saved, trainer.model.get_parameter(name)) and not torch.equal(saved, tensor), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    assert any("eval_mtp_loss" in log for log in trainer.state.log_history)
    assert trainer.kept_weights.tensors == 0, "nothing of the base is copied"

    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, p in reloaded.named_parameters():
        assert torch.equal(p, trainer.model.get_parameter(name)), name
    again = mtp_trainer(tmp_path / "out", tmp_path / "again")
    assert torch.equal(again.model.mtp.fc.weight, trainer.model.mtp.fc.weight)


def test_the_loss_of_the_head_falls_and_a_resumed_run_continues(tmp_path):
    write_base(tmp_path / "base")
    options = {"max_steps": 6, "activation_checkpointing": True}
    whole = mtp_trainer(tmp_path / "base", tmp_path / "whole", save_strategy="steps", save_steps=3, **options)
    whole.train()
    resumed = mtp_trainer(tmp_path / "base", tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    logged = [logged_values(t, "mtp_loss") for t in (whole, resumed)]
    assert logged[0] == logged[1] and len(logged[0]) == 6 and logged[0][-1] < logged[0][0]
    for (name, p), (_, q) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def test_the_loss_does_not_depend_on_accumulation(tmp_path):
    write_base(tmp_path / "base")
    fc = []
    for size, steps in ((8, 1), (2, 4)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "optim": "sgd"}
        trainer = mtp_trainer(tmp_path / "base", tmp_path / str(size), max_steps=1, **options)
        trainer.train()
        fc.append(trainer.model.mtp.fc.weight.detach())
    torch.testing.assert_close(*fc, rtol=1e-5, atol=1e-7)


LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}


def test_with_an_adapter_on_a_model_in_16_bits(tmp_path, capsys):
    """Under autocast the head is fp32, so that small steps are kept. The merged model has it in the base's dtype."""
    extra = {name: tensor.to(torch.bfloat16) for name, tensor in write_base(tmp_path / "base").items()}
    file = tmp_path / "base" / "model.safetensors"
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    options = {"dtype": torch.bfloat16, "bf16": True, "learning_rate": 1e-5, "max_steps": 2}
    trainer = mtp_trainer(tmp_path / "base", tmp_path / "out", trainer_options=LORA, **options)
    trainer.train()
    trainer.save_model()
    head = trainer.model.get_base_model().mtp
    code, _, err = command(capsys, "merge", tmp_path / "out", tmp_path / "merged", "--model", tmp_path / "base")
    assert code == 0, err
    moved = 0
    for name, tensor in extra.items():
        weight = head.get_parameter(name.removeprefix("mtp."))
        assert weight.dtype == torch.float32
        moved += (weight != tensor).sum() / weight.numel() / len(extra)
        assert torch.equal(tensor_of(tmp_path / "merged", name), weight.to(torch.bfloat16)), name
    assert moved > 0.95


def test_with_an_adapter_it_is_saved_resumed_and_merged(tmp_path, capsys):
    """The adapter learns the same bits as without the head. The merged model has the trained head."""
    extra = write_base(tmp_path / "base")
    options = {"trainer_options": LORA, "max_steps": 4}
    whole = mtp_trainer(tmp_path / "base", tmp_path / "whole", save_strategy="steps", save_steps=2, **options)
    whole.train()
    whole.save_model()
    plain = mtp_trainer(tmp_path / "base", tmp_path / "plain", train_mtp=False, **options)
    plain.train()
    weights = dict(whole.model.named_parameters())
    for name, p in plain.model.named_parameters():
        assert torch.equal(weights.pop(name), p), name
    assert len(weights) == len(SHAPES) and all(p.requires_grad for p in weights.values())

    resumed = mtp_trainer(tmp_path / "base", tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for (name, p), (_, q) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    with pytest.raises(ValueError, match="plain has no mtp.safetensors, so no MTP head .* Remove train_mtp"):
        whole._mtp.load(str(tmp_path / "plain"))

    assert not any("mtp" in name for name in load_file(tmp_path / "whole" / "adapter_model.safetensors"))
    for models in ([tmp_path / "whole"], [tmp_path / "base", tmp_path / "whole"]):  # the head is for the merged model
        code, _, err = command(capsys, "mtp-eval", *models, "--prompts", tmp_path / "rows.jsonl")
        assert code == 2 and "an adapter. Merge it with its base first" in err
    code, out, err = command(capsys, "merge", tmp_path / "whole", tmp_path / "merged", "--model", tmp_path / "base")
    assert code == 0, err
    assert "15 tensors are the MTP head that was trained with the adapter, in place of the base's" in out
    assert "not trained" not in out
    assert names_of(tmp_path / "merged") == names_of(tmp_path / "base")
    head = whole.model.get_base_model().mtp
    for name, tensor in extra.items():
        merged = tensor_of(tmp_path / "merged", name)
        assert torch.equal(merged, head.get_parameter(name.removeprefix("mtp."))), name
        assert not torch.equal(merged, tensor), name


def test_beside_an_adapter_that_trains_the_last_norm(tmp_path):
    """PEFT puts a copy of the norm in its place, which has another class than the norms of the head."""
    write_base(tmp_path / "base")
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"])
    trainer = mtp_trainer(tmp_path / "base", tmp_path / "out", trainer_options={"peft_config": config})
    model = trainer.model.get_base_model()
    assert {type(model.mtp.pre_fc_norm_hidden), type(model.mtp.norm)} == {type(model.model.norm.original_module)}
    before = model.mtp.pre_fc_norm_hidden.weight.detach().clone()
    trainer.train()
    assert not torch.equal(model.mtp.pre_fc_norm_hidden.weight, before)


# Refused


def test_bases_without_a_head_that_is_known(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    with pytest.raises(
        ValueError, match=r"llama has no tensors mtp\.\* and no layer beyond the depth .* only these two forms"
    ):
        mtp_trainer(tmp_path / "llama", tmp_path / "out")
    shapes = {name: shape for name, shape in SHAPES.items() if name != "mtp.norm.weight"}
    write_base(tmp_path / "less", shapes)
    with pytest.raises(
        ValueError, match="the checkpoint lacks mtp.norm.weight, so this form of MTP head is not supported"
    ):
        mtp_trainer(tmp_path / "less", tmp_path / "out")
    write_base(tmp_path / "more", SHAPES | {"mtp.layers.0.mlp.experts.0.up_proj.weight": (2, 2)})
    with pytest.raises(ValueError, match="Qwen3_5TextModel lacks mtp.layers.0.mlp.experts.0.up_proj.weight"):
        mtp_trainer(tmp_path / "more", tmp_path / "out")
    write_base(tmp_path / "other", SHAPES | {"mtp.fc.weight": (32, 32)})
    with pytest.raises(ValueError, match=r"mtp.fc.weight is \(32, 32\) in .*; expected \(32, 64\)"):
        mtp_trainer(tmp_path / "other", tmp_path / "out")


@pytest.mark.parametrize(
    "options, trainer_options, message",
    [
        ({"use_liger": False}, {}, "the fused LM head is off"),
        (
            {"label_smoothing_factor": 0.1},
            {},
            "label_smoothing_factor is 0.1, but the head's loss cannot be smoothed. Remove one",
        ),
        ({"keep_unloaded_weights": False}, {}, "keep_unloaded_weights: false leaves the head out"),
        ({}, {"compute_loss_func": print}, "compute_loss_func does not train the head"),
        (
            {},
            {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "lm_head"])},
            "train_mtp is true, but the LM head has an adapter",
        ),
        (
            {},
            {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"])},
            "the adapter trains the input embeddings, and the head would read the base's",
        ),
        (
            {},
            {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)},
            "the adapter puts tokens before the text",
        ),
        ({"train_mtp": 1}, {}, "train_mtp is 1; expected true or false"),
    ],
)
def test_options_that_would_train_or_save_wrongly_are_refused(options, trainer_options, message, tmp_path):
    write_base(tmp_path / "base")
    with pytest.raises(ValueError, match=message):
        mtp_trainer(tmp_path / "base", tmp_path / "out", trainer_options=trainer_options, **options)


def test_rows_with_images(tmp_path):
    write_base(tmp_path / "base")
    trainer = mtp_trainer(tmp_path / "base", tmp_path / "out")
    with pytest.raises(
        ValueError, match="The batch has image_grid_thw, but an MTP head .* Remove such rows, or train_mtp"
    ):
        trainer._mtp.loss(None, ragged_batch(2) | {"image_grid_thw": torch.ones(1, 3)})


def test_launches_that_shard(monkeypatch, tmp_path):
    write_base(tmp_path / "base")
    for own, reason in (
        ({"distributed_type": DistributedType.FSDP}, "train_mtp is true, but the launch is FSDP, which shards weights"),
        ({"parallelism_config": SPLIT_ROWS}, "train_mtp is true, but parallelism_config splits .* Set cp_size"),
    ):
        trainer = mtp_trainer(tmp_path / "base", tmp_path / "out")
        trainer.accelerator = SimpleNamespace(**({"distributed_type": DistributedType.NO} | own))
        with pytest.raises(ValueError, match=reason):
            TrainedPredictor(trainer)


def test_a_model_on_several_devices(tmp_path):
    write_base(tmp_path / "base")
    trainer = mtp_trainer(tmp_path / "base", tmp_path / "out")
    trainer.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(ValueError, match="train_mtp is true, but device_map has spread the model"):
        TrainedPredictor(trainer)


def test_trainers_of_other_heads_refuse_it(tmp_path):
    args = LigerMedusaConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, train_mtp=True)
    with pytest.raises(
        ValueError, match="train_mtp is True, but the loss of Medusa heads has no such option. Remove train_mtp"
    ):
        LigerMedusaTrainer(tiny_model("llama"), args)
