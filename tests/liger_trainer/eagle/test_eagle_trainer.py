"""`LigerEagleTrainer`: what trains and what does not, the draft vocabulary, checkpoints, logs, and refusals."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from datasets import Dataset
from eagle_brute_force import LAYERS, eagle_target, eagle_trainer, with_random_drafter
from peft import LoraConfig, get_peft_model
from tiny_models import VOCAB, ragged_rows, tiny_model, tiny_tokenizer
from trainer_parity import logged_values

from liger_trainer import EagleDrafter, LigerEagleConfig, LigerEagleTrainer, LigerSFTConfig
from liger_trainer.eagle.drafter import EagleDrafter as Drafter
from liger_trainer.eagle.export import export_drafter
from liger_trainer.eagle.fresh import drafter_of
from liger_trainer.eagle.init_checks import check_setup
from liger_trainer.eagle.vocabulary import count_labels, draft_vocabulary


def state(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_every_parameter_of_the_drafter_moves_and_nothing_else(tmp_path):
    trainer = eagle_trainer(eagle_target(), tmp_path, weight_decay=0.1)
    before = state(trainer.model)
    trainer.train()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "eagle_drafter" in name} and len(moved) == 13
    drafter = trainer.model.eagle_drafter
    assert torch.equal(drafter.t2d.nonzero()[:, 0], drafter.target_ids)


def test_the_loss_falls_and_is_logged_by_step(tmp_path):
    trainer = eagle_trainer(eagle_target(), tmp_path, max_steps=12, eval_strategy="steps", eval_steps=6)
    trainer.train()
    logs = trainer.state.log_history
    losses = [log["loss"] for log in logs if "loss" in log]
    assert losses[-1] < 0.8 * losses[0]
    for k in (1, 2, 3):
        own = [log[f"eagle_step{k}_loss"] for log in logs if f"eagle_step{k}_loss" in log]
        assert len(own) == 12 and own[-1] < own[0]
        assert any(f"eval_eagle_step{k}_accuracy" in log for log in logs)
    assert not any(name.startswith("eagle_step4") for log in logs for name in log)


def test_packed_rows(tmp_path):
    trainer = eagle_trainer(eagle_target(), tmp_path, packing=True, max_length=64, max_steps=3)
    trainer.train()
    assert any("position_ids" in batch for batch in trainer.get_train_dataloader())
    assert all(log["loss"] > 0 for log in trainer.state.log_history if "loss" in log)


def test_steps_are_computed_again_in_the_backward_pass(tmp_path, monkeypatch):
    calls = []
    own = Drafter._step
    monkeypatch.setattr(Drafter, "_step", lambda self, *args: calls.append(1) or own(self, *args))
    for recompute, count in ((False, 3), (True, 6)):
        trainer = eagle_trainer(eagle_target(), tmp_path, gradient_checkpointing=recompute, max_steps=1)
        calls.clear()
        trainer.train()
        assert len(calls) == count


def test_in_16_bits(tmp_path):
    """A bf16 model has a bf16 drafter. Under mixed precision the drafter is fp32, whatever the model is."""
    trainer = eagle_trainer(eagle_target(dtype=torch.bfloat16), tmp_path, bf16=False)
    assert {p.dtype for p in trainer.model.eagle_drafter.parameters()} == {torch.bfloat16}
    trainer.train()
    losses = []
    for bf16 in (False, True):
        trainer = eagle_trainer(eagle_target(), tmp_path, bf16=bf16)
        assert {p.dtype for p in trainer.model.eagle_drafter.parameters()} == {torch.float32}
        trainer.train()
        losses.append(logged_values(trainer, "loss"))
    assert losses[1] == pytest.approx(losses[0], rel=5e-2) and losses[0] != losses[1]


def test_the_loss_does_not_depend_on_accumulation(tmp_path):
    weights = []
    for size, steps in ((8, 1), (2, 4)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "optim": "sgd"}
        trainer = eagle_trainer(eagle_target(), tmp_path / str(size), max_steps=1, **options)
        trainer.train()
        weights.append(trainer.model.eagle_drafter.fc.weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-7)


# The draft vocabulary


def test_small_steps_are_not_lost_to_rounding(tmp_path):
    """In bf16, the spacing of weights around 0.02 is 1.2e-4, so most of them would not move by a step of 1e-5."""
    trainer = eagle_trainer(eagle_target(dtype=torch.bfloat16), tmp_path, bf16=True, learning_rate=1e-5, max_steps=2)
    before = state(trainer.model.eagle_drafter)
    trainer.train()
    for name in ("fc.weight", "midlayer.mlp.up_proj.weight"):
        weight = trainer.model.eagle_drafter.get_parameter(name)
        assert weight.dtype == torch.float32
        assert (weight != before[name]).float().mean() > 0.95, name
    trainer.save_model()
    loaded = Drafter.from_pretrained(trainer.args.output_dir)
    assert loaded.fc.weight.dtype == torch.float32
    export_drafter(trainer.args.output_dir, str(tmp_path / "served"), "org/base")  # for a server: as the target
    served = Drafter.from_pretrained(tmp_path / "served")
    assert torch.equal(served.fc.weight, loaded.fc.weight.bfloat16()) and torch.equal(served.d2t, loaded.d2t)
    export_drafter(trainer.args.output_dir, str(tmp_path / "wide"), "org/base", torch.float32)
    assert torch.equal(Drafter.from_pretrained(tmp_path / "wide").fc.weight, loaded.fc.weight)


def test_the_most_frequent_labels_are_counted(tmp_path):
    """Tokens of prompts do not count. Equally frequent tokens are ordered by id."""
    rows = [{"prompt_ids": [9, 9, 9, 9], "completion_ids": [7, 7, 5]}, {"prompt_ids": [8], "completion_ids": [5, 6, 7]}]
    given = []
    for row in rows:
        ids = row["prompt_ids"] + row["completion_ids"]
        mask = [0] * len(row["prompt_ids"]) + [1] * len(row["completion_ids"])
        given.append({"input_ids": ids, "completion_mask": mask})
    trainer = eagle_trainer(
        eagle_target(), tmp_path, given, eagle_draft_vocab_size=4, completion_only_loss=True
    )  # 7: three times, 5: twice, 6: once, then id 0
    assert trainer.model.eagle_drafter.target_ids.tolist() == [0, 5, 6, 7]
    head = trainer.model.lm_head.weight
    assert torch.equal(trainer.model.eagle_drafter.lm_head.weight, head[[0, 5, 6, 7]])
    counts = count_labels(trainer.train_dataset, trainer.data_collator, VOCAB, at_once=1)
    assert counts[[5, 6, 7, 8, 9]].tolist() == [2, 1, 3, 0, 0]


def test_all_tokens(tmp_path):
    trainer = eagle_trainer(eagle_target(), tmp_path, eagle_draft_vocab_size=10**6)
    drafter = trainer.model.eagle_drafter
    assert drafter.t2d.all() and not drafter.d2t.any() and drafter.config.draft_vocab_size == VOCAB
    with pytest.raises(ValueError, match="The draft vocabulary has 0 tokens; expected 1 to 131"):
        draft_vocabulary(torch.zeros(VOCAB), 0)


# Checkpoints


def built(tmp_path, **options):
    model = eagle_target(attention_dropout=0.1)
    return eagle_trainer(
        model, tmp_path, ragged_rows(16), **({"max_steps": 4, "per_device_train_batch_size": 4} | options)
    )


def test_resumes_exactly_and_saves_what_loads(tmp_path):
    whole = built(tmp_path / "whole", save_strategy="steps", save_steps=2)
    whole.train()
    resumed = built(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/eagle/checkpoint-2"))
    logged = [logged_values(t, "loss") for t in (whole, resumed)]
    assert logged[0] == logged[1] and len(logged[0]) == 4
    for (name, p), (_, q) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    whole.save_model(tmp_path / "saved")
    drafter = EagleDrafter.from_pretrained(tmp_path / "saved")
    for name, tensor in drafter_of(whole.model).state_dict().items():
        assert torch.equal(drafter.state_dict()[name], tensor), name
    assert not list((tmp_path / "saved").glob("*.safetensors"))
    assert (tmp_path / "saved" / "tokenizer_config.json").exists()


def test_a_checkpoint_of_other_layers_is_refused(tmp_path):
    """Its weights would fit, but they were trained on other hidden states."""
    built(tmp_path / "first", save_strategy="steps", save_steps=2, max_steps=2).train()
    other = built(tmp_path / "other", eagle_layers=[0, 1, 2])
    before = state(other.model)
    with pytest.raises(ValueError, match=r"has layers: .*, and the one of this training \(0, 1, 2\)"):
        other.train(resume_from_checkpoint=str(tmp_path / "first/eagle/checkpoint-2"))
    assert all(torch.equal(p, before[name]) for name, p in other.model.named_parameters())


def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path):
    trainer = built(
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
    saved = {}
    for step in (2, 4):
        saved[step] = EagleDrafter.from_pretrained(tmp_path / f"eagle/checkpoint-{step}").state_dict()
    best = int(trainer.state.best_model_checkpoint.rsplit("-", 1)[1])
    for name, tensor in drafter_of(trainer.model).state_dict().items():
        assert torch.equal(tensor, saved[best][name]), name
    assert not torch.equal(saved[2]["fc.weight"], saved[4]["fc.weight"])


def test_an_earlier_drafter_is_trained_on(tmp_path):
    model = with_random_drafter(eagle_target())
    model.eagle_drafter.save_pretrained(tmp_path / "first" / "eagle_drafter")
    trainer = eagle_trainer(eagle_target(), tmp_path, eagle_init_from=str(tmp_path / "first"))
    for name, tensor in model.eagle_drafter.state_dict().items():
        assert torch.equal(trainer.model.eagle_drafter.state_dict()[name], tensor), name
    trainer.train()


def test_the_card_does_not_load_a_model(tmp_path):
    trainer = eagle_trainer(eagle_target(), tmp_path)
    trainer.create_model_card()
    card = Path(trainer.args.output_dir, "README.md").read_text()
    assert "pipeline(" not in card and "## Training procedure" in card
    assert trainer.loss_name == "of an EAGLE-3 drafter, divergence from the model, eagle_steps: 3"


# Refused


@pytest.mark.parametrize(
    "options, message",
    [
        ({"eagle_steps": 0}, "eagle_steps is 0; expected 1 or more"),
        ({"eagle_decay": 0.0}, "eagle_decay is 0.0; expected a number above 0 and at most 1"),
        ({"eagle_decay": 1.1}, "eagle_decay is 1.1"),
        ({"eagle_draft_vocab_size": 0}, "eagle_draft_vocab_size is 0; expected 1 or more"),
        ({"eagle_intermediate_size": -1}, "eagle_intermediate_size is -1; expected 1 or more"),
        ({"eagle_init_from": "a", "eagle_layers": [1, 2, 3]}, "its drafter has its own shape, but eagle_layers is set"),
    ],
)
def test_bad_arguments(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        LigerEagleConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


IGNORED = [
    ({"use_liger": False}, {}, "use_liger is false, but the fused LM head computes the loss of a drafter. Remove"),
    (
        {"liger_config": {"fused_linear_cross_entropy": False}},
        {},
        "fused_linear_cross_entropy: false, but the fused LM head computes the loss of a drafter. Remove",
    ),
    (
        {"label_smoothing_factor": 0.1},
        {},
        "label_smoothing_factor is 0.1, but the loss of a drafter has no such option. Remove label_smoothing_factor",
    ),
    ({"loss_type": "dft"}, {}, "loss_type is 'dft'"),
    ({"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha is 5.0, but LigerEagleTrainer freezes the model"),
    ({}, {"compute_loss_func": print}, "compute_loss_func is "),
    ({}, {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}, "peft_config is "),
    ({}, {"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)}, "optimizers has an optimizer that was made"),
    ({"eagle_layers": [1, 2]}, {}, r"eagle_layers is \[1, 2\]; expected three increasing numbers from 0 to 3"),
    ({"eagle_layers": [1, 2, 4]}, {}, r"eagle_layers is \[1, 2, 4\]"),
    ({"eagle_layers": [2, 1, 3]}, {}, r"eagle_layers is \[2, 1, 3\]"),
    ({"eagle_layers": None}, {}, r"is unset, which means \[2, 2, 1\] for a model of 4 layers"),
    ({"eval_predictions": "tokens"}, {}, "eval_predictions is 'tokens', but LigerEagleTrainer"),
]


@pytest.mark.parametrize("options, trainer_options, message", IGNORED, ids=[message[:30] for *_, message in IGNORED])
def test_options_that_would_be_ignored_or_train_wrongly_are_refused(options, trainer_options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        eagle_trainer(eagle_target(), tmp_path, trainer_options=trainer_options, **options)


def test_models_and_drafters_that_do_not_fit(tmp_path):
    with pytest.raises(ValueError, match="LlamaForCausalLM already has a drafter. Pass a model without one"):
        eagle_trainer(with_random_drafter(eagle_target()), tmp_path)
    with_random_drafter(eagle_target()).eagle_drafter.save_pretrained(tmp_path / "first")
    with pytest.raises(ValueError, match="The drafter has vocab_size 131, but the LM head of LlamaForCausalLM has 140"):
        eagle_trainer(eagle_target(vocab_size=140), tmp_path, eagle_init_from=str(tmp_path / "first"))
    with pytest.raises(ValueError, match=r"eagle_layers is \[0, 1, 3\]; expected three increasing numbers from 0 to 1"):
        eagle_trainer(tiny_model("llama"), tmp_path, eagle_init_from=str(tmp_path / "first"))
    with pytest.raises(
        ValueError, match="The LM head of PhiForCausalLM has a bias, but drafters have none. Use a model without"
    ):
        eagle_trainer(eagle_target("phi"), tmp_path)
    adapted = get_peft_model(eagle_target(), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="The model has an adapter, but LigerEagleTrainer freezes the model. Merge it"):
        eagle_trainer(adapted, tmp_path)
    assert any(p.requires_grad for p in adapted.parameters()), "the adapter of the user is not frozen"


SETUPS = [
    ({"distributed_type": DistributedType.FSDP}, "the launch is FSDP, which shards weights"),
    ({"distributed_type": DistributedType.DEEPSPEED}, "the launch is DEEPSPEED"),
    ({"parallelism_config": SimpleNamespace(cp_enabled=True, sp_enabled=False, tp_enabled=False)}, "Set cp_size"),
]


@pytest.mark.parametrize("own, message", SETUPS, ids=["fsdp", "deepspeed", "cp"])
def test_launches_that_would_train_or_save_wrongly(own, message):
    accelerator = SimpleNamespace(**({"distributed_type": DistributedType.NO, "parallelism_config": None} | own))
    with pytest.raises(ValueError, match=message):
        check_setup(accelerator, tiny_model("llama"), None)


def test_a_model_on_several_devices():
    accelerator = SimpleNamespace(distributed_type=DistributedType.NO, parallelism_config=None)
    model = tiny_model("llama")
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(ValueError, match="device_map has spread the model over several devices. Set device_map"):
        check_setup(accelerator, model, None)


def test_rows_that_cannot_be_counted(tmp_path):
    stream = Dataset.from_list(ragged_rows()).to_iterable_dataset()
    args = LigerEagleConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, max_steps=1, eagle_layers=LAYERS, report_to="none"
    )
    with pytest.raises(ValueError, match="train_dataset is a IterableDataset; expected a Dataset"):
        LigerEagleTrainer(eagle_target(), args, train_dataset=stream, processing_class=tiny_tokenizer())


def test_arguments_of_another_class(tmp_path):
    args = LigerSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match="args is a LigerSFTConfig; expected a LigerEagleConfig"):
        LigerEagleTrainer(eagle_target(), args)


def test_rows_with_images(tmp_path):
    trainer = eagle_trainer(eagle_target(), tmp_path)
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.long), "labels": torch.ones(1, 4, dtype=torch.long)}
    with pytest.raises(ValueError, match="The batch has pixel_values, but a drafter is trained on text. Remove rows"):
        trainer.compute_loss(trainer.model, batch | {"pixel_values": torch.zeros(1)})
    with pytest.raises(ValueError, match="The batch has input_ids and no labels"):
        trainer.compute_loss(trainer.model, {"input_ids": batch["input_ids"]})
