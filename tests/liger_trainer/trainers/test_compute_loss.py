"""A user's loss reads logits, which training does not build: the message, when it comes, and the ways out."""

import logging
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tiny_models import ragged_rows, tiny_model
from trainer_parity import assert_same_numbers, logged_values, run, with_lora
from transformers import Trainer
from trl import SFTTrainer

from liger_trainer import LigerSFTTrainer, LigerTrainer

BOTH = pytest.mark.parametrize("ours", [LigerTrainer, LigerSFTTrainer])


def focal(logits, labels, num_items_in_batch):
    log_probs = -F.cross_entropy(logits[:, :-1].float().transpose(1, 2), labels[:, 1:], reduction="none")
    mask = labels[:, 1:] != -100
    return -(((1 - log_probs.exp()) ** 2) * log_probs * mask).sum() / num_items_in_batch


def unpacked(outputs):
    _, logits = outputs[:2]
    return logits


class FromLogits:
    """The usual override: a loss from the outputs' logits."""

    how, call = "attribute", {}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, **self.call)
        logits = {
            "attribute": lambda: outputs.logits[:, :],
            "method": lambda: outputs.logits.float(),
            "key": lambda: outputs["logits"],
            "function": lambda: F.log_softmax(outputs.logits, -1) and None,
            "unpacked": lambda: unpacked(outputs),
        }[self.how]()
        count = (inputs["labels"][:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        loss = focal(logits, inputs["labels"], count)
        return (loss, outputs) if return_outputs else loss


def mixed(trainer_class, **own):
    return type("FromLogitsTrainer", (FromLogits, trainer_class), own)


@pytest.mark.parametrize("how", ["attribute", "method", "key", "function", "unpacked"])
@BOTH
def test_the_error_names_the_ways_out(ours, how, tmp_path):
    with pytest.raises((TypeError, AttributeError, KeyError, ValueError)) as error:
        run(mixed(ours, how=how), tiny_model("llama"), tmp_path)
    note = "\n".join(getattr(error.value, "__notes__", ["no note"]))
    for way in ("token_loss", "skip_logits=False", '"fused_linear_cross_entropy": false'):
        assert way in note, note


@BOTH
def test_it_is_warned_about_at_construction(ours, tmp_path, caplog):
    with caplog.at_level("INFO", "liger_trainer"):
        run(LigerSFTTrainer, tiny_model("llama"), tmp_path, train=False)
    assert "compute_loss" not in caplog.text
    caplog.clear()
    with caplog.at_level("INFO", "liger_trainer"), pytest.raises(AttributeError):
        run(mixed(ours, how="method"), tiny_model("llama"), tmp_path)
    said = [record.message for record in caplog.records if "compute_loss" in record.message]
    assert len(said) == 1 and "FromLogitsTrainer overrides compute_loss" in said[0] and "skip_logits=False" in said[0]


def test_both_ways_out_train_and_evaluate_as_stock(tmp_path):
    split = (4, 2)
    evaluation = {"eval_rows": ragged_rows(8), "eval_strategy": "steps", "eval_steps": 1}
    want, stock = run(mixed(Trainer), tiny_model("llama"), tmp_path, split, **evaluation)
    called = {"call": {"skip_logits": False}}
    got, called = run(mixed(LigerTrainer, **called), tiny_model("llama"), tmp_path, split, **evaluation)
    off = {"liger_config": {"fused_linear_cross_entropy": False}}
    unfused, switched = run(mixed(LigerTrainer), tiny_model("llama"), tmp_path, split, **evaluation, **off)
    assert called.uses_fused_head and not switched.uses_fused_head
    assert_same_numbers(got, want)
    assert_same_numbers(unfused, want)
    trainers = (stock, called, switched)
    evaluated = [logged_values(t, "eval_loss") for t in trainers]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-5) and len(evaluated[0]) == 2
    assert evaluated[2] == pytest.approx(evaluated[0], rel=1e-5)


def test_an_override_is_evaluated_on_real_logits_without_a_warning(tmp_path):
    """An evaluation of the loss alone skips logits only if the loss is ours."""
    results = []
    for trainer_class in (Trainer, LigerTrainer):
        call = {} if trainer_class is Trainer else {"skip_logits": False}
        _, trainer = run(mixed(trainer_class, call=call), tiny_model("llama"), tmp_path)
        trainer.call = {}  # no message is needed in evaluation
        results.append(trainer.evaluate(ragged_rows(8))["eval_loss"])
    assert results[1] == pytest.approx(results[0], rel=1e-5)


@BOTH
def test_other_errors_are_left_alone(ours, tmp_path):
    class Broken(ours):
        def compute_loss(self, *args, **kwargs):
            raise TypeError("something else")

    with pytest.raises(TypeError, match="something else") as error:
        run(Broken, tiny_model("llama"), tmp_path)
    assert not getattr(error.value, "__notes__", None)


@BOTH
def test_compute_loss_func_is_said_to_build_logits(ours, tmp_path, caplog):
    def loss(outputs, labels, num_items_in_batch=None):
        return focal(outputs.logits, labels, num_items_in_batch)

    with caplog.at_level(logging.INFO, "liger_trainer"):
        if ours is LigerTrainer:
            args = run(LigerTrainer, tiny_model("llama"), tmp_path)[1].args
            assert "compute_loss_func" not in caplog.text
            LigerTrainer(model=tiny_model("llama"), args=args, compute_loss_func=loss)
        else:
            run(ours, tiny_model("llama"), tmp_path, train=False, trainer_options={"compute_loss_func": loss})
    said = [record.message for record in caplog.records if "compute_loss_func" in record.message]
    assert len(said) == 1 and "token_loss" in said[0]
    assert ("second forward" in said[0]) == (ours is LigerSFTTrainer)


class WithTerm:
    """Adds a term of the model's outputs to TRL's loss."""

    term = None

    def compute_loss(self, model, inputs, *args, **kwargs):
        seen = []

        def watched(**call):
            seen.append(model(**call))
            return seen[-1]

        loss = super().compute_loss(watched, inputs, *args, **kwargs)
        return loss + self.term(next(outputs for outputs in seen if hasattr(outputs, "log_probs")))


TERMS = {
    "log-probs": lambda self, outputs: 0.3 * outputs.log_probs.exp().sum() / 50,
    "entropy": lambda self, outputs: -0.1 * outputs.entropy.sum() / 50,
    "scaled": lambda self, outputs: 0.0,
}


@pytest.mark.parametrize(
    "term, options",
    [
        ("log-probs", {}),
        ("log-probs", {"loss_type": "dft"}),
        ("log-probs", {"label_smoothing_factor": 0.1}),
        ("entropy", {}),
        ("entropy", {"label_smoothing_factor": 0.1}),
        ("scaled", {"loss_type": "dft"}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated")
def test_a_term_of_what_sft_s_call_returns(term, options, tmp_path):
    want, got = (
        run(type("Own", (WithTerm, trainer), {"term": TERMS[term]}), tiny_model("llama"), tmp_path, **options)[0]
        for trainer in (SFTTrainer, LigerSFTTrainer)
    )
    assert_same_numbers(got, want)


def test_a_term_of_a_hook_s_on_the_model(tmp_path):
    """A hook gets the same outputs as an override of `compute_loss`."""

    class Hooked:
        def training_step(self, model, inputs, *args, **kwargs):
            handle = self.model.register_forward_hook(self.add_term)
            try:
                return super().training_step(model, inputs, *args, **kwargs)
            finally:
                handle.remove()

        def add_term(self, module, args, outputs):
            outputs.log_probs = outputs.log_probs * torch.linspace(0.5, 1.0, outputs.log_probs.shape[1])
            return outputs

    want, got = (
        run(type("Own", (Hooked, trainer), {}), tiny_model("llama"), tmp_path)[0]
        for trainer in (SFTTrainer, LigerSFTTrainer)
    )
    assert_same_numbers(got, want)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}], ids=str)
def test_a_hook_on_the_whole_model_sees_logits(options, adapter, tmp_path):
    """This includes a hook on PEFT's wrapper, where our forward cannot see it, and loss-only evaluations."""
    runs = []
    for trainer_class in (Trainer, LigerTrainer):
        seen: list[torch.Tensor] = []

        class Watched(trainer_class):
            watch = partial(lambda seen, m, args, outputs: seen.append(outputs.logits.mean()), seen)

            def training_step(self, *args, **kwargs):
                if not self.model._forward_hooks:
                    self.model.register_forward_hook(self.watch)
                return super().training_step(*args, **kwargs)

        model = tiny_model("llama")
        model = with_lora(model, ["q_proj"]) if adapter else model
        got, trainer = run(Watched, model, tmp_path, **options)
        trainer.evaluate(ragged_rows(4))
        runs.append((got, torch.stack(seen).detach()))
    assert_same_numbers(runs[1][0], runs[0][0])
    torch.testing.assert_close(runs[1][1], runs[0][1], rtol=1e-4, atol=1e-5)
    (why,) = trainer.liger_report["fused_linear_cross_entropy"].skipped.values()
    assert "a forward hook" in why
