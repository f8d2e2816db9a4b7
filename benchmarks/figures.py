"""The figures of README and docs. `render.py` draws them from the records that `published.yaml` lists for each.

Colours are Okabe and Ito's, which people with any kind of colour blindness can tell apart; markers differ too.
"""

import matplotlib.pyplot as plt
from _tables import is_ours, role

OURS = "#d55e00"
LIGER = "#0072b2"
STOCK = "#555555"
COMPILE = "#009e73"
TRAINERS = {  # colour, marker, title
    "stock": (STOCK, "^", "Trainer"),
    "liger": (LIGER, "s", "Trainer + Liger"),
    "ours": (OURS, "o", "LigerTrainer"),
}
PROVIDERS = {"ours": OURS, "compile": COMPILE, "liger": LIGER}
PROVIDER_TITLES = {"ours": "ours", "compile": "torch.compile", "liger": "Liger"}
AXES = {"batch": "rows of 1024 tokens in a step", "context": "tokens of the one row in a step (k: 1024)"}


def where(record):
    return f"{record['gpu'] or record['host']['cpu']}, {record['date'][:10]}"


def finish_lines(axis, ticks, title):
    """Put ticks at the measured points, on a scale of powers of two; start at 0."""
    axis.set_xscale("log", base=2)
    axis.minorticks_off()
    names = [f"{tick // 1024}k" if tick % 1024 == 0 else str(tick) for tick in sorted(ticks)]
    axis.set_xticks(sorted(ticks), names, fontsize=8)
    axis.tick_params(axis="y", labelsize=8)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.grid(axis="y", linewidth=0.4)
    axis.set_title(title, loc="left", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)


def trainers(records, axis):
    """Tokens/s and peak memory of three trainers along one axis of scaling.py, of one run."""
    (record,) = records
    rows = [row for row in record["rows"] if row["axis"] == axis and "tokens_per_s" in row]
    figure, panels = plt.subplots(1, 2, figsize=(7, 2.9), layout="constrained")
    for panel, (key, title) in zip(panels, (("tokens_per_s", "tokens/s"), ("gib", "peak memory, GiB")), strict=True):
        for name, (color, marker, label) in TRAINERS.items():
            points = sorted((row["value"], row[key]) for row in rows if role(row["arm"]) == name)
            panel.plot(*zip(*points, strict=True), marker=marker, markersize=5, linewidth=1.6, color=color, label=label)
        finish_lines(panel, {row["value"] for row in rows}, title)
        panel.set_xlabel(AXES[axis], fontsize=8)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    how = "full fine-tuning in bf16" + (", with checkpointing" if axis == "context" else "")
    figure.suptitle(f"{record['options']['model']}, {how}, {where(record)}", fontsize=9)
    return figure


def cases(records, names):
    """Bars of tokens/s and peak memory of three trainers: one group a record, with the speed over Trainer + Liger."""
    figure, panels = plt.subplots(1, 2, figsize=(7, 0.62 * len(records) + 1.1), layout="constrained", sharey=True)
    height = 0.27
    for panel, (key, form) in zip(panels, (("tokens_per_s", "{:,.0f}"), ("gib", "{:.1f}")), strict=True):
        for k, record in enumerate(records):
            values = {role(row["arm"]): row[key] for row in record["rows"] if key in row}
            for place, (name, (color, _, label)) in enumerate(TRAINERS.items()):
                if name in values:
                    text = form.format(values[name])
                    if name == "ours" and key == "tokens_per_s":
                        text += f"  ({values[name] / values['liger']:.2f} x)"
                    at = k + height * (place - 1)
                    panel.barh(at, values[name], height * 0.95, color=color, label=label if k == 0 else None)
                    panel.text(values[name], at, f" {text}", va="center", fontsize=7)
        panel.set_xlim(0, 1.3 * max(bar.get_width() for bar in panel.patches))
        panel.set_xticks([])
        panel.tick_params(axis="y", length=0)
        panel.spines[["top", "right", "bottom"]].set_visible(False)
    panels[0].set_yticks(range(len(records)), names, fontsize=8)
    panels[0].set_ylim(len(records) - 0.5, -0.5)
    panels[0].set_title("tokens/s  (over Trainer + Liger)", loc="left", fontsize=9)
    panels[1].set_title("peak memory, GiB", loc="left", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    days = sorted({record["date"][:10] for record in records})
    (gpu,) = {record["gpu"] for record in records}
    model, when = records[0]["options"]["model"], " and ".join(days)
    figure.suptitle(f"{model} in bf16, SFTTrainer, one {gpu}, {when}", fontsize=9)
    return figure


def operations(records):
    """Bars of the fraction of the floor: one group an operation and size, of the last run that has it in bf16."""
    groups = {}
    for record in records:
        for row in record["rows"]:
            if row.get("dtype", "bfloat16") == "bfloat16" and row["provider"] in PROVIDERS and "of_floor" in row:
                groups.setdefault((row["operation"], row["size"]), {})[row["provider"]] = row["of_floor"]
    figure, axis = plt.subplots(figsize=(7, 0.46 * len(groups) + 0.9), layout="constrained")
    blank = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # behind a number that meets the line of the floor
    for k, of_floor in enumerate(groups.values()):
        for place, (provider, color) in enumerate(PROVIDERS.items()):
            if provider in of_floor:
                label = PROVIDER_TITLES[provider] if k == 0 else None
                bar = axis.barh(k + 0.27 * (place - 1), of_floor[provider], 0.26, color=color, label=label)
                axis.bar_label(bar, fmt="{:.2f}", padding=2, fontsize=6.5, bbox=blank)
    axis.set_yticks(range(len(groups)), [f"{operation}\n{size}" for operation, size in groups], fontsize=7)
    axis.set_ylim(len(groups) - 0.5, -0.6)
    axis.set_xlim(0, 1.15)
    axis.axvline(1, color="black", linewidth=0.8, linestyle=":", zorder=0)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.suptitle(f"Fraction of the physical floor, {where(records[0])}; longer is faster", fontsize=9)
    return figure


def medusa(records):
    """Tokens/s over memory beyond the static part, a column per stage and projection; no point: out of memory."""
    (record,) = records
    rows = [row for row in record["rows"] if "tokens_per_s" in row]
    panels = sorted({(row["stage"], not row["tied"]) for row in rows})
    figure, axes = plt.subplots(
        2, len(panels), figsize=(3.9 * max(len(panels), 2), 6.4), layout="constrained", squeeze=False
    )
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
                color, marker = (OURS, "o") if is_ours(arm) else (STOCK, "^")
                if points:
                    axis.plot(
                        *zip(*points, strict=True),
                        styles[heads],
                        marker=marker,
                        markersize=4,
                        color=color,
                        label=f"{arm}, K = {heads}",
                    )
            kind = "untied" if untied else "tied"
            finish_lines(axis, {row["length"] for row in rows}, f"stage {stage}, {kind}: {title}")
    axes[0, 0].legend(fontsize=8, frameon=False)
    options = record["options"]
    figure.suptitle(
        f"Medusa heads, {options['model']}, {options['batch']} rows a step, bf16, {where(record)}\n"
        "above: peak memory beyond weights, gradients and optimizer",
        fontsize=11,
    )
    return figure
