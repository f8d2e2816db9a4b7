"""The scripts of `benchmarks/`, which import each other by plain names as they do where they run, and their records."""

import json
import sys
from dataclasses import dataclass

import pytest
from checkout import ROOT

FOLDER = ROOT / "benchmarks" / "results" / "training"


@dataclass
class Recorded:
    """One run of ours on one GPU, or of one process of several."""

    name: str
    options: dict
    gib: float


def of_ours(record):
    """The rows of our trainers."""
    return [row for row in record["rows"] if row["arm"] in ("LigerTrainer", "LigerSFTTrainer", "LigerDPOTrainer")]


def newest():
    """The newest run of each case that has one of our trainers, of the first of them in it."""
    found = []
    for folder in sorted(FOLDER.iterdir()):
        records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        runs = [(record["options"], rows) for record in records if (rows := of_ours(record))]
        if not runs:
            continue
        options, rows = runs[-1]
        if options.get("rows", "full") != "full" or options.get("memory_budget") is not None or options.get("auto"):
            continue
        if "cp2" in (options.get("config_file") or ""):  # context parallelism, which `liger-trainer fit` refuses
            continue
        if options.get("lora") and "fsdp2" in (options.get("config_file") or ""):  # its peak is before it was sharded
            continue
        if rows[0].get("gib") is not None:
            found.append(Recorded(folder.name, options, rows[0]["gib"]))
    return found


BENCHMARKS = str(ROOT / "benchmarks")


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch):
    """Imported into a test module: each of its tests may import the scripts, and leaves none behind."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in [
        name for name, module in sys.modules.items() if (getattr(module, "__file__", "") or "").startswith(BENCHMARKS)
    ]:
        del sys.modules[name]
