"""The committed records of `benchmarks/training.py`: what our trainers took at most, and with which options."""

import json
from dataclasses import dataclass

from checkout import ROOT

FOLDER = ROOT / "benchmarks" / "results" / "training"


@dataclass
class Recorded:
    """One run of ours on one GPU, or of one process of several."""

    name: str
    options: dict
    gib: float


def newest():
    """The newest run of each case, of the first of our trainers in it."""
    found = []
    for folder in sorted(FOLDER.iterdir()):
        record = json.loads(max(folder.glob("*.json")).read_text())
        options = record["options"]
        if options.get("rows", "full") != "full" or options.get("memory_budget") is not None or options.get("auto"):
            continue
        if "cp2" in (options.get("config_file") or ""):  # context parallelism, which `liger-trainer fit` refuses
            continue
        rows = [row for row in record["rows"] if row["arm"] in ("LigerTrainer", "LigerSFTTrainer", "LigerDPOTrainer")]
        if rows and rows[0].get("gib") is not None:
            found.append(Recorded(folder.name, options, rows[0]["gib"]))
    return found
