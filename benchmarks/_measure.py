"""Shared by all benchmarks: the machine's two ceilings, times, peak memory, errors, and the record of a run."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "transformers", "trl", "liger-kernel", "cut-cross-entropy", "peft", "accelerate")


def arguments(doc, *own):
    """A script's parser with its docstring as help, --json, and the hidden options `own` for its subprocesses."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file of the record; without it a run on a GPU names one in benchmarks/results")
    for option in own:
        parser.add_argument(option, help=argparse.SUPPRESS)
    return parser


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def milliseconds(fn, warmup_ms=30, rep_ms=300, graph=False):
    """The median time of `fn` in ms, by CUDA events, with the L2 cache flushed between runs.

    On a CPU, it is the time of one call.

    With `graph`, `fn` is captured in a CUDA graph, and ten replays of 50 ms each are timed. That is the GPU's time
    without the host's time for launching. Launching takes longer than a short kernel, but hides behind other work in a
    training step. Inputs that fit into the L2 cache (1 token) are then found there.
    """
    if DEVICE == "cuda":
        from triton.testing import do_bench, do_bench_cudagraph

        if graph:
            return do_bench_cudagraph(fn, rep=50, return_mode="median")
        return do_bench(fn, warmup=warmup_ms, rep=rep_ms, return_mode="median")
    fn()  # torch.compile compiles at the first call
    return seconds(fn) * 1e3


def seconds(fn):
    """The wall-clock time of one call of `fn`, including its work on the device."""
    synchronize()
    start = time.perf_counter()
    fn()
    synchronize()
    return time.perf_counter() - start


def peak_gib(fn):
    """The peak memory of one call of `fn` beyond what was allocated before, in GiB. Its results count."""
    if DEVICE != "cuda":
        return float("nan")
    fn()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def relative_error(got, want):
    """||got - want|| / ||want||, the largest over all pairs of tensors in the two sequences."""
    worst = 0.0
    for g, w in zip(got, want, strict=True):
        error = (g.double() - w.double()).norm() / w.double().norm().clamp(min=1e-300)
        worst = max(worst, float("inf") if error.isnan() else error.item())
    return worst


def ceilings(dtype=torch.bfloat16):
    """(copy bandwidth in bytes/s, read and written, matmul rate in `dtype` in FLOP/s), measured on random data."""
    n = 2**30 if DEVICE == "cuda" else 2**22
    a = torch.randn(n // 2, device=DEVICE).bfloat16()
    b = torch.empty_like(a)
    copy = 2 * a.numel() * 2 / (milliseconds(lambda: b.copy_(a)) * 1e-3)
    size = 8192 if DEVICE == "cuda" else 256
    x, y = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
    rate = 2 * size**3 / (milliseconds(lambda: x @ y, rep_ms=400) * 1e-3)
    return copy, rate


def attention_ms(batch, length, heads, kv_heads, head_dim, most=65536):
    """[ms of the forward pass, of forward and backward] of PyTorch's causal attention in bf16.

    Above `most` tokens it is extrapolated from `most` by the square of the length.
    """

    def randn(heads):
        return torch.randn(batch, heads, min(length, most), head_dim, device=DEVICE, dtype=torch.bfloat16)

    inputs = [randn(count).requires_grad_() for count in (heads, kv_heads, kv_heads)]
    dy = randn(heads)

    def forward():
        return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

    both = milliseconds(lambda: torch.autograd.grad(forward(), inputs, dy))
    with torch.no_grad():
        scale = max(1.0, length / most) ** 2
        return [milliseconds(forward) * scale, both * scale]


def output_of(*command):
    """The output of a command, stripped. `None` if it fails, is not installed or prints nothing."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def processor():
    """The name of the processor, which limits the speed of steps with few rows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def package_version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment():
    """The machine and the code of a run.

    `dirty` says that a tracked file differs from the commit; it is `None` without git.
    """
    commit = output_of("git", "rev-parse", "--short", "HEAD")
    driver = DEVICE == "cuda" and output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else None,
        "driver": driver.splitlines()[0] if driver else None,
        "host": {"cpu": processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {name: package_version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "commit": commit,
        "dirty": commit and output_of("git", "status", "--porcelain", "--untracked-files=no") is not None,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


class Record:
    """The file of a run. It says how the run was started, where it ran and what it found.

    Args:
        bench (`str`): The name of the script.
        case (`str`): What was measured, as the name of a folder.
        path (`str`, *optional*): The file to write. Without it, a run on a GPU writes
            `results/<bench>/<case>/<date>-<commit>.json`. A run on a CPU writes no file, because its figures say
            nothing.
        trial (`bool`, *optional*): The sizes only try out the script, so nothing is written without a `path`.
        argv (`list[str]`, *optional*): The arguments of the script. Unset: the process's arguments.
    """

    def __init__(self, bench, case, path=None, trial=False, argv=None):
        self.about = {"argv": [f"benchmarks/{bench}.py", *(sys.argv[1:] if argv is None else argv)]} | environment()
        self.path = Path(path) if path else None
        if path is None and DEVICE == "cuda" and not trial:
            self.path = self.free_path(RESULTS / bench / case)

    def free_path(self, folder):
        stem = self.about["date"].removesuffix(" UTC").replace(" ", "T").replace(":", "")
        stem += f"-{self.about['commit'] or 'no_git'}"
        path = folder / f"{stem}.json"
        count = 1
        while path.exists():
            count += 1
            path = folder / f"{stem}-{count}.json"
        return path

    def write(self, found):
        """Write the results so far, so that an interrupted run keeps them."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(without_folders(self.about | found), indent=1))

    def say_where(self):
        if self.path is not None and self.path.exists():
            print(f"the record is in {self.path}; what of it is published, benchmarks/published.yaml says")


def without_folders(value):
    """Replace absolute paths in a record by the names of their files, since no other machine has these folders."""
    if isinstance(value, dict):
        return {name: without_folders(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(one) for one in value]
    if isinstance(value, Path) or (isinstance(value, str) and os.path.isabs(value)):
        return Path(value).name
    return value


def with_rounded_losses(rows):
    """`rows` with their `losses`, if they have any, rounded for a table."""
    rounded = []
    for row in rows:
        if row.get("losses"):
            row = row | {"losses": [round(loss, 4) for loss in row["losses"]]}
        rounded.append(row)
    return rounded


def table(rows, columns):
    """Print rows (dicts) as a table. `columns` maps a key to its title and format."""

    def cell(value, spec):
        if value is None:
            return "-"
        return format(value, spec) if spec else str(value)

    lines = [[title for title, _ in columns.values()]]
    for row in rows:
        lines.append([cell(row.get(key), spec) for key, (_, spec) in columns.items()])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
