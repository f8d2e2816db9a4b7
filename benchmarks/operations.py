"""Time, fraction of the physical floor, peak memory and error against float64 of every operation, and of its peers.

    python benchmarks/operations.py [--only rope linear_cross_entropy] [--json FILE]
    python benchmarks/operations.py --only lora_base   adapters on bases of each quantisation library, and PEFT's
    python benchmarks/operations.py --only lora_base --sizes torchao hqq
    python benchmarks/operations.py --sweep        the fused head from 2048 to 65536 tokens, against its fastest peer
    python benchmarks/operations.py --odd          sizes that are not powers of two, 1 and 131072 tokens, three dtypes
    python benchmarks/operations.py --first_step   the cost of the first call, with and without Triton's disk cache

The floor of a row is the larger of bytes / copy bandwidth (each input read once, each output written once) and FLOP /
matmul rate. Both rates are measured first in the same run. TFLOP/s are of the floor's FLOP. "kept" is what autograd
keeps for the backward pass, without the inputs. Norms, gates, rope and convolutions are timed as graphs, which leaves
out the host's time; "host us" is the host's time to launch one forward and backward. A GPU that is hot or short of
power lowers its clock. Therefore all providers of a case are first checked against float64, which heats it, and then
take turns twice, the second time in reverse order. Forward + backward is the mean of the two times, which the record
also holds ("visits_ms"). A result is not timed if its error is more than five times its dtype's limit. A peer that is
not installed, fails, or has computed nothing after --patience seconds (some tune for minutes) is a row that says so.
The record is written after every case, and no case starts after --minutes.
"""

import contextlib
import signal
import statistics
import sys
import time

import torch
from _cases import LIMITS, MISMATCH, forward_backward
from _cases_attention import attention
from _cases_bases import BASES, lora_base
from _cases_experts import experts, experts_frozen, experts_lora
from _cases_head import cross_entropy, dpo_head, linear_cross_entropy, logprobs_entropy
from _cases_layers import add_rms_norm, geglu, layer_norm, rms_norm, rope, short_conv, short_conv_split, swiglu
from _cases_lora import lora_linear, lora_mlp
from _first_call import FIRST_STEP, first_calls, first_step
from _measure import (
    DEVICE,
    Record,
    arguments,
    ceilings,
    milliseconds,
    peak_gib,
    relative_error,
    synchronize,
    table,
)
from _processes import release

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Per operation: (case, *size).
CASES = {
    "rms_norm": [(rms_norm, 16384, 4096), (rms_norm, 524288, 128), (rms_norm, 65536, 1152)],
    "add_rms_norm": [(add_rms_norm, 16384, 4096)],
    "layer_norm": [(layer_norm, 16384, 4096)],
    "swiglu": [(swiglu, 16384, 14336)],
    "geglu": [(geglu, 16384, 14336)],
    "rope": [(rope, 4, 4096, 32, 8, 128)],
    "short_conv": [(short_conv, 8, 1024, 8192, 4), (short_conv, 1, 8192, 8192, 4), (short_conv, 8, 1024, 2048, 3)],
    "short_conv_split": [(short_conv_split, 4, 2048, 2048, 4096, 4)],
    "lora_linear": [
        (lora_linear, 8192, 4096, 4096, 16),
        (lora_linear, 8192, 4096, 14336, 16),
        (lora_linear, 8192, 14336, 4096, 16),
        (lora_linear, 8192, 4096, 14336, 64),
        (lora_linear, 8192, 4096, 14336, 256),
    ],
    "lora_mlp": [(lora_mlp, 8192, 4096, 14336, 16)],
    "experts": [
        (experts, 8192, 2048, 768, 128, 8),
        (experts, 32768, 2048, 768, 128, 8),
        (experts_lora, 8192, 2048, 768, 128, 8, 16),
        (experts_frozen, 8192, 2048, 768, 128, 8),
    ],
    "attention": [  # Gemma 3 4B, Mistral 7B, Llama 3 8B, gpt-oss 20B
        (attention, 4, 2048, 8, 4, 256, 1024),
        (attention, 1, 16384, 8, 4, 256, 1024),
        (attention, 1, 16384, 32, 8, 128, 4096),
        (attention, 4, 2048, 32, 8, 128),
        (attention, 1, 16384, 32, 8, 128),
        (attention, 4, 2048, 64, 8, 64, 128, True),
        (attention, 4, 2048, 64, 8, 64, None, True),
        (attention, 1, 16384, 64, 8, 64, 128, True),
        (attention, 1, 16384, 64, 8, 64, None, True),
    ],
    "cross_entropy": [(cross_entropy, 8192, 128256)],
    "linear_cross_entropy": [
        (linear_cross_entropy, 8192, 4096, 128256),
        (linear_cross_entropy, 32768, 2048, 151936),
        (linear_cross_entropy, 8192, 4096, 128256, True),
    ],
    "linear_logprobs": [(dpo_head, 8, 1024, 4096, 128256), (logprobs_entropy, 8192, 4096, 128256)],
    "lora_base": [(lora_base, 8192, 4096, 14336, 16, group, kind) for kind in BASES for group in ("attention", "mlp")],
}
TINY = {
    "rms_norm": [(rms_norm, 64, 96)],
    "add_rms_norm": [(add_rms_norm, 64, 96)],
    "layer_norm": [(layer_norm, 64, 96)],
    "swiglu": [(swiglu, 64, 96)],
    "geglu": [(geglu, 64, 96)],
    "rope": [(rope, 1, 32, 4, 2, 16)],
    "short_conv": [(short_conv, 3, 11, 40, 4)],
    "short_conv_split": [(short_conv_split, 3, 11, 8, 24, 4)],
    "lora_linear": [(lora_linear, 64, 32, 48, 4)],
    "lora_mlp": [(lora_mlp, 64, 32, 48, 4)],
    "experts": [
        (experts, 64, 32, 16, 8, 2),
        (experts_lora, 64, 32, 16, 8, 2, 4),
        (experts_frozen, 64, 32, 16, 8, 2),
    ],
    "attention": [
        (attention, 2, 33, 4, 2, 16, 8),
        (attention, 1, 33, 4, 2, 16),
        (attention, 2, 33, 4, 2, 16, 8, True),
        (attention, 2, 33, 4, 2, 16, None, True),
    ],
    "cross_entropy": [(cross_entropy, 64, 307)],
    "linear_cross_entropy": [(linear_cross_entropy, 64, 32, 307), (linear_cross_entropy, 64, 32, 307, True)],
    "linear_logprobs": [(dpo_head, 4, 16, 32, 307), (logprobs_entropy, 64, 32, 307)],
    "lora_base": [(lora_base, 64, 256, 512, 4, group, kind) for kind in BASES for group in ("attention", "mlp")],
}
DEFAULT = [name for name in CASES if name != "lora_base"]

# Every number of tokens, width and vocabulary of "2048 to 65536, 576 to 8192, 32000 to 262144" at least twice.
SWEEP = [
    (linear_cross_entropy, *size)
    for size in (
        (2048, 576, 49152),
        (2048, 4096, 32000),
        (2048, 8192, 128256),
        (4096, 1152, 262144),
        (4096, 2048, 128256),
        (4096, 8192, 32000),
        (8192, 2304, 262144),
        (8192, 4096, 128256),
        (8192, 8192, 151936),
        (16384, 576, 49152),
        (16384, 2048, 128256),
        (32768, 2048, 151936),
        (32768, 4096, 32000),
        (65536, 1024, 151936),
        (65536, 4096, 49152),
    )
]
TINY_SWEEP = [(linear_cross_entropy, 32, 32, 307), (linear_cross_entropy, 64, 48, 128)]
ODD = [
    (rms_norm, 1, 1152),
    (rms_norm, 16384, 1152),
    (rms_norm, 131072, 1152),
    (cross_entropy, 8192, 50257),
    (cross_entropy, 1, 50257),
    (linear_cross_entropy, 1, 4096, 128256),
    (linear_cross_entropy, 8192, 1152, 50257),
    (linear_cross_entropy, 131072, 1024, 50257),
]
TINY_ODD = [(rms_norm, 1, 97), (cross_entropy, 33, 307), (linear_cross_entropy, 1, 32, 307)]
FEW_PROVIDERS = ("ours", "ours lean", "compile", "liger", "eager", "F.rms_norm")  # for the sweep and the odd sizes

COLUMNS = {
    "operation": ("operation", ""),
    "size": ("size", ""),
    "dtype": ("dtype", ""),
    "provider": ("provider", ""),
    "forward_ms": ("fwd ms", ".3f"),
    "ms": ("fwd+bwd ms", ".3f"),
    "of_floor": ("of floor", ".3f"),
    "tflop_per_s": ("TFLOP/s", ".0f"),
    "kept_gib": ("kept GiB", ".2f"),
    "host_us": ("host us", ".0f"),
    "gib": ("peak GiB", ".2f"),
    "error": ("error", ".1e"),
    "note": ("", ""),
}


def host_us(run, calls):
    """The host's time for launching a call, averaged over several launches while the device is still busy."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls * 1e6


def kept_bytes(fn, case):
    """The tensors that autograd keeps from a forward pass for backward, without the inputs."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = fn(*case.inputs)  # while it lives, so do they
    inputs = {x.untyped_storage().data_ptr() for x in case.inputs if isinstance(x, torch.Tensor)}
    del out
    return sum(size for place, size in kept.items() if place not in inputs)


def logits_do_not_fit(case, provider):
    """The reason why eager cannot run, or None.

    Its logits in the dtype and in fp32, each with a gradient, may exceed free memory.
    """
    if provider != "eager" or DEVICE != "cuda" or "linear" not in case.operation:
        return None
    rows, _, vocab = (int(n) for n in case.size.split("x"))
    need = rows * vocab * 2 * (case.dtype.itemsize + 4)
    free = torch.cuda.mem_get_info()[0]
    return f"its logits need {need / 2**30:.0f} GiB" if need > free else None


@contextlib.contextmanager
def at_most(seconds):
    """Raise TimeoutError inside the block after so many seconds; 0 means never."""

    def give_up(*_):
        raise TimeoutError(f"nothing computed after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure(case, provider, fn, exact, brief=False, patience=0):
    """(a row without its time, what to time for it, or None if it failed).

    With `brief`, skips the forward pass alone and the host's time.
    """
    row = {"operation": case.operation, "size": case.size, "dtype": str(case.dtype).removeprefix("torch.")}
    row["provider"] = provider
    reason = logits_do_not_fit(case, provider)
    if reason is not None:
        return row | {"note": reason}, None
    try:
        run = forward_backward(fn, case)
        keep = case.inputs[0].detach().clone() if case.overwrites else None
        with at_most(0 if provider.startswith("ours") else patience):
            found = run()
        row["error"] = relative_error(found, exact)
        found = None
        if keep is not None:  # it was overwritten
            case.inputs[0].data.copy_(keep)
        if not row["error"] < MISMATCH * LIMITS[case.dtype]:
            return row | {"note": "wrong, not timed"}, None
        if case.leaves and not brief:
            with torch.no_grad():
                row["forward_ms"] = milliseconds(lambda: fn(*case.inputs), graph=case.graph)
        if not brief:
            row["host_us"] = host_us(run, calls=20 if case.graph else 5)
            row["kept_gib"] = kept_bytes(fn, case) / 2**30
        row["gib"] = peak_gib(run)
        if keep is not None:
            case.inputs[0].data.copy_(keep)
        return row, run
    except Exception as error:  # a peer's failure is a row of the table, not the end of the run
        if provider.startswith("ours"):
            raise
        return row | {"note": f"{type(error).__name__}: {error}".splitlines()[0][:80]}, None


def visit(row, case, run, floor_s):
    """Time forward and backward once more."""
    row.setdefault("visits_ms", []).append(milliseconds(run, graph=case.graph))
    row["ms"] = statistics.mean(row["visits_ms"])
    row["of_floor"] = floor_s * 1e3 / row["ms"]
    if case.flop:
        row["tflop_per_s"] = case.flop / row["ms"] / 1e9


def run_cases(cases, dtypes, options, record, providers=None, brief=False):
    """Measure `cases` (case, *size) in every dtype. Return the rows, which are written to `record` after every case."""
    began = time.monotonic()
    rows = []
    left = []
    ceiling = {}
    for make, *size in cases:
        for name in dtypes:
            if time.monotonic() - began > 60 * options.minutes:
                left.append(f"{make.__name__} {'x'.join(map(str, size))} {name}")
                continue
            dtype = DTYPES[name]
            if dtype not in ceiling:
                ceiling[dtype] = ceilings(dtype)
                copy, rate = ceiling[dtype]
                print(f"copy {copy / 1e12:.2f} TB/s, {name} matmul {rate / 1e12:.0f} TFLOP/s", flush=True)
            copy, rate = ceiling[dtype]
            torch.compiler.reset()  # otherwise one size's compilations would count as recompilations of the next
            torch.manual_seed(0)
            try:
                case = make(*size, dtype=dtype)
            except (ImportError, ValueError) as error:  # its library is missing, or PEFT refuses it
                note = f"{type(error).__name__}: {error}".splitlines()[0][:80]
                row = {"operation": make.__name__, "size": ", ".join(map(str, size)), "provider": "peft", "note": note}
                rows.append(row | {"dtype": str(dtype).removeprefix("torch.")})
                continue
            floor_s = max(case.bytes / copy, case.flop / rate)
            exact = case.reference(case)
            synchronize()
            found = []
            for provider, fn in case.providers.items():
                if provider in (providers or case.providers):
                    found.append(measure(case, provider, fn, exact, brief, options.patience))
                    release()
            exact = None
            for row, run in [*found, *reversed(found)]:
                if run is not None:
                    visit(row, case, run, floor_s)
                    release()
            rows += [row for row, _ in found]
            case = found = run = None  # free them before the next case allocates
            rates = {str(d).removeprefix("torch."): r for d, (_, r) in ceiling.items()}
            record.write({"copy_bytes_per_s": copy, "matmul_flop_per_s": rates, "rows": rows})
    if left:
        print(f"not begun after {options.minutes:g} minutes: {', '.join(left)}")
    return rows


def against_fastest_peer(rows):
    """A line for each size and dtype: every provider's time, and our time divided by the fastest peer's."""
    lines = {}
    for row in rows:
        line = lines.setdefault((row["operation"], row["size"], row["dtype"]), {"times": {}, "floor": {}, "notes": []})
        if "ms" in row:
            line["times"][row["provider"]] = row["ms"]
            line["floor"][row["provider"]] = row["of_floor"]
        else:
            line["notes"].append(f"{row['provider']}: {row['note']}")
    found = []
    for (operation, size, dtype), line in lines.items():
        times = line["times"]
        peers = {name: ms for name, ms in times.items() if not name.startswith("ours")}
        out = {"operation": operation, "size": size, "dtype": dtype, "note": "; ".join(line["notes"])} | times
        out["ours of floor"] = line["floor"].get("ours")
        if peers:
            out["fastest"] = min(peers, key=peers.get)
            for name in ("ours", "ours lean"):
                if name in times:
                    out[f"{name} / peer"] = times[name] / peers[out["fastest"]]
        found.append(out)
    return found


def print_against_fastest_peer(rows):
    present = {row["provider"] for row in rows if "ms" in row}
    columns = {name: COLUMNS[name] for name in ("operation", "size", "dtype")}
    columns |= {name: (f"{name} ms", ".3f") for name in FEW_PROVIDERS if name in present}
    columns |= {"ours of floor": ("ours of floor", ".3f"), "fastest": ("fastest peer", "")}
    columns |= {"ours / peer": ("ours / it", ".3f"), "ours lean / peer": ("lean / it", ".3f"), "note": ("", "")}
    table(against_fastest_peer(rows), columns)
    print("ours / it: our time over the fastest peer's; below 1 ours is faster")


def _first_sizes(options):
    return {name: [sizes[0], sizes[-1]] for name, sizes in TINY.items()} if options.tiny else FIRST_STEP


def has_word(case, words):
    """True if a size or option of `case` contains one of `words`."""
    text = ", ".join(map(str, case[1:]))
    return any(word in text for word in words)


def case_of(options):
    """The folder of the record."""
    for mode in ("sweep", "odd", "first_step"):
        if getattr(options, mode):
            return mode
    return "all" if options.only == DEFAULT else "-".join(options.only)


def main(argv=None):
    parser = arguments(__doc__, "--child")
    parser.add_argument("--only", nargs="*", choices=CASES, default=DEFAULT, help="default all but lora_base")
    parser.add_argument("--providers", nargs="*", help="names of providers, default all")
    parser.add_argument("--sizes", nargs="*", help="only sizes that hold one of these texts, such as torchao")
    parser.add_argument("--dtype", nargs="*", choices=DTYPES, help="default bf16; all three for --odd")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--sweep", action="store_true", help="the fused head at many sizes; ratio to the fastest peer")
    modes.add_argument("--odd", action="store_true", help="odd sizes in bf16, fp16 and fp32; ratio to the fastest peer")
    modes.add_argument("--first_step", action="store_true", help="seconds that a first call takes beyond a later one")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script on a CPU")
    parser.add_argument("--minutes", type=float, default=9, help="begin no case after so many (default 9)")
    parser.add_argument("--patience", type=float, default=60, help="seconds for the first call of a peer (default 60)")
    options = parser.parse_args(argv)
    if options.child:
        return first_calls(_first_sizes(options)[options.child])
    record = Record("operations", case_of(options), options.json, options.tiny, argv)
    if options.first_step:
        sizes = {name: found for name, found in _first_sizes(options).items() if name in options.only}
        first_step(sizes, [sys.executable, __file__, "--first_step"] + ["--tiny"] * options.tiny, record)
    elif options.sweep or options.odd:
        if options.sweep:
            cases = TINY_SWEEP if options.tiny else SWEEP
        else:
            cases = TINY_ODD if options.tiny else ODD
        cases = [case for case in cases if case[0].__name__ in options.only]
        dtypes = options.dtype or (["bf16"] if options.sweep else list(DTYPES))
        print_against_fastest_peer(
            run_cases(cases, dtypes, options, record, options.providers or FEW_PROVIDERS, brief=True)
        )
    else:
        table_of = TINY if options.tiny else CASES
        cases = []
        for name in options.only:
            cases += table_of[name]
        if options.sizes:
            cases = [case for case in cases if has_word(case, options.sizes)]
        rows = run_cases(cases, options.dtype or ["bf16"], options, record, options.providers)
        table(rows, {k: v for k, v in COLUMNS.items() if k != "dtype" or len(options.dtype or ()) > 1})
    record.say_where()


if __name__ == "__main__":
    main()
