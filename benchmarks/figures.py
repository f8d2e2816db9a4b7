"""Draw the figures of the docs from the records in benchmarks/results.

    python benchmarks/figures.py
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
OURS, PEER = "#d9480f", "#868e96"


def bars(axis, rows, key, title):
    names = [row["arm"] for row in rows]
    values = [row[key] for row in rows]
    axis.barh(names, values, color=[OURS if name.startswith("Liger") else PEER for name in names])
    axis.bar_label(axis.containers[0], fmt="{:,.0f}" if key == "tokens_per_s" else "{:.1f}", padding=3)
    axis.set_xlim(0, max(values) * 1.18)
    axis.set_title(title, loc="left", fontsize=10)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)


def training(path):
    record = json.loads(path.read_text())
    options, rows = record["options"], [row for row in record["rows"] if "tokens_per_s" in row]
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.5 * len(rows) + 1.2), sharey=True, layout="constrained")
    bars(axes[0], rows, "tokens_per_s", "tokens/s")
    bars(axes[1], rows, "gib", "peak memory, GiB")
    checkpointing = "with checkpointing" if options["checkpointing"] else "no checkpointing"
    figure.suptitle(
        f"{options['model']}, {options['batch']} x {options['length']} tokens, bf16, {checkpointing}, {record['gpu']}, "
        f"{record['date'][:10]}",
        fontsize=11,
    )
    figure.savefig(HERE.parent / "docs" / f"{path.stem}.png", dpi=120)


if __name__ == "__main__":
    for found in sorted((HERE / "results").glob("training_*.json")):
        training(found)
