"""A custom loss by overriding `token_loss`: the same on both trainers, independent of splits, and without logits."""

import copy
from types import SimpleNamespace

import pytest
import torch
from tiny_models import LargestTensor, collate, masked_lm, ragged_rows, tiny_model
from trainer_parity import SPLITS, Plain, assert_same_numbers, run
from transformers import AutoConfig, AutoModelForSeq2SeqLM, Trainer
from trl import SFTTrainer

from liger_trainer import LigerSFTTrainer, LigerTrainer, LigerTrainingArguments
from liger_trainer.trainers import init_checks


class Focal:
    def token_loss(self, outputs, inputs):
        return -((1 - outputs.log_probs.exp()) ** 2) * outputs.log_probs


class FocalTrainer(Focal, LigerTrainer):
    pass


class FocalSFTTrainer(Focal, LigerSFTTrainer):
    pass


class ConfidencePenalty(LigerSFTTrainer):
    """Pereyra et al. 2017, with a penalty on the hidden states so that every differentiable output is used."""

    token_outputs = ("entropy", "hidden_states")

    def token_loss(self, outputs, inputs):
        norm = outputs.hidden_states.float().square().mean(-1) * outputs.label_mask
        return -outputs.log_probs - 0.1 * outputs.entropy + 0.01 * norm


def stock_loss(term):
    """`compute_loss_func` on real logits: the stock way to the same loss."""

    def loss(outputs, labels, num_items_in_batch):
        log_p = torch.log_softmax(outputs.logits[:, :-1].float(), -1)
        mask = labels[:, 1:] != -100
        log_probs = log_p.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        return (term(log_p, log_probs, outputs) * mask).sum() / num_items_in_batch

    return loss


def focal(log_p, log_probs, outputs):
    return -((1 - log_probs.exp()) ** 2) * log_probs


def penalty(log_p, log_probs, outputs):
    norm = outputs.hidden_states[-1][:, :-1].float().square().mean(-1)
    return -log_probs + 0.1 * (log_p.exp() * log_p).sum(-1) + 0.01 * norm


@pytest.mark.parametrize("split", SPLITS[1:], ids=str)
def test_focal_loss_on_both_trainers(split, tmp_path):
    model = tiny_model("llama")
    options = {"trainer_options": {"compute_loss_func": stock_loss(focal)}}
    want, _ = run(LigerSFTTrainer, model, tmp_path, split, **options)
    got, _ = run(FocalSFTTrainer, model, tmp_path, split)
    assert_same_numbers(got, want)
    args = LigerTrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=split[0],
        gradient_accumulation_steps=split[1],
        num_train_epochs=1,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
    )
    trainer = FocalTrainer(model=copy.deepcopy(model), args=args, train_dataset=ragged_rows(), data_collator=collate)
    trainer.train()
    hf = torch.tensor([[log["loss"], log["grad_norm"]] for log in trainer.state.log_history if "loss" in log]).double()
    assert_same_numbers(hf, want[:, :2])
    assert trainer.evaluate(ragged_rows())["eval_loss"] > 0


def test_entropy_and_hidden_states(tmp_path):
    model = tiny_model("gemma2")
    model.config.output_hidden_states = True  # for the stock side
    stock = {"trainer_options": {"compute_loss_func": stock_loss(penalty)}}
    want, _ = run(LigerSFTTrainer, model, tmp_path, **stock)
    got, _ = run(ConfidencePenalty, model, tmp_path)
    assert_same_numbers(got, want)


def test_no_logits_for_an_own_loss(tmp_path):
    _, trainer = run(ConfidencePenalty, tiny_model("llama", vocab_size=4096), tmp_path, train=False)
    batch = collate(ragged_rows(8))
    with LargestTensor() as largest:
        trainer.compute_loss(trainer.model.train(), dict(batch)).backward()
    assert largest.numel < batch["input_ids"].numel() * 4096


@pytest.mark.parametrize(
    "options, message",
    [
        ({"use_liger": False}, "overrides token_loss, which needs use_liger=True"),
        ({"liger_config": {"fused_linear_cross_entropy": False}}, "needs the fused LM head, but liger_config has"),
    ],
)
def test_an_own_loss_that_would_be_ignored_is_refused(options, message, tmp_path):
    args = LigerTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)
    with pytest.raises(ValueError, match=message):
        FocalTrainer(model=tiny_model("llama"), args=args, train_dataset=ragged_rows(), data_collator=collate)


@pytest.mark.parametrize(
    "options, name",
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"loss_type": "dft"}, "loss_type"),
        ({"trainer_options": {"compute_loss_func": stock_loss(focal)}}, "compute_loss_func"),
    ],
)
def test_a_second_custom_loss_is_refused(options, name, tmp_path):
    with pytest.raises(ValueError, match=f"overrides token_loss, but {name} is .*only one of them can"):
        run(FocalSFTTrainer, tiny_model("llama"), tmp_path, train=False, **options)


class WrongShape:
    shape = "mean"

    def token_loss(self, outputs, inputs):
        loss = -outputs.log_probs
        return {"mean": loss.mean(), "slice": loss[:, 1:], "column": loss[:, :1], "float": 1.0}[self.shape]


@pytest.mark.parametrize("trainer_class", [LigerTrainer, LigerSFTTrainer])
@pytest.mark.parametrize(
    "shape, came", [("mean", r"\(\)"), ("slice", r"\(8, 18\)"), ("column", r"\(8, 1\)"), ("float", "float 1.0")]
)
def test_a_loss_of_another_shape_is_refused(trainer_class, shape, came, tmp_path):
    wrong = type("Wrong", (WrongShape, trainer_class), {"shape": shape})
    with pytest.raises(ValueError, match=rf"token_loss returned .*{came}; expected one loss per label, \(8, 19\)"):
        run(wrong, tiny_model("llama"), tmp_path)


@pytest.mark.parametrize("trainer_class", [LigerTrainer, LigerSFTTrainer])
def test_what_a_token_loss_says_of_places_without_label_does_not_count(trainer_class, tmp_path):
    class Everywhere(trainer_class):
        def token_loss(self, outputs, inputs):
            return 7 - outputs.log_probs.masked_fill(~outputs.label_mask, torch.nan)

    class WhereLabelsAre(trainer_class):
        def token_loss(self, outputs, inputs):
            return (7 - outputs.log_probs) * outputs.label_mask

    want, _ = run(WhereLabelsAre, tiny_model("llama"), tmp_path)
    got, _ = run(Everywhere, tiny_model("llama"), tmp_path)
    assert torch.isfinite(want).all()
    assert_same_numbers(got, want)


@pytest.mark.parametrize("trainer_class", [LigerTrainer, LigerSFTTrainer])
@pytest.mark.parametrize(
    "names, message",
    [
        (("entropi",), "token_outputs has the unknown name 'entropi'; expected names of: .*entropy"),
        (("is_top1", "hidden_state"), "unknown name 'hidden_state'; expected names of: .*hidden_states"),
        ("entropy", "token_outputs has the unknown name 'e'; expected names of: .*entropy"),
    ],
)
def test_unknown_token_outputs_are_refused_at_construction(trainer_class, names, message, tmp_path):
    wrong = type("Wrong", (Focal, trainer_class), {"token_outputs": names})
    with pytest.raises(ValueError, match=message):
        run(wrong, tiny_model("llama"), tmp_path)


EXPERTS = {"router_aux_loss_coef": 0.1, "output_router_logits": True}


@pytest.mark.diagonal
@pytest.mark.parametrize("ours, stock", [(LigerTrainer, Trainer), (LigerSFTTrainer, SFTTrainer)])
@pytest.mark.parametrize("model_type, split", [("qwen3_moe", (4, 2)), ("gpt_oss", (8, 1))], ids=str)
def test_the_router_s_loss_is_added_to_an_own_loss(ours, stock, split, model_type, tmp_path):
    model = tiny_model(model_type, **EXPERTS)
    want, _ = run(stock, model, tmp_path, split)
    got, _ = run(type("Own", (Plain, ours), {}), model, tmp_path, split)
    assert_same_numbers(got, want)
    without, _ = run(stock, tiny_model(model_type, **{**EXPERTS, "router_aux_loss_coef": 0.0}), tmp_path, split)
    assert ((want - without)[:, 0] > 0.05).all(), "the router's loss is too small to be missed"


def test_sequence_parallelism_is_refused():
    """transformers takes the stock loss of each part there, without a word."""
    split = SimpleNamespace(sp_enabled=True, sp_size=2)
    trainer = SimpleNamespace(
        token_outputs=(),
        unfused_reason=lambda model: None,
        model=None,
        accelerator=SimpleNamespace(parallelism_config=split),
    )
    with pytest.raises(ValueError, match="overrides token_loss, but with sp_size 2 transformers computes the stock"):
        init_checks.refuse_unfit_for_own_loss(trainer)


def encoder_decoder():
    options = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("bart", vocab_size=131, **options, **heads))


@pytest.mark.parametrize(
    "trainer_class, make, reason",
    [
        (LigerTrainer, masked_lm, "BertForMaskedLM is a masked language model"),
        (LigerTrainer, encoder_decoder, "BartForConditionalGeneration is an encoder-decoder model"),
        (LigerSFTTrainer, encoder_decoder, "BartForConditionalGeneration is an encoder-decoder model"),
    ],
)
def test_models_with_other_labels_than_the_next_tokens_are_refused(trainer_class, make, reason, tmp_path):
    with pytest.raises(ValueError, match=f"overrides token_loss, .*but .*{reason}.*compute_loss"):
        run(type("Own", (Plain, trainer_class), {}), make(), tmp_path)
    with pytest.raises(ValueError, match=f"eval_predictions is 'tokens', but .*{reason}.*'logits'"):
        run(trainer_class, make(), tmp_path, eval_predictions="tokens")
