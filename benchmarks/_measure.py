"""What every benchmark shares: the machine's two ceilings, times, peak memory, errors, and the record written."""

import datetime
import importlib.metadata
import json
import platform
import subprocess
import time
from pathlib import Path

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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


def environment():
    def version(name):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    root = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    return {
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or "cpu",
        "versions": {name: version(name) for name in PACKAGES},
        "commit": commit.stdout.strip() or None,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
    }


def write(path, record):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1))


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
