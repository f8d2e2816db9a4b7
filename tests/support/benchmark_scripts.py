"""Import the scripts of `benchmarks/` by plain names, as they import each other, and read their records."""

import json
import sys
from dataclasses import dataclass

import pytest
from checkout import ROOT

FOLDER = ROOT / "benchmarks" / "results" / "training"


@dataclass
class Recorded:
    """One of our runs on one GPU, or on one process out of several."""

    name: str
    options: dict
    gib: float


OURS = ("LigerTrainer", "LigerSFTTrainer", "LigerDPOTrainer")


def of_ours(record):
    """The rows that our trainers made without captures and shared prompts, of which `fit` counts neither."""
    found = [row for row in record["rows"] if row["arm"].split(" - ")[0] in OURS]
    found = [row for row in found if not (row.get("captured") or {}).get("sizes")]
    return [row for row in found if not (row.get("shared_prompts") or {}).get("tokens_saved")]


def newest():
    """The newest run of each case that has one of our trainers; of several trainers, the first."""
    found = []
    for folder in sorted(FOLDER.iterdir()):
        records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        runs = [(record["options"], of_ours(record)) for record in records]
        runs = [(options, rows) for options, rows in runs if rows]
        if not runs:
            continue
        options, rows = runs[-1]
        if options.get("rows", "full") != "full" or options.get("memory_budget") is not None or options.get("auto"):
            continue
        if "cp2" in (options.get("config_file") or ""):  # context parallelism, which `liger-trainer fit` refuses
            continue
        if options.get("lora") and "fsdp2" in (options.get("config_file") or ""):  # its peak comes before it is sharded
            continue
        if rows[0].get("gib") is not None:
            found.append(Recorded(folder.name, options, rows[0]["gib"]))
    return found


BENCHMARKS = str(ROOT / "benchmarks")


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch):
    """Import this into a test module: its tests may then import the scripts, and each leaves none behind."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in [
        name for name, module in sys.modules.items() if (getattr(module, "__file__", "") or "").startswith(BENCHMARKS)
    ]:
        del sys.modules[name]
