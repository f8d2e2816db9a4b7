"""Draw the figures of the docs from the records in benchmarks/results: docs/<name of the record>.png.

    python benchmarks/figures.py [FILE ...]

The kind of a record is the first word of its name: operations_*, training_*, scaling_*, medusa_*.
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
OURS, PEER = "#d9480f", "#868e96"
PEERS = ("#343a40", "#1c7ed6", "#868e96", "#37b24d")  # lines of a plot
TITLES = {"batch": "rows of 1024 tokens", "vocabulary": "vocabulary", "context": "tokens of one row, checkpointing"}


def is_ours(name):
    return name.lower().startswith(("liger", "ours")) and name not in ("liger", "liger fp32")


def bars(axis, rows, name, value, title, fmt):
    names, values = [row[name] for row in rows], [row[value] for row in rows]
    axis.barh(names, values, color=[OURS if is_ours(n) else PEER for n in names])
    axis.bar_label(axis.containers[0], fmt=fmt, padding=3)
    axis.set_xlim(0, max(values) * 1.18)
    axis.set_title(title, loc="left", fontsize=10)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)


def finish_lines(axis, ticks, title):
    """Ticks where something was measured, on a scale of powers of two; from 0 upwards."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)], fontsize=7)
    axis.set_ylim(bottom=0)
    axis.set_title(title, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def where(record):
    return f"{record['gpu']}, {record['date'][:10]}"


def operations(record):
    """Bars of the fraction of the floor, one panel an operation and size."""
    panels = {}
    for row in record["rows"]:
        if "of_floor" in row:
            panels.setdefault((row["operation"], row["size"], row.get("dtype", "bfloat16")), []).append(row)
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.6 * columns, 2.4 * lines), layout="constrained", squeeze=False
    )
    for axis, ((operation, size, dtype), rows) in zip(axes.flat, panels.items(), strict=False):
        bars(axis, rows, "provider", "of_floor", f"{operation} {size}", "{:.2f}")
        if dtype != "bfloat16":
            axis.set_title(f"{operation} {size} {dtype}", loc="left", fontsize=10)
        axis.set_xlim(0, max(1.2, axis.get_xlim()[1]))
        axis.axvline(1, color="black", linewidth=0.8, linestyle=":")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(f"Fraction of the physical floor, forward + backward, {where(record)}", fontsize=11)
    return figure


def training(record):
    options, rows = record["options"], [row for row in record["rows"] if "tokens_per_s" in row]
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.5 * len(rows) + 1.2), sharey=True, layout="constrained")
    bars(axes[0], rows, "arm", "tokens_per_s", "tokens/s", "{:,.0f}")
    bars(axes[1], rows, "arm", "gib", "peak memory, GiB", "{:.1f}")
    dpo = options.get("trainer") == "dpo"
    what = f"{options['batch']} {'pairs of 2 x' if dpo else 'x'} {options['length']} tokens"
    parts = ["DPO" if dpo else None, options["model"], what, "bf16"]
    parts += [f"LoRA r={options['lora']}" if options["lora"] else None]
    parts += ["with checkpointing" if options["checkpointing"] else "no checkpointing", where(record)]
    figure.suptitle(", ".join(part for part in parts if part), fontsize=11)
    return figure


def scaling(record):
    """Lines of tokens/s above lines of peak memory, a column an axis; the longest context as bars."""
    rows = [row for row in record["rows"] if "tokens_per_s" in row]
    names = [name for name in record["options"]["axes"] if any(row["axis"] == name for row in rows)]
    grown = [name for name in names if name != "longest"]
    figure = plt.figure(figsize=(4.6 * max(len(names), 2), 6 if grown else 2.8), layout="constrained")
    grid = figure.add_gridspec(2 if grown else 1, len(names))
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    peers = [arm for arm in arms if not is_ours(arm)]
    for k, name in enumerate(names):
        of_axis = [row for row in rows if row["axis"] == name]
        if name == "longest":
            memory = record["options"]["memory"]
            axis = figure.add_subplot(grid[:, k])
            bars(axis, of_axis, "arm", "value", f"longest context in {memory:g} GiB, tokens", "{:,.0f}")
            continue
        for line, (key, title) in enumerate((("tokens_per_s", "tokens/s"), ("gib", "peak memory, GiB"))):
            axis = figure.add_subplot(grid[line, k])
            for arm in arms:
                points = [(row["value"], row[key]) for row in of_axis if row["arm"] == arm]
                color = OURS if is_ours(arm) else PEERS[peers.index(arm) % len(PEERS)]
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, color=color, label=arm)
            finish_lines(axis, {row["value"] for row in of_axis}, f"{title}: {TITLES[name]}")
    if grown:
        figure.axes[0].legend(fontsize=8, frameon=False)
    options = record["options"]
    figure.suptitle(f"{options['trainer'].upper()} {options['model']}, bf16, {where(record)}", fontsize=11)
    return figure


def medusa(record):
    """Tokens/s above memory beyond the static part, a column a stage and projection; no point: out of memory."""
    rows = [row for row in record["rows"] if "tokens_per_s" in row]
    panels = sorted({(row["stage"], not row["tied"]) for row in rows})
    figure, axes = plt.subplots(
        2, len(panels), figsize=(3.9 * max(len(panels), 2), 6.4), layout="constrained", squeeze=False
    )
    peers = list(dict.fromkeys(row["arm"] for row in rows if not is_ours(row["arm"])))
    styles = dict(zip(sorted({row["heads"] for row in rows}), ("--", "-", ":"), strict=False))
    for column, (stage, untied) in enumerate(panels):
        here = [row for row in rows if (row["stage"], not row["tied"]) == (stage, untied)]
        for axis, (key, title) in zip(
            axes[:, column], (("tokens_per_s", "tokens/s"), ("above", "GiB above")), strict=True
        ):
            for arm, heads in sorted({(row["arm"], row["heads"]) for row in here}):
                points = [
                    (row["length"], row[key])
                    for row in sorted(here, key=lambda row: row["length"])
                    if (row["arm"], row["heads"]) == (arm, heads) and row[key] is not None
                ]
                color = OURS if is_ours(arm) else PEERS[peers.index(arm) % len(PEERS)]
                label = f"{arm}, K = {heads}"
                if points:
                    axis.plot(
                        *zip(*points, strict=True), styles[heads], marker="o", markersize=3, color=color, label=label
                    )
            kind = "untied" if untied else "tied"
            finish_lines(axis, {row["length"] for row in rows}, f"stage {stage}, {kind}: {title}")
    axes[0, 0].legend(fontsize=7, frameon=False)
    options = record["options"]
    figure.suptitle(
        f"Medusa heads, {options['model']}, {options['batch']} rows a step, bf16, {where(record)}\n"
        "above: peak memory beyond weights, gradients and optimizer",
        fontsize=11,
    )
    return figure


KINDS = {"operations": operations, "training": training, "scaling": scaling, "medusa": medusa}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=sorted((HERE / "results").glob("*.json")))
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs", help="folder of the figures")
    options = parser.parse_args()
    for path in options.files:
        draw = KINDS.get(path.stem.split("_")[0])
        if draw is None:
            print(f"{path.name}: no figure is drawn of such a record")
            continue
        figure = draw(json.loads(path.read_text()))
        figure.savefig(options.out / f"{path.stem}.png", dpi=120)
        plt.close(figure)


if __name__ == "__main__":
    main()
