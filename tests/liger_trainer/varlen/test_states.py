"""Layers with a state (convolution, linear attention, state space) on real tokens equal stock on single rows."""

import copy
import importlib
import types

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny_models import ragged_rows, tiny_tokenizer
from trainer_parity import logged_values
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer
from varlen_batches import ON, assert_same_with_states, batch, drawn_model, rows_of

from liger_trainer import (
    LigerSFTConfig,
    LigerSFTTrainer,
    LigerTrainer,
    LigerTrainingArguments,
    apply_liger,
    remove_liger,
)
from liger_trainer.varlen import state_layers, unpad_plan
from liger_trainer.varlen.proof.packed_rows import why_rows_mix
from liger_trainer.varlen.rows import RowMask, current_rows
from liger_trainer.verify.observed import KeepGradients

# A gated delta net, the same with experts, short convolutions with and without experts, a layer with both, Mamba 2.
TYPES = ("qwen3_5_text", "qwen3_next", "lfm2", "lfm2_moe")
OTHERS = ("bamba", "falcon_h1", "kimi_linear", "zamba2", "zaya", "minimax", "jamba", "nemotron_h", "lfm3")
ALL = [*TYPES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
LENGTHS = (7, 1, 20, 13)


def patched(model):
    report = apply_liger(model, ON)["varlen_attention"]
    assert any("layers that keep a state on rows side by side" in text for text in report.swapped.values()), report
    return model


def step_of(model, *calls):
    """(loss, gradients) of calls with summed losses."""
    model.zero_grad()
    total = torch.zeros(())
    for call in calls:
        loss = model(**call, use_cache=False).loss
        loss.backward()
        total = total + loss.detach()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(call):
    """The rows of a padded batch as one-row batches, each with its share of the batch's loss."""
    count = (call["labels"][:, 1:] != -100).sum()
    rows = [{name: torch.tensor([ids]) for name, ids in row.items()} for row in rows_of(call)]
    return [row | {"num_items_in_batch": count} for row in rows if (row["labels"][:, 1:] != -100).any()]


def packed(call, **options):
    return dict(DataCollatorWithFlattening(**options)(rows_of(call)))


@pytest.fixture
def planned(monkeypatch):
    """The plans that backbones used."""
    found, own = [], unpad_plan.UnpadPlan.unpad
    monkeypatch.setattr(unpad_plan.UnpadPlan, "unpad", lambda self, *given: found.append(self) or own(self, *given))
    return found


@pytest.mark.parametrize("name", ALL)
def test_rows_together_are_rows_alone(name, planned):
    model = drawn_model(name)
    right, left = batch(LENGTHS), batch(LENGTHS, "left")
    want, wanted_of_left = step_of(model, *alone(right)), step_of(model, *alone(left))
    patched(model)
    told = packed(right, return_flash_attn_kwargs=True, return_seq_idx=True)  # stock raises, or mixes rows
    for call, wanted in ((right, want), (left, wanted_of_left), (packed(right), want), (told, want)):
        planned.clear()
        got = step_of(model, call)
        assert [plan.rows.tokens for plan in planned] == [sum(LENGTHS)]
        assert_same_with_states(got, wanted)


@pytest.mark.parametrize("name", TYPES)
def test_rows_of_one_token(name):
    """Alone, such a row has nothing to predict. Next to others it must not change them."""
    model = drawn_model(name)
    right, left = batch((1, 9, 1), width=9), batch((1, 9, 1), "left", width=9)
    want, wanted_of_left = step_of(model, *alone(right)), step_of(model, *alone(left))
    patched(model)
    for given, wanted in ((right, want), (left, wanted_of_left), (packed(right), want)):
        assert_same_with_states(step_of(model, given), wanted)
    ones = batch((1, 1, 1), width=4, prompt=0)
    shifted = {"shift_labels": ones["input_ids"].masked_fill(ones["attention_mask"] == 0, -100)}
    given = {name: ones[name] for name in ("input_ids", "attention_mask")} | {"labels": ones["labels"]} | shifted
    loss, grads = step_of(model, given)
    remove_liger(model)
    wanted, wanted_grads = step_of(model, given)
    attended = {name for name, grad in wanted_grads.items() if grad.norm() > 1e-6}  # a token alone is all it sees
    assert len(attended) > 5
    assert_same_with_states(
        (loss, {name: grads[name] for name in attended}), (wanted, {n: wanted_grads[n] for n in attended})
    )


@pytest.mark.parametrize("name", TYPES)
def test_rows_of_one_length_and_full_rows(name, planned):
    model = drawn_model(name)
    full = batch((9, 9), width=9)
    full["attention_mask"] = torch.ones_like(full["input_ids"])
    padded = batch((9, 9), width=12)
    want = [step_of(model, *alone(call)) for call in (full, padded)]
    patched(model)
    planned.clear()
    for call, wanted in zip((full, padded), want, strict=True):
        assert_same_with_states(step_of(model, call), wanted)
        assert_same_with_states(step_of(model, packed(call)), wanted)
    assert len(planned) == 4


@pytest.mark.diagonal
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_checkpointing(name, reentrant):
    model = drawn_model(name)
    right, left = batch(LENGTHS), batch(LENGTHS, "left")
    want, wanted_of_left = step_of(model, *alone(right)), step_of(model, *alone(left))
    patched(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for given, wanted in ((right, want), (left, wanted_of_left), (packed(right), want)):
        assert_same_with_states(step_of(model, given), wanted)


@pytest.mark.diagonal
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_lora_on_the_projections(name, checkpointing):
    torch.manual_seed(0)
    base = drawn_model(name)
    projections = {n.split(".")[-1] for n, _ in base.named_modules() if n.split(".")[-1].startswith("in_proj")}
    config = LoraConfig(r=4, lora_alpha=8, target_modules=[*projections, "out_proj"], init_lora_weights=False)
    model = get_peft_model(base, config).train()
    call = batch(LENGTHS)
    want = step_of(model, *alone(call))
    patched(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for given in (call, packed(call)):
        assert_same_with_states(step_of(model, given), want)


def test_a_copy_and_a_model_without_ours():
    model = drawn_model("lfm2")
    call = batch(LENGTHS)
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    want = step_of(model, *alone(call))
    patched(model)
    twin = copy.deepcopy(model)
    remove_liger(model)
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before
    assert_same_with_states(step_of(twin, packed(call)), want)


def test_context_that_is_gone_in_a_recomputation_is_seen_by_the_proof(monkeypatch):
    """A layer that takes its rows from the context of the call, not from its mask, is right without checkpointing."""

    def forward_of(layer_class):
        own = layer_class.forward

        def forward(self, *args, attention_mask=None, **kwargs):
            rows = current_rows()
            if rows is None:
                return own(self, *args, **kwargs)
            return state_layers._on_rows(self, {"attention_mask": RowMask(rows), **kwargs}, ["attention_mask"])

        return forward

    monkeypatch.setattr(state_layers, "forward_of", forward_of)
    monkeypatch.setattr(state_layers, "mask_or_rows", lambda create: lambda *args, **kwargs: None)
    report = apply_liger(drawn_model("lfm2"), ON)["varlen_attention"]
    assert not report.swapped
    assert "recomputed in the backward pass" in str(report.unsuited) or "CheckpointError" in str(report.unsuited)


def test_a_layer_that_lets_rows_mix_is_seen_by_the_proof(monkeypatch):
    monkeypatch.setattr(
        state_layers, "_on_rows", lambda layer, call, masks: type(layer).forward(layer, **call | {masks[0]: None})
    )
    report = apply_liger(drawn_model("lfm2"), ON)["varlen_attention"]
    assert not report.swapped
    assert "what is computed for real tokens differs" in str(report.unsuited)


def test_packed_rows_never_run_in_the_models_own_code():
    """They would silently mix there, as in stock. So that is an error, and padded rows run as they are."""
    model = patched(drawn_model("qwen3_5_text"))
    call = batch(LENGTHS)
    want = step_of(model, call)
    hook = model.model.layers[0].register_forward_hook(lambda module, given, output: None)
    assert_same_with_states(step_of(model, call), want)
    with pytest.raises(ValueError, match="Packed rows would see each other.*a forward hook"):
        step_of(model, packed(call))
    hook.remove()
    step_of(model, packed(call))
    with pytest.raises(
        ValueError, match="Packed rows would see each other.*its rows are not known; use_cache has to be False"
    ):
        model(**packed(call), use_cache=True)


def test_a_global_of_the_decoder_that_has_changed(monkeypatch):
    """The decoder runs with its own globals. If the module's globals have changed, the module's own code runs."""
    model = patched(drawn_model("lfm2"))
    call = batch(LENGTHS)
    want = step_of(model, call)
    scope = importlib.import_module(type(model).__module__)
    own = scope.create_causal_mask
    monkeypatch.setattr(scope, "create_causal_mask", lambda *args, **kwargs: own(*args, **kwargs))
    with pytest.raises(ValueError, match="Packed rows would see each other.*create_causal_mask.*has changed"):
        step_of(model, packed(call))
    assert_same_with_states(step_of(model, call), want)


def test_rows_may_be_packed_once_they_are_told():
    model = drawn_model("qwen3_5_text")
    assert "packed rows see each other" in why_rows_mix(model)
    patched(model)
    assert why_rows_mix(model) is None
    assert why_rows_mix(model, DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)) is None


def trained(trainer_class, args_class, model, rows, folder, *, size=8, collator=None, **options):
    """(gradients of each step, losses) of a training of one epoch with SGD."""
    args = args_class(
        output_dir=str(folder / trainer_class.__name__),
        per_device_train_batch_size=size,
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        optim="sgd",
        learning_rate=0.1,
        max_grad_norm=0.0,
        bf16=False,
        **options,
    )
    given = {"data_collator": collator} if collator is not None else {"processing_class": tiny_tokenizer()}
    kept = KeepGradients()
    trainer = trainer_class(
        model=copy.deepcopy(model), args=args, train_dataset=Dataset.from_list(rows), callbacks=[kept], **given
    )
    trainer.train()
    return kept.steps, logged_values(trainer, "loss")


def assert_same_training(got, want):
    (steps, losses), (wanted_steps, wanted_losses) = got, want
    assert len(steps) == len(wanted_steps) > 0
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted_losses), rtol=1e-5, atol=0)
    for one, two in zip(steps, wanted_steps, strict=True):
        assert set(one) == set(two)
        assert_same_with_states((torch.ones(()), one), (torch.ones(()), two))


@pytest.mark.diagonal
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_trainer_with_flattened_rows(name, checkpointing, tmp_path):
    """`LigerTrainer` with `DataCollatorWithFlattening` equals `Trainer` with one row per micro-batch."""
    model, rows = drawn_model(name), rows_of(batch((7, 2, 20, 13, 5, 9, 3, 11)))
    flatten = DataCollatorWithFlattening()
    want = trained(
        Trainer,
        TrainingArguments,
        model,
        rows,
        tmp_path,
        size=1,
        collator=flatten,
        gradient_accumulation_steps=4,
        train_sampling_strategy="sequential",
    )
    got = trained(
        LigerTrainer,
        LigerTrainingArguments,
        model,
        rows,
        tmp_path,
        size=4,
        collator=flatten,
        use_liger=True,
        gradient_checkpointing=checkpointing,
        train_sampling_strategy="sequential",
    )
    assert_same_training(got, want)


@pytest.mark.parametrize("name", TYPES)
def test_sft_packing(name, tmp_path):
    """A step has all rows: packed in ours, padded in TRL's."""
    model, rows = drawn_model(name), ragged_rows()
    want = trained(SFTTrainer, SFTConfig, model, rows, tmp_path, size=len(rows), max_length=64)
    got = trained(
        LigerSFTTrainer,
        LigerSFTConfig,
        model,
        rows,
        tmp_path,
        size=len(rows),
        max_length=64,
        packing=True,
        gradient_checkpointing=True,
    )
    assert_same_training(got, want)


def test_a_model_that_cannot_be_told_keeps_its_padding(monkeypatch):
    """A decoder that makes no mask for its state layers, as before transformers 5.24, runs as before."""
    monkeypatch.setattr(state_layers, "MASK_OF_STATES", "create_no_such_mask")
    model = drawn_model("qwen3_5_text")
    report = apply_liger(model, ON)["varlen_attention"]
    assert "makes no mask for its layers that keep a state" in str(report.unsuited)
    assert "packed rows see each other" in why_rows_mix(model)
    call = batch(LENGTHS)
    got = step_of(model, call)
    remove_liger(model)
    assert_same_with_states(got, step_of(model, call))


def test_the_forward_of_a_layer_that_was_replaced():
    model = drawn_model("lfm2")
    layer = model.model.layers[0].conv
    layer.forward = types.MethodType(lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs), layer)
    report = apply_liger(model, ON)["varlen_attention"]
    assert "keeps a state, and its forward was replaced" in str(report.unsuited)
