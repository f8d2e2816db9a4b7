"""The report on packages that compute rules of linear attention, if one is missing or refuses."""

import importlib.util
import logging
import re
from pathlib import Path

import pytest
import torch
import transformers
from attentions import PAGE, with_own_attention
from datasets import Dataset
from installed_packages import install_packages
from tiny_models import tiny_model

from liger_trainer import LigerTrainer, LigerTrainingArguments, apply_liger
from liger_trainer.patching import rule_packages

RULES = {
    "qwen3_5_text": ("the gated delta rule", "flash-linear-attention"),
    "kimi_linear": ("Kimi delta attention", "flash-linear-attention"),
    "nemotron_h": ("the scan of Mamba 2", "mamba-ssm"),
    "jamba": ("the scan of Mamba", "mamba-ssm"),
}


@pytest.fixture
def gpu(monkeypatch):
    """`gpu(capability, triton)` makes PyTorch report an NVIDIA GPU with this Triton and without TileLang."""

    def there_is(capability=(8, 0), triton="3.6.0", tilelang=False):
        find_spec = importlib.util.find_spec
        spec = object() if tilelang else None
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
        monkeypatch.setattr(rule_packages, "_triton", lambda: triton)
        monkeypatch.setattr(importlib.util, "find_spec", lambda x: spec if x == "tilelang" else find_spec(x))

    return there_is


@pytest.mark.parametrize("name", RULES)
def test_a_rule_without_its_package(name, gpu):
    model, _ = with_own_attention(name)
    assert rule_packages.advice(model) == [], "it says nothing of packages that run on a GPU alone"
    gpu()
    (said,) = rule_packages.advice(model)
    rule, package = RULES[name]
    assert said.startswith("In 1 layer, " + rule) and f"{package} is not installed" in said
    assert ("pip install 'liger-trainer[linear-attention]'" in said) is (package == "flash-linear-attention")
    assert ("no wheel" in said) is (package == "mamba-ssm")


def test_models_without_such_rules(gpu):
    gpu()
    assert rule_packages.advice(tiny_model("llama")) == rule_packages.advice(with_own_attention("lfm2")[0]) == []


REFUSED = {("3.4.0", (9, 0)), ("3.6.0", (9, 0)), ("3.7.0", (9, 0))}


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("triton", ["3.3.1", "3.4.0", "3.6.0", "3.7.0", "3.7.1", "3.9.0"])
def test_a_package_that_refuses(triton, capability, gpu, monkeypatch):
    model, _ = with_own_attention("qwen3_5_text")
    install_packages(monkeypatch, type(model).__module__)
    gpu(capability, triton)
    said = rule_packages.advice(model)
    if (triton, capability) not in REFUSED:
        assert said == []
        return
    assert len(said) == 1 and f"with Triton {triton} on this GPU" in said[0] and "triton>=3.7.1" in said[0]
    gpu(capability, triton, tilelang=True)
    assert rule_packages.advice(model) == []


def test_kimi_s_rule_is_not_refused(gpu, monkeypatch):
    model, _ = with_own_attention("kimi_linear")
    install_packages(monkeypatch, type(model).__module__)
    gpu((9, 0), "3.6.0")
    assert rule_packages.advice(model) == []


def test_the_report_and_the_first_line_of_a_trainer_say_it(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(rule_packages, "advice", lambda model: ["Install this"])
    model, _ = with_own_attention("qwen3_5_text")
    report = apply_liger(model)
    assert report.to_dict()["advice"] == ["Install this"]
    assert str(report).splitlines()[-1] == "Install this" and report.one_line().endswith(". Install this")
    rows = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}])
    args = LigerTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with caplog.at_level(logging.INFO, "liger_trainer"):
        LigerTrainer(model, args, train_dataset=rows)
    first = next(record for record in caplog.records if record.name.startswith("liger_trainer"))
    assert first.getMessage().startswith("Qwen3_5") and first.getMessage().endswith(". Install this")


TABLE = {  # start of a row in docs/padding.md -> function of the package
    "gated delta rule": "chunk_gated_delta_rule",
    "Kimi delta attention": "chunk_kda",
    "Mamba 2": "mamba_chunk_scan_combined",
    "Mamba 1": "selective_scan_fn",
}


@pytest.mark.parametrize("rule", TABLE)
def test_the_table_of_the_docs_equals_transformers(rule):
    """Types of another version are left out. A new type has to be added to its row."""
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {rule} |")]
    listed = set(re.findall(r"`(\w+)`", row.split("|")[2]))
    files = [*Path(transformers.__file__).parent.glob("models/*/modeling_*.py")]
    chosen = re.compile(rf'with_fallback\(\s*"{TABLE[rule]}"')
    calls = {path.parent.name for path in files if chosen.search(path.read_text())}
    alone = {"mamba", "mamba2", "falcon_mamba"}  # pure state space models, which keep their own code
    experimental = {"glm5_next", "qwen4_exp"}  # they compute padding everywhere
    assert calls - alone - experimental == listed & {path.parent.name for path in files}
