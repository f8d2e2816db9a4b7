"""How the time and memory of a training step grow with tokens, vocabulary and context, and the longest context.

    python benchmarks/scaling.py --model Llama-3.2-1B [--axes batch vocabulary context] [--json FILE]
    python benchmarks/scaling.py --axes longest --memory 24 [--trainer dpo]

`batch` varies the number of rows of 1024 tokens, `vocabulary` the vocabulary of 8 rows of 1024 tokens, and `context`
the length of one row, with gradient checkpointing. `longest` finds the longest row (for DPO, the longest sequences of
one pair), in multiples of `--unit`, such that two steps with checkpointing fit into `--memory` GiB. That is all memory
of PyTorch's allocator, with weights and optimizer, but without the CUDA context. Training is full fine-tuning in bf16,
as in `training.py`, and every arm runs in its own process. A size that does not fit is a row that says so. The record
is written after every row, and no row starts after --minutes.
"""

import argparse
import time
from dataclasses import replace

import torch
from _measure import DEVICE, Record, arguments, table
from _models import MODELS
from _processes import emit, is_out_of_memory, release, rows_from
from _steps import ARMS, Run, check_arms, flag_losses, train

DEFAULT_ARMS = {
    "sft": ("LigerTrainer", "Trainer", "Trainer + Liger", "SFTTrainer"),
    "dpo": ("LigerDPOTrainer", "DPOTrainer", "DPOTrainer + Liger"),
}
POINTS = {
    "batch": [1, 2, 4, 8, 16, 32],
    "vocabulary": [32000, 65536, 128256, 262144],
    "context": [1024, 2048, 4096, 8192, 16384, 32768, 65536],
}
TINY_POINTS = {"batch": [1, 2], "vocabulary": [331, 1031], "context": [32, 64]}
TITLES = {"batch": "rows", "vocabulary": "vocabulary", "context": "tokens of the row"}


def run_at(axis, value, options):
    row = 32 if options.tiny else 1024
    base = Run(options.model, batch=8, length=row, trainer=options.trainer, steps=5, skip=2, data=options.data)
    if axis == "batch":
        return replace(base, batch=value)
    if axis == "vocabulary":
        return replace(base, vocab=value)
    base = replace(base, batch=1, length=value, checkpointing=True)
    # The first step has no optimizer state yet when its activations peak.
    return base if axis == "context" else replace(base, steps=2, skip=1)


def point(axis, value, options):
    """The row of one point. If there is not enough memory, the row says so."""
    left_gib = torch.cuda.memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
    try:
        row = train(options.arm, run_at(axis, value, options))
        row.pop("patched", None)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        row = {"arm": options.arm, "note": "out of memory"}
    return row | {"axis": axis, "value": value, "left_gib": left_gib}


def next_length(fits, fails, cap_gib, unit):
    """The length to try next, a multiple of `unit`.

    Args:
        fits (`dict`): Lengths that fit, with their peaks in GiB.
        fails (`int` or `None`): The shortest length known not to fit.
        cap_gib (`float`): Available memory.
        unit (`int`): Resolution.

    Returns:
        `int`: A length between what fits and what does not. As long as nothing has failed, memory is assumed to grow
            linearly from the two longest lengths that fit. After that the gap is halved.
    """
    low = max(fits, default=0)
    if fails is not None:
        guess = (low + fails) // 2
        return min(max(guess // unit * unit, low + unit), fails - unit)
    guess = 2 * low
    if len(fits) > 1:
        before = sorted(fits)[-2]
        slope = (fits[low] - fits[before]) / (low - before)
        if slope > 0:
            guess = low + 0.97 * (cap_gib - fits[low]) / slope  # a little less, for a second point near the border
    # It grows by at least 1/64, because steps of one unit would take long after an overestimate.
    guess = min(max(guess, low + low // 64), 16 * low)
    return max(int(guess) // unit * unit, low + unit)


def longest(try_length, first, cap_gib, unit, limit, hurry=lambda: False):
    """(length, peak in GiB, shortest failure or None) of the longest multiple of `unit` that fits, at most `limit`.

    Args:
        try_length (`Callable`): length -> peak in GiB, or `None` if it does not fit.
        first (`int`): The first length to try, a multiple of `unit`.
        hurry (`Callable`): True when the search should stop with what it has.
    """
    fits = {}
    fails = None
    length = min(first, limit)
    while True:
        peak = try_length(length)
        if peak is None:
            fails = length
        else:
            fits[length] = peak
        low = max(fits, default=0)
        if low >= limit or (fails is not None and fails - low <= unit) or hurry():
            return low, fits.get(low), fails
        length = min(next_length(fits, fails, cap_gib, unit), limit)


def longest_row(options):
    if DEVICE == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory * 2**30 / total))
    rows = []

    def try_length(length):
        row = point("longest", length, options)
        release()
        rows.append(row)
        return None if "note" in row else row["gib"] or 0.0

    length, gib, fails = longest(
        try_length, 4 * options.unit, options.memory, options.unit, options.limit, lambda: over(options)
    )
    row = next((row for row in rows if row["value"] == length), {"arm": options.arm, "axis": "longest"})
    row = row | {"value": length, "gib": gib, "tried": [[row["value"], "note" not in row] for row in rows]}
    if fails is None:
        row["note"] = f"at least: nothing above {length} was tried"
    elif fails - length > options.unit:
        row["note"] = f"stopped by --minutes: {fails} does not fit"
    return row


def over(options):
    return time.time() > options.until


def one_arm(options):
    end = options.until
    for k, axis in enumerate(options.axes):
        options.until = shared(end, len(options.axes) - k)
        if axis == "longest":
            emit(longest_row(options))
            continue
        for value in (TINY_POINTS if options.tiny else POINTS)[axis]:
            if over(options):
                break
            row = point(axis, value, options)
            release()
            emit(row)
            if "note" in row:
                break  # larger sizes do not fit either


def shared(end, heirs):
    """When the first of `heirs` should stop, so that all get an equal share of the time until `end`."""
    return time.time() + (end - time.time()) / heirs


def print_tables(rows, options, arms):
    for axis in options.axes:
        found = [row for row in rows if row.get("axis") == axis]
        for value in {row["value"] for row in found} if axis != "longest" else ():
            flag_losses([row for row in found if row["value"] == value])
        if axis == "longest":
            print(f"longest context in {options.memory:g} GiB, batch 1, checkpointing")
            columns = {"arm": ("trainer", ""), "value": ("tokens", ""), "gib": ("peak GiB", ".1f")}
            table(found, columns | {"tokens_per_s": ("tokens/s", ".0f"), "note": ("", "")})
            continue
        print(f"{axis}: tokens/s, peak GiB")
        lines, columns = {}, {"value": (TITLES[axis], "")}
        for row in found:
            cell = row.get("note") or f"{row['tokens_per_s']:.0f}, {row['gib'] or float('nan'):.1f}"
            lines.setdefault(row["value"], {"value": row["value"]})[row["arm"]] = cell
        table([lines[value] for value in sorted(lines)], columns | {arm: (arm, "") for arm in arms})
    for row in rows:
        if row.get("left_gib", 0) > 0.5:
            print(
                f"{row['arm']}, {row['axis']} {row['value']}: {row['left_gib']:.1f} GiB were left by an earlier point"
            )
        if "axis" not in row:
            print(f"{row['arm']}: {row['note']}")


def main():
    parser = arguments(__doc__, "--arm")
    parser.add_argument("--model", choices=MODELS, default="Llama-3.2-1B")
    parser.add_argument("--trainer", choices=ARMS, default="sft")
    parser.add_argument("--axes", nargs="*", choices=[*POINTS, "longest"], default=list(POINTS))
    parser.add_argument("--arms", nargs="*", help="as for training.py; default the four (DPO: three) main ones")
    parser.add_argument("--memory", type=float, default=24, help="GiB, for longest (default 24)")
    parser.add_argument("--unit", type=int, default=1024, help="tokens, resolution of longest (default 1024)")
    parser.add_argument("--limit", type=int, default=2**20, help="tokens at which longest stops (default 1048576)")
    parser.add_argument("--data", help="as for training.py")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script on a CPU with --model tiny")
    parser.add_argument("--minutes", type=float, default=9, help="begin no row after so many (default 9)")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    arms = options.arms or DEFAULT_ARMS[options.trainer]
    check_arms(parser, options.trainer, arms)
    if options.unit < 1 or options.limit % options.unit:
        parser.error(f"--limit is {options.limit}; expected a multiple of --unit, {options.unit}")
    if options.arm:
        return one_arm(options)
    case = "-".join([options.trainer, options.model.lower(), *options.axes])
    record = Record("scaling", case, options.json, options.tiny)
    began, rows = time.time(), []
    for k, arm in enumerate(arms):
        until = shared(began + 60 * options.minutes, len(arms) - k)
        # Without growing segments, a run would fail by fragmentation before it fails by its needs.
        env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        for row in rows_from(arm, until - time.time() + 120, env=env, more=["--until", str(until)]):
            rows.append(row)
            record.write({"options": vars(options), "rows": rows})
    print(f"{options.trainer.upper()} {options.model}")
    print_tables(rows, options, arms)
    record.say_where()


if __name__ == "__main__":
    main()
