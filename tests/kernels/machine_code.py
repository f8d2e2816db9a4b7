"""Compile kernels for GPUs that need not be present, and print their memory accesses as one line of JSON.

Run it as `machine_code.py CAPABILITY`, such as 90. It is a script because the tests run with TRITON_INTERPRET=1, and
then nothing is compiled.
"""

import json
import re
import sys

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from liger_triton import _row_pass
from liger_triton._short_conv_kernels import _backward_kernel, _forward_kernel
from liger_triton.float8_cast import E4M3, E5M2, _columns_kernel, _each_row_kernel, _rows_kernel, packing
from liger_triton.gates import PASSES_AT_LIMIT, _gate_bwd_kernel

GATE = {"DY": "*bf16", "G": "*bf16", "U": "*bf16", "DG": "*bf16", "DU": "*bf16"}
GATE_SIXTEEN = [*GATE, "dy_stride", "g_stride", "u_stride", "d_stride", "n"]
ROW = {"X": "*bf16", "D": "*bf16", "TARGET": "*i64", "STATS": "*fp32", "GLOSS": "*fp32", "GENT": "*fp32"}
ROW |= dict.fromkeys(("softcap", "smoothing", "z_loss"), "fp32")


def row(block, aligned, **flags):
    """Return the row pass, with rows that start at 16 bytes or anywhere. V is never a multiple of 16."""
    flags = {"DO_STATS": True, "DO_GRAD": True, "TOP1": True} | flags
    names = ("HAS_GLOSS", "HAS_GENT", "SOFTCAP", "SMOOTH", "ENTROPY_", "SUMSQ", "MEAN")
    constants = dict.fromkeys(names, False) | flags | {"scale": None, "LEAD": not aligned, "BLOCK": block, "VEC": 8}
    sixteen = [*[name for name, kind in ROW.items() if kind.startswith("*")], "stats_stride"]
    return _row_pass._row_kernel, ROW, constants, sixteen + ["x_stride", "d_stride", "W"] * aligned, block // 256


def gate(act):
    floats = dict.fromkeys(("limit", "alpha", "up_offset", "gate_scale"), "fp32")
    constants = {"ACT": act, "AT_LIMIT": PASSES_AT_LIMIT, "PRODUCT": False, "BLOCK": 2048}
    return _gate_bwd_kernel, GATE | floats, constants, GATE_SIXTEEN, 4


def float8(kernel, dtype, eight, **flags):
    """Return the fp8 casts, e4m3 (8e4nv for Triton) or e5m2."""
    pointers = {"X": f"*{dtype}", "MAXIMA": "*i32", "ROWS": f"*fp{eight}", "COLUMNS": "*i32", "INVERSE": "*fp32"}
    constants = {"LARGEST": 448.0, "POWER_OF_2": False, "LEAST": 1e-12, "COUNT": 512} | flags
    sixteen = [name for name in (*pointers, "numel", "t", "k", "quarters") if name in kernel.arg_names]
    return kernel, pointers, constants, sixteen, flags.get("BLOCK", 4096) // 1024


def float8_columns(dtype, eight, rows):
    flags = {"KEEP_ROWS": rows, "PACK": packing(E4M3 if eight == "8e4nv" else E5M2), "BLOCK_T": 128, "BLOCK_K": 128}
    return float8(_columns_kernel, dtype, eight, **flags)


def float8_by_row(kernel, dtype, num_warps, **flags):
    """Return the casts with row scales: whole rows in tiles of 8192 numbers, or the transpose."""
    pointers = {"X": f"*{dtype}", "ROWS": "*fp8e4nv", "INVERSE": "*fp32", "MAXIMA": "*i32", "COLUMNS": "*i32"}
    constants = {"LARGEST": 448.0, "POWER_OF_2": True, "LEAST": 1e-12} | flags
    sixteen = [name for name in (*pointers, "stride", "t", "k", "quarters") if name in kernel.arg_names]
    return kernel, pointers, constants, sixteen, num_warps


def rows_of(dtype, width, num_warps=8):
    flags = {"KEEP_MAXIMA": True, "BLOCK_T": max(1, 8192 // width), "BLOCK_K": width, "STAGES": 3}
    return float8_by_row(_each_row_kernel, dtype, num_warps, **flags)


def columns_of(dtype):
    flags = {"COUNT": 0, "KEEP_ROWS": False, "PACK": packing(E4M3), "BLOCK_T": 128, "BLOCK_K": 128}
    return float8_by_row(_columns_kernel, dtype, 4, **flags)


def short_conv(kernel, dtype, channels, **flags):
    names = ("DY", "DY_2", "DY_3", "X", "W", "B", "Y", "Y_2", "Y_3", "DX")
    pointers = dict.fromkeys(names, f"*{dtype}") | {"CU_SEQLENS": "*i32"}
    pointers["SUMS"] = "*fp32"
    constants = {"K": 4, "HAS_BIAS": False, "SILU": True, "SPLIT": False, "BLOCK_C": channels} | flags
    sizes = ("x_stride", "dy_stride", "dy_stride_2", "dy_stride_3", "c", "width", "width_2")
    sixteen = [name for name in (*pointers, *sizes) if name in kernel.arg_names]
    return kernel, {name: kind for name, kind in pointers.items() if name in kernel.arg_names}, constants, sixteen, 1


FORWARD = {"RUN": 8}
BACKWARD = {"NEED_DX": True, "NEED_DW": True, "NEED_DB": False, "RUN": 4}
# Kernel, types of the pointers and floats, constants, which arguments are multiples of 16, warps.
CASES = {
    "swiglu": gate("silu"),
    "clamped swiglu": gate("clamped"),
    "geglu": gate("gelu_tanh"),
    "rows": row(8192, True),
    "rows anywhere": row(4096, False),
    "statistics": row(4096, True, DO_GRAD=False, ENTROPY_=True),
    "float8 rows": float8(_rows_kernel, "bf16", "8e4nv", BLOCK=8192),
    "float8 rows of fp32": float8(_rows_kernel, "fp32", "8e5", BLOCK=8192),
    "float8 both": float8_columns("bf16", "8e4nv", True),
    "float8 columns": float8_columns("bf16", "8e5", False),
    "float8 both of fp32": float8_columns("fp32", "8e4nv", True),
    "float8 columns of fp32": float8_columns("fp32", "8e5", False),
    "float8 by row": rows_of("bf16", 4096),
    "float8 by row of fp32": rows_of("fp32", 4096),
    "float8 by wide row": rows_of("bf16", 16384, 16),
    "float8 by wide row of fp32": rows_of("fp32", 16384, 16),
    "float8 by column": columns_of("bf16"),
    "float8 by column of fp32": columns_of("fp32"),
    "convolution": short_conv(_forward_kernel, "bf16", 128, **FORWARD),
    "convolution of fp32": short_conv(_forward_kernel, "fp32", 128, **FORWARD),
    "convolution, backward": short_conv(_backward_kernel, "bf16", 128, **BACKWARD),
    "convolution, backward of fp32": short_conv(_backward_kernel, "fp32", 128, **BACKWARD),
    "convolution in three": short_conv(_forward_kernel, "bf16", 128, SPLIT=True, **FORWARD),
    "convolution in three, backward": short_conv(_backward_kernel, "bf16", 128, SPLIT=True, **BACKWARD),
}


def accesses(case, capability):
    """Return the global memory accesses in code order, and the bytes of shared memory."""
    kernel, pointers, constants, sixteen, num_warps = case
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in sixteen}
    built = compile_kernel(
        ASTSource(kernel, signature, constants, attrs),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps},
    )
    ptx = built.asm["ptx"]
    found, inside = (re.findall(rf"\b((?:ld|st)\.{space}[.\w:]*)", ptx) for space in ("global", "shared"))
    bytes_moved = len(re.findall(r"\bprmt\.", ptx))
    return {"accesses": found, "shared": built.metadata.shared, "inside": inside, "bytes_moved": bytes_moved}


if __name__ == "__main__":
    capability = int(sys.argv[1])
    eight_bits = {True: (90,), False: (89, 90, 120)}  # of fp32, and of bf16
    wanted = {n: eight_bits["fp32" in n] if "float8" in n else (80, 90, 120) for n in CASES}
    print(json.dumps({n: accesses(case, capability) for n, case in CASES.items() if capability in wanted[n]}))
