"""Pictures of a run's logs and of a comparison, drawn where matplotlib is installed."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liger_trainer._logging import logger

CURVES = "training_curves.png"
# The panels: a title, and the logged keys to draw
_PANELS = (
    ("loss", ("loss", "eval_loss")),
    ("gradient norm", ("grad_norm",)),
    ("reward", ("reward",)),
    ("rewards of chosen and rejected", ("rewards/chosen", "rewards/rejected")),
    ("margin", ("rewards/margins",)),
    ("accuracy", ("rewards/accuracies",)),
)
_COLORS = ("#d55e00", "#0072b2", "#555555")  # from Okabe and Ito's palette for colour-blind readers
_ARMS = {"stock": "#555555", "stock + Liger": "#0072b2", "ours": "#d55e00"}  # as in the figures of the docs
_STYLES = ("-", "--", ":")  # different styles, so that lines with equal values stay visible


def draw_curves(history: list[dict[str, Any]], path: Path) -> bool:
    """Draw loss, gradient norm, rewards and margins from a trainer's `log_history`. Return False if that fails.

    This runs while the model is being saved, so it must not raise.
    """
    panels = []
    for title, keys in _PANELS:
        lines = {}
        for key in keys:
            line = [(log["step"], float(log[key])) for log in history if log.get(key) is not None]
            if line:
                lines[key] = line
        if lines:
            panels.append((title, lines))
    if not panels or importlib.util.find_spec("matplotlib") is None:
        return False
    try:
        figure, axes = _figure(len(panels))
        for axis, (title, lines) in zip(axes, panels, strict=True):
            _draw_lines(axis, title, lines)
        figure.savefig(path, dpi=110)
    except Exception as error:
        logger.warning(f"{path.name} is not drawn: {type(error).__name__}: {error}")
        return False
    return True


def draw_comparison(arms: list[dict[str, Any]], where: str, path: str) -> None:
    """Draw speed, peak memory and losses of the arms of `liger-trainer compare`."""
    figure, axes = _figure(3)
    ran = [arm for arm in arms if "losses" in arm]
    for axis, key, title in ((axes[0], "tokens_per_s", "useful tokens/s"), (axes[1], "peak_gib", "peak memory, GiB")):
        if not any(arm.get(key) for arm in ran):  # the trainer does not count tokens
            key, title = "step_s", "seconds a step"
        for arm in ran:
            bar = axis.bar(arm["arm"], arm[key] or 0, color=_ARMS[arm["arm"]])
            axis.bar_label(bar, fmt="{:,.4g}", fontsize=8)
        axis.set_title(title, loc="left", fontsize=9)
    losses = {arm["arm"]: list(enumerate(arm["losses"], 1)) for arm in ran}
    _draw_lines(axes[2], "loss", losses, [_ARMS[name] for name in losses])
    figure.suptitle(where, fontsize=9)
    figure.savefig(path, dpi=110)


def _figure(panels: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # without pyplot, which would choose a backend for the whole process

    figure = Figure(figsize=(3.6 * panels, 3), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return figure, axes


def _draw_lines(
    axis: Any, title: str, lines: dict[str, list[tuple[int, float]]], colors: Sequence[str] = _COLORS
) -> None:
    for color, style, (label, line) in zip(colors, _STYLES, lines.items(), strict=False):
        marker = "o" if len(line) < 20 else None
        axis.plot(*zip(*line, strict=True), color=color, linestyle=style, label=label, marker=marker, markersize=3)
    axis.set_title(title, loc="left", fontsize=9)
    axis.set_xlabel("step", fontsize=8)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(axis="y", linewidth=0.4)
    if len(lines) > 1:
        axis.legend(fontsize=8, frameon=False)
