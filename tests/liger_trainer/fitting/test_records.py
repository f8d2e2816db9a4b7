"""Memory counted without a GPU is within 5 % of the committed records of our trainers, measured on one."""

import json
import re

import pytest
import torch
from benchmark_scripts import (
    benchmarks_on_path,  # noqa: F401 - a fixture
    newest,
)
from checkout import ROOT

from liger_trainer.fitting import losses
from liger_trainer.fitting.images import RowImages
from liger_trainer.fitting.meta_model import ModelSpec
from liger_trainer.fitting.sharding import Sharding
from liger_trainer.fitting.step import TrainSpec, estimate_memory
from liger_trainer.memory.device_memory import GIB
from liger_triton import _dispatch

RECORDS = newest()
PAGE = ROOT / "docs" / "fit.md"
H200 = 139 * GIB
BEFORE_SLICES = ("sft-llama-3-8b-1x81920-checkpointing",)  # its MLPs took all rows at once
# The others run in `make test-all`.
QUICK = ("sft-llama-3.2-1b-2x1024", "sft-llama-3.2-1b-16x1024-lora16")


@pytest.fixture(autouse=True)
def kernels_are_proven_by_their_twins(monkeypatch):
    """Prove kernels by their twins: Triton's interpreter would take minutes for models of this width."""
    monkeypatch.setattr(_dispatch, "INTERPRET", False)


def train_spec_of(options):
    """The job that `_steps.py` builds: bf16 weights, AdamW with bf16 states, and bf16 autocast by default."""
    from _models import MODELS
    from peft import LoraConfig
    from transformers import AutoConfig, BitsAndBytesConfig

    family, shape = MODELS[options["model"]]
    if options.get("layers"):
        shape = shape | {"num_hidden_layers": options["layers"]}
    rank, pairs = options.get("lora"), options.get("trainer") == "dpo"
    autocast = None if options.get("no_autocast") else torch.bfloat16
    sharding = Sharding()
    if "fsdp2" in (options.get("config_file") or ""):
        sharding = Sharding("fsdp2", options["processes"], autocast, autocast and torch.float32)
    elif options.get("config_file"):
        sharding = Sharding("ddp", options["processes"])
    has_experts = any(key in shape for key in ("num_experts", "num_local_experts"))
    modules = r".*\.self_attn\.[qkvo]_proj" if has_experts else "all-linear"
    experts = ["experts.gate_up_proj", "experts.down_proj"] if options.get("lora_experts") else None
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=modules, target_parameters=experts) if rank else None
    quantization = None
    if options.get("nf4"):
        pytest.importorskip("bitsandbytes")
        packed = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **packed)
    return TrainSpec(
        ModelSpec(AutoConfig.for_model(family, **shape), torch.bfloat16, lora, quantization=quantization),
        losses.of_pairs if pairs else losses.of_labels,
        lambda weights: torch.optim.AdamW(weights, fused=True),
        autocast,
        sharding,
        reference=pairs,
        checkpointing={"use_reentrant": False} | ({"offload": True} if options.get("offload") else {}),
        in_backward=bool(options.get("optimizer_in_backward")),
    )


def test_there_are_records_of_every_kind():
    assert len(RECORDS) >= 10
    options = [record.options for record in RECORDS]
    for key in ("checkpointing", "lora", "config_file", "nf4"):
        assert any(each.get(key) for each in options), key
    assert {"sft", "dpo"} <= {each.get("trainer") for each in options}


@pytest.mark.parametrize(
    "record",
    [pytest.param(r, id=r.name, marks=() if r.name in QUICK else pytest.mark.slow) for r in RECORDS],
)
def test_within_five_percent_of_the_measured_peak(record):
    options = record.options
    job = train_spec_of(options)
    job.fla = not record.name.endswith("-without-fla")
    found = (
        estimate_memory(job, options["batch"], options["length"], bool(options.get("checkpointing")), H200).peak / GIB
    )
    if record.name in BEFORE_SLICES:
        assert 0.9 * record.gib < found < record.gib
        return
    assert found == pytest.approx(record.gib, rel=0.05)
    row = re.search(rf"^\| {re.escape(record.name)} \| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(), re.MULTILINE)
    if row is not None:
        assert [float(number) for number in row.groups()] == pytest.approx([record.gib, found], abs=0.1)


def test_the_table_of_the_page_is_of_records():
    names = re.findall(r"^\| ([a-z]\S+) \| [\d.]+ \| [\d.]+ \|$", PAGE.read_text(), re.MULTILINE)
    assert len(names) >= 10 and set(names) <= {record.name for record in RECORDS}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen2.5-VL-3B", "Qwen3-VL-4B"])
def test_images_within_three_percent_of_the_measured_peak(name, benchmarks_on_path):  # noqa: F811
    """The count may be a little lower: the allocator rounds the odd sizes of a tower's weights up."""
    import images

    model = images.config_of(name)
    vision, ids = model.vision_config, torch.tensor([images.rows_of(1)[0]["input_ids"]])
    ids = ids[:, : images.GRID**2 // 4 + 2]
    given = {
        "pixel_values": torch.zeros(images.GRID**2, 3 * vision.temporal_patch_size * vision.patch_size**2),
        "image_grid_thw": torch.tensor([[1, images.GRID, images.GRID]]),
        "mm_token_type_ids": (ids == images.IMAGE).int(),
    }
    found = estimate_memory(
        TrainSpec(
            ModelSpec(model, torch.bfloat16),
            losses.of_labels,
            lambda weights: torch.optim.AdamW(weights, fused=True),
            torch.bfloat16,
            checkpointing={"use_reentrant": False},
            images=RowImages(ids, given),
        ),
        8,
        ids.shape[1] + (64 + 512) // 2,
        True,
        80 * GIB,
    )
    rows = [
        row
        for path in sorted((ROOT / "benchmarks" / "results" / "images" / "8-rows").glob("*.json"))
        for row in json.loads(path.read_text())["rows"]
        if (row["model"], row["arm"]) == (name, "LigerTrainer")
    ]
    assert found.peak / GIB == pytest.approx(rows[-1]["gib"], rel=0.03)
