"""The cost of an operation's first call, for `operations.py --first_step`."""

import json
import os
import statistics
import subprocess
import tempfile

import torch
from _cases import forward_backward
from _cases_head import cross_entropy, dpo_head, linear_cross_entropy
from _cases_layers import add_rms_norm, geglu, layer_norm, rms_norm, rope, swiglu
from _cases_lora import lora_linear, lora_mlp
from _measure import DEVICE, seconds, table

# Per operation: the first size, and another that may need other kernels.
FIRST_STEP = {
    "rms_norm": [(rms_norm, 8192, 2048), (rms_norm, 4096, 1152)],
    "add_rms_norm": [(add_rms_norm, 8192, 2048), (add_rms_norm, 4096, 1152)],
    "layer_norm": [(layer_norm, 8192, 2048), (layer_norm, 4096, 1152)],
    "swiglu": [(swiglu, 8192, 8192), (swiglu, 4096, 6912)],
    "geglu": [(geglu, 8192, 8192), (geglu, 4096, 6912)],
    "rope": [(rope, 4, 2048, 32, 8, 64), (rope, 2, 1024, 16, 8, 128)],
    "lora_linear": [(lora_linear, 8192, 2048, 8192, 16), (lora_linear, 4096, 1152, 6912, 8)],
    "lora_mlp": [(lora_mlp, 8192, 2048, 8192, 16), (lora_mlp, 4096, 1152, 6912, 8)],
    "cross_entropy": [(cross_entropy, 4096, 128256), (cross_entropy, 2048, 50257)],
    "linear_cross_entropy": [(linear_cross_entropy, 8192, 2048, 128256), (linear_cross_entropy, 2048, 1152, 50257)],
    "linear_logprobs": [(dpo_head, 4, 1024, 2048, 128256), (dpo_head, 2, 1024, 1152, 50257)],
}


def first_calls(sizes):
    """Print for each size how many seconds longer its first call takes than a later one, as one line of JSON."""
    if DEVICE == "cuda":  # starting the context and cuBLAS does not count for the operation
        x = torch.randn(1024, 1024, device=DEVICE).bfloat16()
        seconds(lambda: x @ x)
    extra = []
    for make, *size in sizes:
        case = make(*size, dtype=torch.bfloat16)
        run = forward_backward(case.providers["ours"], case)
        first = seconds(run)
        extra.append(first - statistics.median(seconds(run) for _ in range(5)))
    print("RESULT " + json.dumps(extra))


def first_step(sizes, command, record):
    """Run each operation of `sizes` by `command` in two new processes.

    The first has an empty TRITON_CACHE_DIR, the second the cache that the first has filled.
    """
    rows = []
    for name, of_name in sizes.items():
        row = {
            "operation": name,
            "size": " then ".join("x".join(map(str, size)) for _, *size in of_name),
        }
        with tempfile.TemporaryDirectory() as cache:
            for state in ("empty", "filled"):
                done = subprocess.run(
                    [*command, "--child", name],
                    capture_output=True,
                    text=True,
                    env=os.environ | {"TRITON_CACHE_DIR": cache},
                )
                found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                if not found:
                    raise RuntimeError(f"{name} failed: {done.stderr[-3000:]}")
                row[state], row[f"{state}_other"] = json.loads(found[0].removeprefix("RESULT "))
        rows.append(row)
        record.write({"rows": rows})
    titles = {
        "empty": "first call s, empty cache",
        "empty_other": "other size s",
        "filled": "first call s, filled cache",
        "filled_other": "other size s",
    }
    table(rows, {"operation": ("operation", ""), "size": ("size", "")} | {k: (t, ".3f") for k, t in titles.items()})
