"""Run each arm in its own process: Liger's patches affect the whole process, and all memory is freed at the end."""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading

import torch
from _measure import DEVICE


def is_out_of_memory(error):
    # Triton and cuBLAS report a lack of memory as other errors.
    return isinstance(error, torch.OutOfMemoryError) or any(s in str(error) for s in ("out of memory", "ALLOC_FAILED"))


def release():
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def emit(row):
    if int(os.environ.get("RANK", 0)):  # the first process reports for all
        return
    print("RESULT " + json.dumps(row), flush=True)


def rows_from(arm, timeout_s, echo=False, env=(), more=(), launcher=()):
    """Run this script again for one arm and yield the rows that it emits. If it fails, a last row gives the reason.

    `launcher` are Python arguments that start the script by a launcher.
    """
    command = [sys.executable, *launcher, *sys.argv, "--arm", arm, *more]
    with tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=err, text=True, env=os.environ | dict(env), start_new_session=True
        )
        # Kill the whole session: a launcher has started processes too.
        timer = threading.Timer(timeout_s, os.killpg, (child.pid, signal.SIGKILL))
        timer.start()
        for line in child.stdout:
            if line.startswith("RESULT "):
                row = json.loads(line.removeprefix("RESULT "))
                print(
                    ", ".join(
                        f"{k} {x:.5g}" if isinstance(x, float) else f"{k} {x}"
                        for k, x in row.items()
                        if isinstance(x, str | int | float)
                    ),
                    flush=True,
                )
                yield row
            elif echo:
                print(line, end="")
        code = child.wait()
        timer.cancel()
        if code:
            err.seek(0)
            log = err.read()
            if arm.startswith("Liger"):
                print(log[-4000:])
            note = reason_in(log.strip().splitlines() or [f"exit {code}"])
            if code == -9:
                note = f"killed: {timeout_s:.0f} s are over, or the host's memory is"
            yield {"arm": arm, "note": note}


def reason_in(lines):
    """The last line that names an error, or the last line."""
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    return (errors or lines)[-1][:120]
