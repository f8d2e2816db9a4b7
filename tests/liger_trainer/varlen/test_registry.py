"""Configs keep the name of transformers' attention. From the first patched model on, it leads to ours."""

import copy
import gc

import pytest
from tiny_models import assert_same_step, step, tiny_model
from transformers import AttentionInterface, AttentionMaskInterface, GenerationConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from varlen_batches import LENGTHS, ON, batch, model_of, patched

from liger_trainer import apply_liger, remove_liger
from liger_trainer.head.module import has_fused_head, head_options
from liger_trainer.varlen import registry


def test_models_that_share_a_config(tokens):
    one = model_of()
    other, call = LlamaForCausalLM(one.config).train(), batch()
    want, want_other = step(one, call), step(other, call)
    patched(one)
    assert_same_step(step(other, call), want_other)
    patched(other)
    remove_liger(other)
    tokens.clear()
    assert_same_step(step(one, call), want)
    assert_same_step(step(other, call), want_other)
    assert tokens == [sum(LENGTHS)]


@pytest.mark.parametrize("how", ["removed", "deleted"])
def test_a_copy_outlives_the_model(how, tokens):
    gc.collect()
    model, call = patched(model_of()), batch()
    want, twin = step(model, call), copy.deepcopy(model)
    if how == "removed":
        remove_liger(model)
    del model
    gc.collect()
    tokens.clear()
    assert_same_step(step(twin, call), want)
    assert tokens == [sum(LENGTHS)]


@pytest.mark.parametrize("before", [True, False])
def test_a_function_of_the_user_s_is_used(before, tokens, monkeypatch):
    called = []
    model = model_of()
    call = batch()
    want = step(model, call)

    def theirs(*args, **kwargs):
        called.append(kwargs)
        return sdpa_attention_forward(*args, **kwargs)

    if not before:
        patched(model)
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", theirs)
    report = apply_liger(model, ON)["varlen_attention"] if before else None
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == [] and len(called) >= 2
    assert report is None or "of your own" in report.unsuited["model"]


def test_a_mask_of_the_user_s_is_used(tokens, monkeypatch):
    gc.collect()
    model, call = model_of(), batch()

    def without_the_first(*args, **kwargs):
        mask = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
        mask[..., 2:, 0] = False
        return mask

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", without_the_first)
    want = step(model, call)
    apply_liger(model, ON)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == []
    remove_liger(model)


def test_continuous_batching_takes_the_model():
    model = patched(model_of()).eval()
    model.init_continuous_batching(GenerationConfig(max_new_tokens=4, pad_token_id=0, eos_token_id=2, bos_token_id=1))


def test_the_registries_are_transformers_own_after_the_last_model():
    def registered():
        return [table[name] is own for table, name, own, _ in registry._FUNCTIONS], vars(ALL_ATTENTION_FUNCTIONS)

    gc.collect()
    first, second = tiny_model("llama"), tiny_model("llama")
    registry.release(has_fused_head)
    assert all(head_options(model) is None for model in registry._users), "models of other tests are patched"
    for model in (first, second):
        apply_liger(model)
    remove_liger(first)
    assert not any(registered()[0])
    remove_liger(second)
    assert all(registered()[0]) and "get_interface" not in registered()[1]
    apply_liger(first)
    assert not any(registered()[0])
    remove_liger(first)
