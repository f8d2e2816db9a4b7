"""`eval_predictions="tokens"`: `compute_metrics` gets from one forward what it would have found in the logits."""

import functools
import importlib

import numpy as np
import pytest
import torch
from tiny_models import LargestTensor, collate, kto_rows, ragged_pairs, ragged_rows, tiny_model
from trainer_parity import build, build_dpo, run

from liger_trainer import (
    LigerDPOTrainer,
    LigerKTOConfig,
    LigerKTOTrainer,
    LigerSFTTrainer,
    LigerTrainer,
    LigerTrainingArguments,
)
from liger_triton import token_ranks


def build_hf(model, tmp_path, metrics=None, trainer_class=LigerTrainer, **options):
    options = {"eval_predictions": "tokens", "per_device_eval_batch_size": 3} | options
    given = {"compute_loss_func": options.pop("compute_loss_func", None)}
    args = LigerTrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
        **options,
    )
    return trainer_class(
        model=model, args=args, data_collator=collate, eval_dataset=ragged_rows(7), compute_metrics=metrics, **given
    )


def trainer_of(kind, model, tmp_path, metrics, **options):
    if kind == "hf":
        return build_hf(model, tmp_path, metrics, **options)
    given = {"compute_metrics": metrics}
    options = {"per_device_eval_batch_size": 3} | options
    if kind == "sft":
        return run(LigerSFTTrainer, model, tmp_path, train=False, trainer_options=given, **options)[1]
    given["ref_model"] = tiny_model("llama", vocab_size=model.config.vocab_size, seed=7)
    if kind == "kto":
        del given["compute_metrics"]  # its list would be copied
        rows = [row | {"completion": row["completion"] + " w5" * 20} for row in kto_rows(7)]
        trainer = build(LigerKTOTrainer, LigerKTOConfig, model, tmp_path, rows, trainer_options=given, **options)
        trainer.eval_dataset, trainer.compute_metrics = trainer.train_dataset, metrics
        return trainer
    trainer = build_dpo(LigerDPOTrainer, model, tmp_path, rows=ragged_pairs(7), trainer_options=given, **options)
    trainer.eval_dataset = trainer.train_dataset
    return trainer


def keep(found, prediction):
    found.append(prediction)
    return {"m": 1.0}


class Calls(list):
    """Has one entry for each forward of the decoder of `model`."""

    def __init__(self, model):
        model.model.register_forward_pre_hook(lambda *_: self.append(1))


@pytest.mark.parametrize(
    "kind, smoothing", [("hf", 0.0), ("hf", 0.1), ("sft", 0.0), ("sft", 0.1), ("dpo", 0.0), ("kto", 0.0)]
)
def test_the_same_as_from_logits_without_them_and_in_one_forward(kind, smoothing, tmp_path):
    seen = {}
    for mode in ("logits", "tokens"):
        found, model = [], tiny_model("llama")
        options = {"eval_predictions": mode} | ({"label_smoothing_factor": smoothing} if smoothing else {})
        trainer = trainer_of(kind, model, tmp_path, functools.partial(keep, found), **options)
        calls = Calls(trainer.model)
        result = trainer.evaluate()
        assert result["eval_m"] == 1.0
        seen[mode] = found[0], result["eval_loss"], len(calls)
    (logits, loss, _), (tokens, same_loss, forwards) = seen["logits"], seen["tokens"]
    assert same_loss == pytest.approx(loss, rel=1e-5)
    # One for each batch; KTO has another for its KL estimate.
    assert forwards == -(-len(trainer.eval_dataset) // 3) * (2 if kind == "kto" else 1)
    labels = torch.as_tensor(tokens.label_ids)
    if kind in ("hf", "sft"):  # in the other stock trainers, the label_ids are the input ids
        assert torch.equal(labels, torch.as_tensor(logits.label_ids)[:, 1:])
    whole = torch.as_tensor(logits.predictions[0] if isinstance(logits.predictions, tuple) else logits.predictions)
    want = token_ranks(whole[:, :-1], labels)
    got = {name: torch.as_tensor(value) for name, value in tokens.predictions.items()}
    assert got.keys() == {"token_ids", "log_probs", "ranks"}
    assert torch.equal(got["token_ids"], want.argmax)
    assert torch.equal(got["ranks"], want.rank)
    torch.testing.assert_close(got["log_probs"], want.log_probs, rtol=1e-5, atol=1e-6)
    assert (labels != -100).sum() > 30 and all((value[labels == -100] == -100).all() for value in got.values())


@pytest.mark.parametrize("kind", ["hf", "sft", "dpo"])
def test_a_hook_that_sees_the_outputs(kind, tmp_path):
    """The model returns logits to it, and the same predictions to the metrics."""
    predicted = []
    for has_hook in (False, True):
        found = []
        options = {"eval_predictions": "tokens"}
        trainer = trainer_of(kind, tiny_model("llama"), tmp_path, functools.partial(keep, found), **options)
        if has_hook:
            trainer.model.register_forward_hook(lambda module, args, outputs: None)
        trainer.evaluate()
        predicted.append(found[0].predictions)
    want, got = predicted
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", ["hf", "sft", "dpo", "kto"])
def test_no_logits(kind, tmp_path, monkeypatch):
    vocab = 4096
    for module, name in (("_chunks", "_CPU_CHUNK_BYTES"), ("token_ranks", "_CHUNK_BYTES")):
        monkeypatch.setattr(importlib.import_module(f"liger_triton.{module}"), name, 8 * 4 * vocab)
    model, options = (
        tiny_model("llama", vocab_size=vocab),
        {"eval_predictions": "tokens", "per_device_eval_batch_size": 7},
    )
    if kind == "dpo":
        given = {"ref_model": tiny_model("llama", vocab_size=vocab)}
        trainer = build_dpo(LigerDPOTrainer, model, tmp_path, trainer_options=given, **options)
    else:
        trainer = trainer_of(kind, model, tmp_path, None, **options)
    loader = trainer.get_train_dataloader() if kind == "dpo" else trainer.get_eval_dataloader()
    batch = next(iter(loader))
    with LargestTensor() as largest:
        _, predictions, labels = trainer.prediction_step(trainer.model.eval(), batch, prediction_loss_only=False)
    assert set(predictions) == {"token_ids", "log_probs", "ranks"}
    assert largest.numel < int((labels != -100).sum()) * vocab / 2


def test_a_head_that_cannot_be_fused_and_an_adapter_on_it(tmp_path):
    """DoRA uses real logits. LoRA uses the fused head."""
    from peft import LoraConfig, get_peft_model

    for use_dora in (True, False):
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False, use_dora=use_dora)
        model = get_peft_model(tiny_model("gemma2"), config)
        found = []
        trainer = trainer_of("hf", model, tmp_path, functools.partial(keep, found))
        trainer.evaluate()
        batch = collate(ragged_rows(7))
        with torch.no_grad():
            logits = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        want = token_ranks(logits[:, :-1], batch["labels"][:, 1:])
        assert torch.equal(torch.as_tensor(found[0].predictions["token_ids"]), want.argmax)
        assert torch.equal(torch.as_tensor(found[0].predictions["ranks"]), want.rank)


def test_an_own_loss_and_tokens(tmp_path):
    """`token_loss` decides the loss. The metrics still get the model's own probabilities."""

    class Focal(LigerTrainer):
        def token_loss(self, outputs, inputs):
            return -((1 - outputs.log_probs.exp()) ** 2) * outputs.log_probs

    found = []
    metrics = functools.partial(keep, found)
    own = build_hf(tiny_model("llama"), tmp_path, metrics, Focal).evaluate()["eval_loss"]
    plain = build_hf(tiny_model("llama"), tmp_path, metrics).evaluate()["eval_loss"]
    assert own < plain
    for name, value in found[0].predictions.items():
        torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(found[1].predictions[name]))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"eval_predictions": "ranks"}, "eval_predictions is 'ranks'; expected 'logits' or 'tokens'"),
        ({"use_liger": False}, "eval_predictions is 'tokens', but the fused LM head.*Set eval_predictions to 'logits'"),
        (
            {"liger_config": {"fused_linear_cross_entropy": False}},
            "but the fused LM head that finds them is switched off",
        ),
        ({"compute_loss_func": lambda *a, **k: 0}, "compute_loss_func is set, which needs the logits"),
    ],
    ids=["unknown", "without_liger", "without_the_fused_head", "compute_loss_func"],
)
def test_what_has_no_tokens_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        build_hf(tiny_model("llama"), tmp_path, **options)
