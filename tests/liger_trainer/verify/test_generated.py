"""bf16 training of trainers that write completions: all runs get the stock trainer's completions from fp32.

A model writes another text in bf16 than in fp32, with our trainer and with stock. With the seeds here, it does.
"""

import pytest
import torch
from verify_setups import setup_of

from liger_trainer import LigerGRPOTrainer, LigerRLOOTrainer
from liger_trainer.verify.bf16 import in_bf16
from liger_trainer.verify.generated import Generated, GenerationRecorder
from liger_trainer.verify.runs import Bench, quiet

OPTIONS = {"beta": 0.1, "temperature": 0.7}
TIPS_OVER, FAR_OFF_BY_CHANCE = 3, 4


def bf16_check(folder, method, seed=TIPS_OVER):
    with quiet():
        return in_bf16(Bench(setup_of(method, seed=seed, options=OPTIONS), str(folder)), "stock", {})


def written_by(folder, given=None, **options):
    seen = GenerationRecorder(replayed=given)
    with quiet():
        bench = Bench(setup_of("GRPO", seed=TIPS_OVER, options=OPTIONS), str(folder))
        bench.run("ours", recorder=seen, max_steps=1, **options)
    return seen.generations


def test_bf16_gradients_are_compared_on_the_same_completions(tmp_path):
    found = bf16_check(tmp_path, "GRPO")
    assert found.verdict == "ok" and 0.5 < found.figure < 2, found.line


@pytest.mark.slow
@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_a_step_that_is_far_off_by_chance_is_made_again(method, tmp_path):
    found = bf16_check(tmp_path, method, FAR_OFF_BY_CHANCE)
    assert found.verdict == "ok" and found.detail.endswith("over 5 steps"), found.line


@pytest.mark.slow
def test_a_loss_that_is_a_fifth_off_in_bf16_is_off_in_every_step(tmp_path, monkeypatch):
    stock = LigerGRPOTrainer.compute_loss

    def a_fifth_off(self, *args, **kwargs):
        loss = stock(self, *args, **kwargs)
        return loss * 1.2 if self.args.bf16 else loss

    monkeypatch.setattr(LigerGRPOTrainer, "compute_loss", a_fifth_off)
    found = bf16_check(tmp_path, "GRPO", FAR_OFF_BY_CHANCE)
    assert found.verdict == "FAILED" and found.detail.startswith("losses are"), found.line


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [LigerGRPOTrainer, LigerRLOOTrainer])
def test_a_token_that_is_left_out_in_bf16_is_found(trainer, tmp_path, monkeypatch):
    stock = trainer.compute_loss

    def without_the_last_token(self, model, inputs, *args, **kwargs):
        if self.args.bf16 and model.training:  # the loss of an evaluation would show it too
            mask = inputs["completion_mask"].clone()
            mask[:, -1] = 0
            inputs = {**inputs, "completion_mask": mask}
        return stock(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(trainer, "compute_loss", without_the_last_token)
    found = bf16_check(tmp_path, trainer.__name__.removeprefix("Liger").removesuffix("Trainer"))
    assert found.verdict == "FAILED", found.line


def test_completions_that_are_not_written_are_found(tmp_path, monkeypatch):
    stock = LigerGRPOTrainer._generate_single_turn

    def of_the_first_batch(self, prompts, *args, **kwargs):
        if not hasattr(self, "first_batch"):
            self.first_batch = stock(self, prompts, *args, **kwargs)[0]
        return self.first_batch[: len(prompts)], None

    monkeypatch.setattr(LigerGRPOTrainer, "_generate_single_turn", of_the_first_batch)
    found = bf16_check(tmp_path, "GRPO")
    assert found.verdict == "FAILED" and "completions are written 1 times, and 3 times in fp32" in found.detail


def test_a_run_trains_on_what_it_is_given_and_draws_what_follows(tmp_path):
    in_16_bits = written_by(tmp_path, bf16=True)
    own = written_by(tmp_path)
    at_the_end = torch.get_rng_state()
    assert not torch.equal(own[0].ids, in_16_bits[0].ids)
    for options in ({}, {"bf16": True}):
        given = written_by(tmp_path, own, **options)
        assert [one.ids.tolist() for one in given] == [one.ids.tolist() for one in own]
        assert torch.equal(torch.get_rng_state(), at_the_end)


def test_a_run_that_asks_for_other_completions_is_refused(tmp_path):
    own = written_by(tmp_path)
    with pytest.raises(ValueError, match="asked to write more often than 0 times"):
        written_by(tmp_path, [])
    others = [Generated(one.prompts + 1, one.ids, one.random) for one in own]
    with pytest.raises(ValueError, match="call 1 of generate has other prompts than in fp32"):
        written_by(tmp_path, others)
