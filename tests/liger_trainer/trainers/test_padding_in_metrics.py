"""`padding_in_metrics=False`: ORPO and CPO leave padding out, and average logits over answers."""

import pytest
import torch
from tiny_models import tiny_model
from trainer_parity import assert_same_step, batch_of, build_pairs, step, with_lora
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from liger_trainer import LigerCPOConfig, LigerCPOTrainer, LigerORPOConfig, LigerORPOTrainer
from liger_trainer.varlen import host_copies, plan_batch

CLASSES = {
    "cpo": (LigerCPOTrainer, LigerCPOConfig, CPOTrainer, CPOConfig),
    "orpo": (LigerORPOTrainer, LigerORPOConfig, ORPOTrainer, ORPOConfig),
}
MEANS = ("logits/chosen", "logits/rejected")


def by_lengths():
    """A model that leaves padding out."""
    model = tiny_model("llama")
    model.set_attn_implementation("sdpa")
    return model


def mean_of_answers(model, batch, answer):
    """The mean of all logits that predict a token of an answer."""
    with torch.no_grad():
        logits = model(batch[f"{answer}_input_ids"], attention_mask=batch[f"{answer}_attention_mask"]).logits
    return logits[:, :-1][batch[f"{answer}_labels"][:, 1:] != -100].mean().item()


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("adapted", [[], ["q_proj", "lm_head"]], ids=["full", "lora"])
def test_all_else_is_the_same_and_padding_is_left_out(kind, adapted, tmp_path):
    ours_class, ours_args, stock_class, stock_args = CLASSES[kind]
    model = with_lora(by_lengths(), adapted) if adapted else by_lengths()
    ours = build_pairs(ours_class, ours_args, model, tmp_path, padding_in_metrics=False)
    stock = build_pairs(stock_class, stock_args, model, tmp_path)
    batch = batch_of(stock)
    assert (batch["chosen_attention_mask"] == 0).any()
    (got, got_grads), (want, want_grads) = step(ours, batch), step(stock, batch)
    means = {f"logits/{answer}": mean_of_answers(stock.model, batch, answer) for answer in ("chosen", "rejected")}
    assert all(abs(want[name] - means[name]) > 1e-6 for name in MEANS), "stock averages padding and prompts too"
    assert_same_step((got, got_grads), (want | means, want_grads))
    assert "varlen_attention 1/1" in ours.liger_report.one_line()


@pytest.mark.parametrize("kind", CLASSES)
def test_padding_is_computed_where_it_is_averaged(kind, tmp_path):
    ours_class, ours_args, *_ = CLASSES[kind]
    ours = build_pairs(ours_class, ours_args, by_lengths(), tmp_path)
    step(ours)
    assert "the call asks for vocab_mean" in ours.liger_report.one_line()


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("averages_padding", [True, False])
def test_the_host_knows_the_rows_of_a_call(kind, averages_padding, tmp_path, monkeypatch):
    """So that finding them does not wait for the device: what was remembered of a call is what it has."""
    ours_class, ours_args, *_ = CLASSES[kind]
    ours = build_pairs(ours_class, ours_args, by_lengths(), tmp_path, padding_in_metrics=averages_padding)
    batch = batch_of(ours)
    stock = plan_batch.values_of
    known = []

    def values(*tensors):
        for x in tensors:
            copy = host_copies._known(x)
            known.append(copy is not None and torch.equal(copy, x))
        return stock(*tensors)

    def labels_are_known(module, args, kwargs):
        copy = host_copies._known(kwargs["labels"])
        known.append(copy is not None and torch.equal(copy, kwargs["labels"]))

    step(ours, dict(batch))  # a proof makes its batches on the host
    for x in batch.values():
        if isinstance(x, torch.Tensor):
            host_copies.remember(x, x.clone())
    monkeypatch.setattr(plan_batch, "values_of", values)
    ours.model.register_forward_pre_hook(labels_are_known, with_kwargs=True)
    step(ours, dict(batch))
    assert len(known) > 1 and all(known)


@pytest.mark.parametrize("kind", CLASSES)
def test_batches_that_are_moved_remember_both_answers(kind, tmp_path):
    ours_class, ours_args, *_ = CLASSES[kind]
    ours = build_pairs(ours_class, ours_args, by_lengths(), tmp_path)
    rows = [ours.train_dataset[k] for k in range(4)]
    batch = host_copies.remembering(ours.data_collator)(rows)
    moved = batch.to("meta")
    for answer in ("chosen", "rejected"):
        for part in ("input_ids", "attention_mask", "labels"):
            name = f"{answer}_{part}"
            assert torch.equal(host_copies.values_of(moved[name])[0], batch[name])


def test_a_value_that_is_no_truth_is_refused(tmp_path):
    with pytest.raises(ValueError, match="padding_in_metrics is 'no'; expected true or false"):
        LigerCPOConfig(output_dir=str(tmp_path), padding_in_metrics="no", use_cpu=True, bf16=False)
