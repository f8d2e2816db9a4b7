"""Models that let packed rows see each other. With these models' own attention, transformers and TRL train silently."""

import pytest
import torch
from architectures import build
from tiny_models import tiny_model

from liger_trainer import apply_liger
from liger_trainer.varlen.proof.packed_rows import why_rows_mix


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2", "gemma3_text", "deepseek_v3", "phi"])
def test_rows_stay_apart(name):
    assert why_rows_mix(tiny_model(name)) is None


@pytest.mark.parametrize("name", ["gpt_oss", "bloom", "opt", "mamba", "jamba"])
def test_rows_mix(name):
    model, _ = build(name)
    assert "packed rows see each other" in why_rows_mix(model)


def test_packed_rows_of_gpt_oss_see_each_other_in_stock():
    model, _ = build("gpt_oss")
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        alone = model.eval().model(input_ids=ids[:, 6:], use_cache=False).last_hidden_state
        packed = model.model(input_ids=ids, position_ids=torch.arange(12)[None] % 6, use_cache=False).last_hidden_state
    assert (packed[:, 6:] - alone).abs().max() > 0.1


def test_attention_by_lengths_keeps_them_apart():
    model, _ = build("afmoe")
    model.set_attn_implementation("sdpa")
    assert why_rows_mix(model) is not None
    apply_liger(model, {"varlen_attention": True})
    assert why_rows_mix(model) is None


def test_a_class_that_cannot_be_made_small_is_not_judged(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(type(model.model), "_from_config", None)
    assert why_rows_mix(model) is None


def test_the_random_state_stays_as_it_is():
    model, before = tiny_model("llama"), torch.get_rng_state()
    why_rows_mix(model)
    assert torch.equal(torch.get_rng_state(), before)
