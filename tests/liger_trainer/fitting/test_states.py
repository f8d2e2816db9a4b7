"""Memory of layers that keep a state: documents of packed rows side by side, the gated delta rule by its package."""

import functools

import pytest
import torch
import transformers
from architectures import small_config
from benchmark_scripts import benchmarks_on_path  # noqa: F401 - a fixture
from packaging.version import Version
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM

from liger_trainer.fitting import losses
from liger_trainer.fitting.meta_model import ModelSpec
from liger_trainer.fitting.states import layers_by_package, layers_side_by_side, usual_documents
from liger_trainer.fitting.step import TrainSpec, estimate_memory
from liger_trainer.memory.device_memory import GIB
from liger_trainer.varlen import alike
from liger_triton import _dispatch

PLENTY = 1 << 40
ROWS, LENGTH = 2, 2048
HYBRIDS = ["granitemoehybrid", pytest.param("bamba", marks=pytest.mark.slow)]
ON_GRANITE = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj", "input_linear", "output_linear"]
ON_QWEN = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"]
ON_QWEN += ["gate_proj", "up_proj", "down_proj"]


@pytest.fixture(autouse=True)
def kernels_are_proven_by_their_twins(monkeypatch):
    monkeypatch.setattr(_dispatch, "INTERPRET", False)


def one_long(rows, length):
    """One document of 512 tokens, and the others of 64."""
    return [512] + [64] * ((rows * length - 512) // 64)


def measured(number, longest):
    """The documents of a measured micro-batch: their number, and the longest. The others share the other tokens."""

    def lengths(rows, length):
        each, rest = divmod(rows * length - longest, number - 1)
        return [longest, *(number - 2) * [each], each + rest]

    return lengths


def spec(name, **options):
    options = {"checkpointing": {"use_reentrant": False}} | options
    return TrainSpec(ModelSpec(small_config(name), torch.bfloat16), losses.of_labels, torch.optim.AdamW, **options)


@functools.cache
def micro_batch(name, rows=ROWS, length=LENGTH, documents=None, fla=True, checkpointing=True):
    """Bytes that a micro-batch takes in addition to what stays from one to the next."""
    job = spec(name, documents=documents, fla=fla)
    found = estimate_memory(job, rows, length, checkpointing, PLENTY)
    return found.micro_batch - found.weights - found.states - found.others


def test_documents_of_a_micro_batch():
    spread = [512, 409, 327, 261, 208, 166, 132]
    assert usual_documents(2, 2048) == [*spread, 2048 - sum(spread), *spread, 2048 - sum(spread)]
    assert usual_documents(1, 9999) == [2499, 1999, 1599, 1279, 1023, 818, 654, 128]
    for rows, length in ((1, 1), (2, 3), (3, 100), (2, 2048)):
        assert sum(usual_documents(rows, length)) == rows * length
        assert max(usual_documents(rows, length)) == max(1, length // 4)


@pytest.fixture
def in_one_group(monkeypatch):
    """As the documents were padded when the peaks were measured."""
    monkeypatch.setattr(alike, "MOST_GROUPS", 1)
    micro_batch.cache_clear()
    yield
    micro_batch.cache_clear()


@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", HYBRIDS)
def test_documents_side_by_side_take_the_memory_of_a_padded_batch(name, checkpointing, in_one_group):
    """57 documents of up to 512 tokens have 7 times as many tokens in a scan as the micro-batch has."""
    number = len(one_long(ROWS, LENGTH))
    full = micro_batch(name, checkpointing=checkpointing)
    found = micro_batch(name, documents=one_long, checkpointing=checkpointing)
    padded = micro_batch(name, number, 512, checkpointing=checkpointing)
    assert full * 1.5 < found < padded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("documents", "most"), [(one_long, 0.6), pytest.param(usual_documents, 0.95, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", HYBRIDS)
def test_groups_of_like_length_take_less_than_one(name, documents, most, request):
    """Still more than full rows: this scan pads each document to a chunk of 256 tokens."""
    full, in_groups = (micro_batch(name, documents=given) for given in (None, documents))
    request.getfixturevalue("in_one_group")
    assert full < in_groups < most * micro_batch(name, documents=documents)


@pytest.mark.parametrize(
    "name",
    ["llama", pytest.param("lfm2", marks=pytest.mark.slow), pytest.param("qwen3_5_text", marks=pytest.mark.slow)],
)
def test_documents_change_nothing_where_layers_are_told_where_they_begin(name):
    assert micro_batch(name, documents=usual_documents) == pytest.approx(micro_batch(name), rel=1e-3)


@pytest.mark.slow
def test_without_the_package_documents_are_side_by_side():
    full, packed = (micro_batch("qwen3_5_text", documents=given, fla=False) for given in (None, usual_documents))
    assert micro_batch("qwen3_5_text") < full < packed


@pytest.mark.parametrize(
    ("name", "by_package", "side_by_side"),
    [("qwen3_5_text", 1, 0), ("qwen3_next", 1, 0), ("granitemoehybrid", 0, 1), ("kimi_linear", 0, 1), ("lfm2", 0, 0)],
)
def test_which_layers(name, by_package, side_by_side):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_config(name))
    assert len(layers_by_package(model)) == by_package
    assert len(layers_side_by_side(model, package=True)) == side_by_side
    assert len(layers_side_by_side(model, package=False)) == side_by_side + by_package


@pytest.mark.slow
@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"),
    reason="older scans take seven times as much, and auto keeps one layer too many of two",
)
def test_auto_keeps_fewer_layers_for_documents_side_by_side(in_one_group):
    none, every = (
        estimate_memory(spec("bamba", documents=one_long), ROWS, LENGTH, way, PLENTY) for way in (False, True)
    )
    budget = (every.peak + 0.5 * (none.peak - every.peak)) / GIB
    full, packed = (
        estimate_memory(spec("bamba", documents=documents, budget=budget), ROWS, LENGTH, "auto", PLENTY)
        for documents in (None, one_long)
    )
    assert packed.checkpointing.kept < full.checkpointing.kept
    assert packed.peak <= 1.01 * budget * GIB


# Peaks of PyTorch's allocator in GiB, measured on an H200 with torch 2.11 and without mamba-ssm and
# flash-linear-attention: LoRA of rank 16 with AdamW, every layer recomputed, rows of 2048 tokens, full or packed with
# this many documents of Alpaca, the longest of this many tokens.
MEASURED = [
    ("Granite-4.0-H-Tiny", ON_GRANITE, 2, None, 15.21),
    ("Granite-4.0-H-Tiny", ON_GRANITE, 2, (32, 267), 19.65),
    ("Granite-4.0-H-Tiny", ON_GRANITE, 2, (33, 517), 23.01),
    ("Qwen3.5-4B-16-layers", ON_QWEN, 4, None, 8.87),
    ("Qwen3.5-4B-16-layers", ON_QWEN, 4, (20, 593), 10.80),
    ("Qwen3.5-4B-16-layers", ON_QWEN, 4, (57, 488), 17.72),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "modules", "rows", "documents", "gib"), MEASURED)
def test_within_three_percent_of_the_measured_peak(
    name,
    modules,
    rows,
    documents,
    gib,
    benchmarks_on_path,  # noqa: F811
    in_one_group,
):
    from _models import MODELS

    family, shape = MODELS[name]
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules=modules)
    job = TrainSpec(
        ModelSpec(AutoConfig.for_model(family, **shape), torch.bfloat16, adapter),
        losses.of_labels,
        lambda weights: torch.optim.AdamW(weights, fused=True),
        torch.bfloat16,
        checkpointing={"use_reentrant": False},
        documents=None if documents is None else measured(*documents),
        fla=False,
    )
    found = estimate_memory(job, rows, 2048, True, 139 * GIB)
    assert found.peak / GIB == pytest.approx(gib, rel=0.03)
