"""Memory of steps of a tiny model, on meta tensors."""

import functools

import pytest
import torch
from architectures import small_config
from transformers import AutoModelForImageTextToText, LlamaConfig

from liger_trainer.errors import RecipeError
from liger_trainer.fitting import losses, optimizers
from liger_trainer.fitting.meta_model import ModelSpec
from liger_trainer.fitting.sharding import Sharding
from liger_trainer.fitting.step import TrainSpec, estimate_memory
from liger_trainer.memory.selective import LONG
from liger_triton import _dispatch, linear_cross_entropy
from liger_triton.sizes import computes_nothing, sizes_only

LAYERS = 3
PLENTY = 1 << 40


@pytest.fixture(autouse=True)
def kernels_are_proven_by_their_twins(monkeypatch):
    monkeypatch.setattr(_dispatch, "INTERPRET", False)


def config(**changes):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**(sizes | {"num_hidden_layers": LAYERS, "vocab_size": 1000} | changes))


def job(loss=losses.of_labels, optimizer=torch.optim.AdamW, changes=None, dtype=torch.bfloat16, **options):
    options = {"checkpointing": {"use_reentrant": False}} | options
    return TrainSpec(ModelSpec(config(**(changes or {})), dtype), loss, optimizer, **options)


@functools.cache
def plain(rows, length, checkpointing):
    """The memory of a step of `job()`."""
    return estimate_memory(job(), rows, length, checkpointing, PLENTY)


def parameters(**changes):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config(**changes)).parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_weights_gradients_and_states_have_the_model_s_sizes(tied):
    found = estimate_memory(job(changes={"tie_word_embeddings": tied}), 2, 64, False, PLENTY)
    weights = 2 * parameters(tie_word_embeddings=tied)
    assert found.weights == found.gradients == weights
    assert found.states == pytest.approx(2 * weights, rel=0.02)  # each weight's state starts at 512 bytes


def test_checkpointing_keeps_the_inputs_of_layers_alone():
    none, full = plain(4, 512, False), plain(4, 512, True)
    assert none.micro_batch - full.micro_batch > (LAYERS - 2) * 5 * 4 * 512 * 256 * 2  # five inputs a layer, and more


def test_auto_keeps_what_the_budget_allows():
    none, full = plain(4, 512, False), plain(4, 512, True)
    assert estimate_memory(job(), 4, 512, "auto", PLENTY).checkpointing.kept == LAYERS
    budget = (full.peak + 0.6 * (none.peak - full.peak)) / 2**30
    found = estimate_memory(job(budget=budget), 4, 512, "auto", PLENTY)
    assert 0 < found.checkpointing.kept < LAYERS
    assert full.peak < found.peak <= budget * 2**30


@pytest.mark.parametrize(("length", "long"), [pytest.param(LONG // 2, False, marks=pytest.mark.slow), (LONG, True)])
def test_auto_keeps_the_results_of_attention_of_long_rows(length, long):
    none, full = (estimate_memory(job(), 1, length, checkpointing, PLENTY) for checkpointing in (False, True))
    budget = (full.peak + 0.2 * (none.peak - full.peak)) / 2**30
    found = estimate_memory(job(budget=budget), 1, length, "auto", PLENTY)
    assert found.checkpointing.kept + found.checkpointing.attention <= LAYERS
    assert (found.checkpointing.attention > 0) == long
    assert found.checkpointing.peak == pytest.approx(found.micro_batch, rel=0.02)
    assert full.peak < found.peak <= budget * 2**30


def test_the_same_peak_when_states_are_taken_from_another_size():
    first = estimate_memory(job(), 2, 64, False, PLENTY)
    assert estimate_memory(job(), 4, 512, False, PLENTY, first).peak == plain(4, 512, False).peak


def test_accumulation_holds_gradients_from_one_micro_batch_to_the_next():
    once = plain(4, 512, False)
    twice = estimate_memory(job(accumulates=True), 4, 512, False, PLENTY)
    assert once.micro_batch < twice.micro_batch <= once.micro_batch + once.gradients


@pytest.mark.parametrize("loss", [losses.of_pairs, losses.of_answers])
def test_a_reference_model_adds_its_weights(loss):
    alone, with_reference = (
        estimate_memory(job(loss, reference=reference), 2, 64, False, PLENTY) for reference in (False, True)
    )
    assert with_reference.reference == alone.weights
    assert with_reference.peak == pytest.approx(alone.peak + alone.weights, rel=0.02)


@pytest.mark.slow
def test_two_gpus():
    one = estimate_memory(job(), 4, 256, True, PLENTY)
    ddp = estimate_memory(job(sharding=Sharding("ddp", 2)), 4, 256, True, PLENTY)
    assert ddp.peak == one.peak + one.gradients
    two, four = (estimate_memory(job(sharding=Sharding("fsdp2", gpus)), 4, 256, True, PLENTY) for gpus in (2, 4))
    assert (two.weights, four.weights) == (one.weights // 2, one.weights // 4)
    assert two.peak - four.peak >= (one.weights + one.gradients + one.states) // 8


def test_states_of_optimizers():
    class Arguments:
        optim = "adamw_8bit"
        learning_rate = 1e-4
        optim_args = None

    weights = [torch.nn.Parameter(torch.empty(30, 40)), torch.nn.Parameter(torch.empty(50))]
    assert optimizers.make(Arguments, weights) == 2 * (30 * 40 + 50)
    Arguments.optim = "adafactor"
    assert optimizers.make(Arguments, weights) == 4 * (30 + 40 + 50)
    Arguments.optim = "galore_adamw"
    with pytest.raises(RecipeError, match="optim is galore_adamw"):
        optimizers.make(Arguments, weights)


def test_the_optimizer_s_own_temporaries_count():
    fused, plain = (
        estimate_memory(job(optimizer=lambda w, options=options: torch.optim.AdamW(w, **options)), 1, 16, True, PLENTY)
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


def in_backward(optimizer=torch.optim.AdamW, **options):
    return job(optimizer=optimizer, in_backward=True, **options)


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradients_that_are_freed_in_the_backward_pass(tied):
    """The forward pass peaks then, or the optimizer step of the largest weight."""
    fused = lambda weights: torch.optim.AdamW(weights, fused=True)  # noqa: E731
    options = {"optimizer": fused, "changes": {"tie_word_embeddings": tied}}
    ordinary, freed = (estimate_memory(make(**options), 1, 16, True, PLENTY) for make in (job, in_backward))
    assert freed.weights == ordinary.weights and freed.states == ordinary.states
    largest = 2 * 1000 * 256
    assert freed.gradients == largest < ordinary.gradients / 4
    of_head = largest * (2 if tied else 1)  # with one weight, its first gradient waits for the second
    assert freed.peak - freed.weights - freed.states - freed.others < of_head + 8 * 256 * 512
    assert ordinary.peak - ordinary.weights - ordinary.states - ordinary.others >= ordinary.gradients
    again = estimate_memory(in_backward(**options), 2, 32, True, PLENTY)
    assert estimate_memory(in_backward(**options), 2, 32, True, PLENTY, freed).peak == pytest.approx(
        again.peak, rel=1e-3
    )


def test_temporaries_of_an_optimizer_in_backward_are_of_one_weight():
    foreach = lambda weights: torch.optim.AdamW(weights, foreach=True)  # noqa: E731
    ordinary, freed = (estimate_memory(make(optimizer=foreach), 1, 16, True, PLENTY) for make in (job, in_backward))
    assert ordinary.step - ordinary.micro_batch > 0.9 * ordinary.gradients
    assert freed.peak < ordinary.peak - 1.5 * ordinary.gradients


@pytest.mark.slow
def test_auto_within_a_budget_that_all_gradients_would_exceed():
    fused = lambda weights: torch.optim.AdamW(weights, fused=True)  # noqa: E731
    options = {"optimizer": fused, "changes": {"num_hidden_layers": 4}}
    budget = sum(estimate_memory(make(**options), 2, 256, True, PLENTY).peak for make in (job, in_backward)) / 2
    ordinary, freed = (
        estimate_memory(make(budget=budget / 2**30, **options), 2, 256, "auto", PLENTY) for make in (job, in_backward)
    )
    assert freed.checkpointing.kept > 0 and freed.peak <= budget < ordinary.peak


def test_states_that_are_counted_by_their_size_in_backward():
    found = estimate_memory(in_backward(optimizer=lambda weights: 12345 * 512), 1, 16, True, PLENTY)
    assert found.states == 12345 * 512


def with_adapters(fp8, **options):
    from peft import LoraConfig

    adapter = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    made = job(**({"autocast": torch.bfloat16} | options))
    made.shape.peft_config, made.shape.fp8 = adapter, fp8
    return made


@pytest.mark.parametrize(
    "checkpointing, autocast",
    [(False, None), (True, torch.bfloat16), pytest.param("auto", torch.bfloat16, marks=pytest.mark.slow)],
)
def test_a_frozen_fp8_base(checkpointing, autocast):
    """Its layers take one byte a weight and four a row. Memory kept for the backward pass does not change."""
    plain, fp8 = (
        estimate_memory(with_adapters(on, autocast=autocast), 4, 512, checkpointing, PLENTY) for on in (False, True)
    )
    per_layer = [(256, 256), (128, 256), (128, 256), (256, 256), (512, 256), (512, 256), (256, 512)]
    of_base = LAYERS * sum(n * k for n, k in per_layer)
    scales = LAYERS * sum(4 * n for n, _ in per_layer)
    assert plain.weights - fp8.weights == of_base - scales
    assert (fp8.loaded, plain.loaded) == (plain.weights, 0)
    assert fp8.gradients == plain.gradients and fp8.states == plain.states
    # rounding in the step takes less than what is saved
    assert plain.peak - (of_base - scales) <= fp8.peak < plain.peak + 8 * 512 * 512 * 2


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_frozen_fp8_base_is_sharded(autocast):
    """A GPU holds half of it, and gathers half as much."""
    shards = Sharding("fsdp2", 2, autocast, autocast and torch.float32)
    one, two, plain = (
        estimate_memory(with_adapters(fp8, autocast=autocast, sharding=way), 2, 64, True, PLENTY)
        for fp8, way in ((True, Sharding()), (True, shards), (False, shards))
    )
    widened = two.gradients * 2 - one.gradients if autocast else 0  # accelerate trains in fp32
    assert two.weights == (one.weights + widened) // 2 and two.loaded == 0
    assert plain.peak - two.peak > plain.weights - two.weights > 0


def test_the_peak_may_be_when_the_base_is_loaded():
    found = estimate_memory(
        with_adapters(True, changes={"hidden_size": 1024, "intermediate_size": 8192}), 1, 16, True, PLENTY
    )
    assert found.peak == found.loaded > found.micro_batch


def test_a_model_with_a_tower():
    """Its weights, gradients and states count even for rows without images."""
    shape = ModelSpec(small_config("qwen2_5_vl"), torch.bfloat16)
    found = estimate_memory(TrainSpec(shape, losses.of_labels, torch.optim.AdamW), 2, 64, False, PLENTY)
    with torch.device("meta"):
        weights = 2 * sum(p.numel() for p in AutoModelForImageTextToText.from_config(shape.config).parameters())
    assert shape.has_tower and found.weights == found.gradients == weights
    assert found.states == pytest.approx(2 * weights, rel=0.3)  # each weight's state starts at 512 bytes


def adapters(layers=LAYERS, **options):
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype="bfloat16", bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    lora = LoraConfig(r=4, target_modules="all-linear")
    shape = ModelSpec(config(num_hidden_layers=layers), torch.bfloat16, lora, quantization=quantization)
    options = {"checkpointing": {"use_reentrant": False}} | options
    return TrainSpec(shape, losses.of_labels, torch.optim.AdamW, autocast=torch.bfloat16, **options)


def test_a_4_bit_base():
    """Half a byte a number, and a byte for 64 numbers (4.125 bits with double quantisation); adapters are 16-bit."""
    pytest.importorskip("bitsandbytes")
    found = estimate_memory(adapters(), 2, 1024, True, PLENTY)
    layer = 256 * (256 + 128 + 128 + 256 + 3 * 512)
    others = 2 * (2 * 1000 * 256 + (2 * LAYERS + 1) * 256)
    ranks = 4 * LAYERS * (2 * 512 + 2 * 384 + 3 * 768)
    packed = LAYERS * layer * (1 / 2 + 1 / 64 + 4 / 64 / 256)
    assert found.gradients == 2 * ranks
    assert found.weights == pytest.approx(packed + others + 2 * ranks, rel=0.05)  # and each layer's tables
    assert found.states == pytest.approx(4 * ranks, rel=0.2)
    deeper = estimate_memory(adapters(2 * LAYERS), 2, 1024, True, PLENTY)
    grown = deeper.peak - found.peak - (deeper.weights - found.weights) - (deeper.gradients - found.gradients)
    assert 0 < grown - (deeper.states - found.states) < 1.1 * LAYERS * 2 * 1024 * 256 * 2, (
        "no matrix in 16 bits is kept"
    )


def test_inputs_on_the_host():
    """All inputs go to the host, except the last and the one or two on their way."""
    options = {"checkpointing": {"use_reentrant": False, "offload": True}}
    stays, leaves = (
        estimate_memory(job(changes={"num_hidden_layers": 12}, **o), 4, 1024, True, PLENTY) for o in ({}, options)
    )
    inputs = 4 * 1024 * 256 * 2
    assert stays.host == 0 and leaves.host > 0
    assert stays.micro_batch - leaves.micro_batch > 4 * inputs  # weight gradients take the place of the others
    assert estimate_memory(job(**options), 4, 1024, False, PLENTY).host == 0
