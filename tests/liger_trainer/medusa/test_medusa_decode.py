"""Decoding with heads writes the text of greedy decoding, whatever the heads propose, in fewer passes."""

import pytest
import torch
from medusa_fixtures import ENDS, model_with_heads, prompts_of
from tiny_models import tiny_model

from liger_trainer.medusa.decode import greedy_decode
from liger_trainer.medusa.heads import MedusaHeads
from liger_trainer.medusa.prompts import answer


@pytest.fixture(scope="module")
def fitted():
    return model_with_heads()


def test_same_text_in_fewer_passes(fitted):
    model, heads = fitted
    saved = 0
    for prompt in prompts_of(4) + prompts_of(4, seed=9):  # seen by the heads, and not
        (want,) = answer(model, [prompt], ENDS, 40)
        plain, fast = (greedy_decode(model, h, prompt, ENDS, 40) for h in (None, heads))
        assert plain.tokens == fast.tokens == want
        assert plain.passes == len(want) - 1
        saved += plain.passes - fast.passes
    assert saved > 40


@pytest.mark.parametrize("model_type", ["gemma2", "deepseek_v3"])
def test_same_text_with_other_caches(model_type):
    """A sliding window that is passed (16 positions), soft-capped logits; latent attention."""
    model, heads = model_with_heads(model_type, steps=150)
    saved = 0
    for prompt in prompts_of(3):
        (want,) = answer(model, [prompt], ENDS, 30)
        fast = greedy_decode(model, heads, prompt, ENDS, 30)
        assert fast.tokens == want
        saved += len(want) - 1 - fast.passes
    assert saved > 0


def test_text_ends_where_greedy_decoding_ends(fitted):
    """At an end token inside an accepted chain, and at the budget, however many tokens a pass has to give."""
    model, heads = fitted
    prompt = prompts_of(4)[1]
    whole = greedy_decode(model, None, prompt, ENDS, 24).tokens
    for length in range(1, 25):
        assert greedy_decode(model, heads, prompt, ENDS, length).tokens == whole[:length]
    for end in set(whole):
        stop = whole.index(end) + 1
        assert greedy_decode(model, heads, prompt, {end}, 24).tokens == whole[:stop]


def test_wrong_heads_cost_passes_and_not_text(fitted):
    """Every guess wrong: a token a pass, the cache cut after each."""
    model, _ = fitted
    heads = MedusaHeads.for_model(model, 2, tied=False)
    for head in heads:
        torch.nn.init.normal_(head.lm_head.weight, generator=torch.Generator().manual_seed(5))
    prompt = prompts_of(1, seed=4)[0]
    plain, fast = (greedy_decode(model, h, prompt, ENDS, 20) for h in (None, heads))
    assert fast.tokens == plain.tokens
    assert plain.passes - 2 <= fast.passes <= plain.passes


def test_a_state_that_cannot_be_taken_back_is_refused():
    model = tiny_model("qwen3_next").eval()
    with pytest.raises(ValueError, match="Qwen3NextForCausalLM keeps a running state"):
        greedy_decode(model, None, [3, 4], ENDS, 4)
