"""Steps on tensors without values, of a tiny model."""

import pytest
import torch
from transformers import LlamaConfig

from liger_trainer.errors import RecipeError
from liger_trainer.fitting import losses, optimizers
from liger_trainer.fitting.hollow import Shape
from liger_trainer.fitting.sharding import Sharding
from liger_trainer.fitting.step import Job, need
from liger_triton import _dispatch, linear_cross_entropy
from liger_triton.sizes import computes_nothing, sizes_only

LAYERS = 4
PLENTY = 1 << 40


@pytest.fixture(autouse=True)
def kernels_are_proven_by_their_twins(monkeypatch):
    monkeypatch.setattr(_dispatch, "INTERPRET", False)


def config(**changes):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**(sizes | {"num_hidden_layers": LAYERS, "vocab_size": 1000} | changes))


def job(loss=losses.of_labels, optimizer=torch.optim.AdamW, changes=None, dtype=torch.bfloat16, **options):
    options = {"checkpointing": {"use_reentrant": False}} | options
    return Job(Shape(config(**(changes or {})), dtype), loss, optimizer, **options)


def parameters(**changes):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config(**changes)).parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_weights_gradients_and_states_are_those_of_the_model(tied):
    found = need(job(changes={"tie_word_embeddings": tied}), 2, 64, False, PLENTY)
    weights = 2 * parameters(tie_word_embeddings=tied)
    assert found.weights == found.gradients == weights
    assert found.states == pytest.approx(2 * weights, rel=0.02)  # each weight's state begins at 512 bytes
    assert found.layers == LAYERS


def test_checkpointing_keeps_the_inputs_of_layers_alone():
    none, full = (need(job(), 4, 512, checkpointing, PLENTY) for checkpointing in (False, True))
    assert full.layer == 4 * 512 * 256 * 2
    assert none.layer > 5 * full.layer
    assert none.micro_batch - full.micro_batch > (LAYERS - 2) * (none.layer - full.layer)


def test_auto_keeps_what_the_budget_allows():
    none, full = (need(job(), 4, 512, checkpointing, PLENTY) for checkpointing in (False, True))
    assert need(job(), 4, 512, "auto", PLENTY).chosen.kept == LAYERS
    budget = (full.peak + 0.6 * (none.peak - full.peak)) / 2**30
    found = need(job(budget=budget), 4, 512, "auto", PLENTY)
    assert 0 < found.chosen.kept < LAYERS
    assert full.peak < found.peak <= budget * 2**30


def test_the_same_peak_when_states_are_taken_from_another_size():
    first = need(job(), 2, 64, False, PLENTY)
    assert need(job(), 4, 128, False, PLENTY, first).peak == need(job(), 4, 128, False, PLENTY).peak


def test_accumulation_holds_gradients_from_one_micro_batch_to_the_next():
    once, twice = (need(job(accumulates=accumulates), 4, 512, False, PLENTY) for accumulates in (False, True))
    assert once.micro_batch < twice.micro_batch <= once.micro_batch + once.gradients


@pytest.mark.parametrize("loss", [losses.of_pairs, losses.of_answers])
def test_a_reference_model_adds_its_weights(loss):
    alone, beside = (need(job(loss, reference=reference), 2, 64, False, PLENTY) for reference in (False, True))
    assert beside.reference == alone.weights
    assert beside.peak == pytest.approx(alone.peak + alone.weights, rel=0.02)


def test_two_gpus():
    one = need(job(), 4, 256, True, PLENTY)
    ddp = need(job(sharding=Sharding("ddp", 2)), 4, 256, True, PLENTY)
    assert ddp.peak == one.peak + one.gradients
    two, four = (need(job(sharding=Sharding("fsdp2", gpus)), 4, 256, True, PLENTY) for gpus in (2, 4))
    assert (two.weights, four.weights) == (one.weights // 2, one.weights // 4)
    assert two.peak - four.peak >= (one.weights + one.gradients + one.states) // 8


def test_states_of_optimizers():
    class Arguments:
        optim, learning_rate, optim_args = "adamw_8bit", 1e-4, None

    weights = [torch.nn.Parameter(torch.empty(30, 40)), torch.nn.Parameter(torch.empty(50))]
    assert optimizers.make(Arguments, weights) == 2 * (30 * 40 + 50)
    Arguments.optim = "adafactor"
    assert optimizers.make(Arguments, weights) == 4 * (30 + 40 + 50)
    Arguments.optim = "galore_adamw"
    with pytest.raises(RecipeError, match="optim is galore_adamw"):
        optimizers.make(Arguments, weights)


def test_the_optimizer_s_own_temporaries_count():
    fused, plain = (
        need(job(optimizer=lambda w, options=options: torch.optim.AdamW(w, **options)), 1, 16, True, PLENTY)
        for options in ({"fused": True}, {"foreach": True})
    )
    assert plain.step > fused.step


def test_sizes_only_ends_with_its_block():
    with pytest.raises(KeyError), sizes_only():
        assert computes_nothing()
        raise KeyError
    assert not computes_nothing()
    x, w = torch.randn(6, 8), torch.randn(10, 8)
    want = torch.nn.functional.cross_entropy(x @ w.t(), torch.arange(6))
    torch.testing.assert_close(linear_cross_entropy(x, w, torch.arange(6)), want)
