"""What every benchmark shares: the machine's two ceilings, times, peak memory, errors, and the record of a run."""

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


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def milliseconds(fn, warmup_ms=30, rep_ms=300, graph=False):
    """Median time of `fn` in ms by CUDA events (the L2 cache is flushed between runs); on CPU by one call.

    With `graph`, `fn` is captured in a CUDA graph and its replays are timed, ten of 50 ms each: what the GPU needs,
    without the time of the host to launch it, which exceeds that of a short kernel and hides behind other work in a
    training step. What fits the L2 cache (1 token) is then found there.
    """
    if DEVICE == "cuda":
        from triton.testing import do_bench, do_bench_cudagraph

        if graph:
            return do_bench_cudagraph(fn, rep=50, return_mode="median")
        return do_bench(fn, warmup=warmup_ms, rep=rep_ms, return_mode="median")
    fn()  # torch.compile compiles at the first call
    return seconds(fn) * 1e3


def seconds(fn):
    """Wall-clock time of one call of `fn`, its work on the device included."""
    synchronize()
    start = time.perf_counter()
    fn()
    synchronize()
    return time.perf_counter() - start


def peak_gib(fn):
    """Peak memory of one call of `fn` beyond what was allocated before it, in GiB; its results are counted."""
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
    """||got - want|| / ||want||, over all tensors of the two sequences taken one by one: the largest."""
    worst = 0.0
    for g, w in zip(got, want, strict=True):
        error = (g.double() - w.double()).norm() / w.double().norm().clamp(min=1e-300)
        worst = max(worst, float("inf") if error.isnan() else error.item())
    return worst


def ceilings(dtype=torch.bfloat16):
    """Copy bandwidth in bytes/s (read + written) and matmul rate in `dtype` in FLOP/s, measured on random data."""
    n = 2**30 if DEVICE == "cuda" else 2**22
    a = torch.randn(n // 2, device=DEVICE).bfloat16()
    b = torch.empty_like(a)
    copy = 2 * a.numel() * 2 / (milliseconds(lambda: b.copy_(a)) * 1e-3)
    size = 8192 if DEVICE == "cuda" else 256
    x, y = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
    rate = 2 * size**3 / (milliseconds(lambda: x @ y, rep_ms=400) * 1e-3)
    return copy, rate


def output_of(*command):
    """What a command prints, stripped; `None` where it fails, is not installed or prints nothing."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def processor():
    """The processor's name: the host sets the pace of steps of few rows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def package_version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment():
    """Where and on what code a run takes place. `dirty`: a tracked file differs from the commit; `None` without git."""
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
    """The file that a run leaves behind: how it was started, where, and what it found.

    Args:
        bench (`str`): The script's name.
        case (`str`): What it measured, a name for a folder.
        path (`str`, *optional*): File to write. Without it a run on a GPU writes
            `results/<bench>/<case>/<date>-<commit>.json`, and a run on a CPU, whose figures say nothing, no file.
        trial (`bool`, *optional*): The sizes only try the script: no file without a `path` either.
        argv (`list[str]`, *optional*): Arguments of the script; those of the process if not given.
    """

    def __init__(self, bench, case, path=None, trial=False, argv=None):
        self.about = {"argv": [f"benchmarks/{bench}.py", *(sys.argv[1:] if argv is None else argv)]} | environment()
        self.path = Path(path) if path else None
        if path is None and DEVICE == "cuda" and not trial:
            self.path = self.free_path(RESULTS / bench / case)

    def free_path(self, folder):
        stem = self.about["date"].removesuffix(" UTC").replace(" ", "T").replace(":", "")
        stem += f"-{self.about['commit'] or 'no_git'}"
        count = 1
        while (path := folder / (f"{stem}-{count}.json" if count > 1 else f"{stem}.json")).exists():
            count += 1
        return path

    def write(self, found):
        """Write what has been found so far: a run that is cut short keeps it."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.about | found, indent=1))

    def say_where(self):
        if self.path is not None and self.path.exists():
            print(f"the record is in {self.path}; what of it is published, benchmarks/published.yaml says")


def table(rows, columns):
    """Print rows (dicts) as a table; `columns` maps a key to its title and format."""
    cells = [[title for title, _ in columns.values()]]
    for row in rows:
        cells.append(
            [
                "-" if row.get(key) is None else format(row[key], spec) if spec else str(row[key])
                for key, (_, spec) in columns.items()
            ]
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
