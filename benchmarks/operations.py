"""Every operation beside its peers: time, fraction of the physical floor, peak memory and error against float64.

    python benchmarks/operations.py [--only rope linear_cross_entropy] [--json benchmarks/results/operations.json]

The floor of a row is the larger of bytes / copy bandwidth (each input read once, each output written once) and FLOP /
matmul rate, both measured first in the same run. Norms, gates and rope are timed as CUDA graphs: the GPU's time, not
the host's; "host us" is what launching one forward and backward costs the host. A result whose error against float64 is
more than five times what the operation's limit allows is not timed. A peer that is not installed, or fails, is a row
that says so.
"""

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from _measure import DEVICE, ceilings, environment, milliseconds, peak_gib, relative_error, synchronize, table, write

import liger_triton as lt

BF16_LIMIT = 5e-3
MISMATCH = 5 * BF16_LIMIT  # a peer may round more often than we do; beyond this it computes something else


@dataclass
class Case:
    """One operation at one size. `inputs` are the leaf tensors, `upstream` the gradients given to the backward pass."""

    operation: str
    size: str
    inputs: tuple
    providers: dict[str, Callable]
    reference: Callable  # float64 outputs and gradients, as one list
    bytes: float = 0.0
    flop: float = 0.0
    upstream: tuple | None = None


def forward_backward(fn, case):
    leaves = [x for x in case.inputs if isinstance(x, torch.Tensor) and x.requires_grad]

    def run():
        out = fn(*case.inputs)
        out = out if isinstance(out, tuple) else (out,)
        upstream = case.upstream or tuple(torch.ones_like(o) for o in out)
        return [*out, *torch.autograd.grad(out, leaves, [u.to(o.dtype) for u, o in zip(upstream, out, strict=True)])]

    return run


def float64(fn):
    """The reference of a small case: `fn` on float64 copies of the inputs."""

    def run(case):
        copies = [
            x.detach().double().requires_grad_(x.requires_grad)
            if isinstance(x, torch.Tensor) and x.is_floating_point()
            else x
            for x in case.inputs
        ]
        leaves = [x for x in copies if isinstance(x, torch.Tensor) and x.requires_grad]
        out = fn(*copies)
        out = out if isinstance(out, tuple) else (out,)
        upstream = case.upstream or tuple(torch.ones_like(o) for o in out)
        return [*out, *torch.autograd.grad(out, leaves, [u.double() for u in upstream])]

    return run


def randn(*shape, scale=1.0, grad=True):
    return (torch.randn(*shape, device=DEVICE) * scale).bfloat16().requires_grad_(grad)


def liger(name):
    """A function of liger_kernel.transformers.functional, imported when it is called: a missing peer is one row."""

    def call(*args, **kwargs):
        import liger_kernel.transformers.functional as functional

        return getattr(functional, name)(*args, **kwargs)

    return call


# Norms


def eager_rms_norm(x, w, eps=1e-6):
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return w * h.to(x.dtype)


def exact_rms_norm(x, w, eps=1e-6):
    return w * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(rows, hidden):
    x, w, dy = randn(rows, hidden), randn(hidden), randn(rows, hidden, grad=False)
    n = rows * hidden
    return Case(
        "rms_norm",
        f"{rows}x{hidden}",
        (x, w),
        {
            "ours": lambda x, w: lt.rms_norm(x, w, 1e-6),
            "eager": eager_rms_norm,
            "compile": torch.compile(eager_rms_norm),
            "liger": lambda x, w: liger("liger_rms_norm")(x, w, 1e-6, 0.0, "llama", False),
            "F.rms_norm": lambda x, w: F.rms_norm(x, (hidden,), w, 1e-6),
        },
        float64(exact_rms_norm),
        bytes=2 * 5 * n,
        upstream=(dy,),
    )


def add_rms_norm(rows, hidden):
    x, r, w = randn(rows, hidden), randn(rows, hidden), randn(hidden)
    upstream = (randn(rows, hidden, grad=False), randn(rows, hidden, grad=False))

    def eager(x, r, w):
        s = x + r
        return eager_rms_norm(s, w), s

    def exact(x, r, w):
        return exact_rms_norm(x + r, w), x + r

    return Case(
        "add_rms_norm",
        f"{rows}x{hidden}",
        (x, r, w),
        {
            "ours": lambda x, r, w: lt.add_rms_norm(x, r, w, 1e-6),
            "eager": eager,
            "compile": torch.compile(eager),
            "liger": lambda x, r, w: liger("liger_fused_add_rms_norm")(x, r, w, 1e-6, 0.0, "llama", False),
        },
        float64(exact),
        bytes=2
        * 8
        * rows
        * hidden,  # forward reads x, r, writes y, s; backward reads dy, ds, s, writes one gradient for both
        upstream=upstream,
    )


def layer_norm(rows, hidden):
    x, w, b, dy = randn(rows, hidden), randn(hidden), randn(hidden), randn(rows, hidden, grad=False)

    def eager(x, w, b):
        return F.layer_norm(x, (hidden,), w, b, 1e-6)

    return Case(
        "layer_norm",
        f"{rows}x{hidden}",
        (x, w, b),
        {
            "ours": lambda x, w, b: lt.layer_norm(x, w, b, 1e-6),
            "eager": eager,
            "compile": torch.compile(eager),
            "liger": lambda x, w, b: liger("liger_layer_norm")(x, w, b, 1e-6),
        },
        float64(eager),
        bytes=2 * 5 * rows * hidden,
        upstream=(dy,),
    )


# Gated activations and rotary embeddings


def gated(operation, rows, hidden, eager, ours, liger_name):
    g, u, dy = randn(rows, hidden), randn(rows, hidden), randn(rows, hidden, grad=False)
    providers = {"ours": ours, "eager": eager, "compile": torch.compile(eager), "liger": liger(liger_name)}
    return Case(
        operation, f"{rows}x{hidden}", (g, u), providers, float64(eager), bytes=2 * 8 * rows * hidden, upstream=(dy,)
    )


def swiglu(rows, hidden):
    return gated("swiglu", rows, hidden, lambda g, u: F.silu(g) * u, lt.swiglu, "liger_swiglu")


def geglu(rows, hidden):
    return gated("geglu", rows, hidden, lambda g, u: F.gelu(g, approximate="tanh") * u, lt.geglu, "liger_geglu")


def rope(batch, tokens, heads, kv_heads, dim):
    def view(h):  # as attention makes them: a transposed view of the projection's output
        return randn(batch, tokens, h, dim).detach().transpose(1, 2).requires_grad_()

    q, k = view(heads), view(kv_heads)
    upstream = tuple(randn(*t.shape, grad=False) for t in (q, k))
    angle = torch.arange(tokens, device=DEVICE)[:, None] * 1e4 ** (-torch.arange(0, dim, 2, device=DEVICE) / dim)
    cos, sin = (f(torch.cat((angle, angle), -1))[None].bfloat16() for f in (torch.cos, torch.sin))

    def eager(q, k, cos, sin):
        def turn(x):
            a, b = x.chunk(2, -1)
            return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]

        return turn(q), turn(k)

    n = q.numel() + k.numel()
    return Case(
        "rope",
        f"{batch}x{tokens}, {heads}+{kv_heads} heads of {dim}",
        (q, k, cos, sin),
        {"ours": lt.rope, "eager": eager, "compile": torch.compile(eager), "liger": liger("liger_rope")},
        float64(eager),
        bytes=2 * 4 * n,
        upstream=upstream,
    )


# Losses over the vocabulary


def targets(rows, vocab):
    return torch.randint(0, vocab, (rows,), device=DEVICE)


def cross_entropy(rows, vocab):
    z, y = randn(rows, vocab, scale=2.0), targets(rows, vocab)

    def eager(z, y):
        return F.cross_entropy(z.float(), y)

    # `* 1`: the gradient is written over the logits; a copy made for every run would be timed, a non-leaf alias is not
    def in_place(fn):
        def call(z, y):
            return fn(z.view_as(z), y)

        return call

    return Case(
        "cross_entropy",
        f"{rows}x{vocab}",
        (z, y),
        {
            "ours": in_place(lt.cross_entropy),
            "eager": eager,
            "compile": torch.compile(eager),
            "liger": in_place(liger("liger_cross_entropy")),
        },
        lambda case: exact_cross_entropy(case.inputs[0], case.inputs[1]),
        bytes=2 * 2 * rows * vocab,
    )


def exact_cross_entropy(z, y, chunk=1024):
    """Loss and gradient in float64, a chunk of rows at a time."""
    total, grad = 0.0, torch.empty_like(z, requires_grad=False, dtype=torch.float64)
    n = z.shape[0]
    for i in range(0, n, chunk):
        part = z[i : i + chunk].detach().double().requires_grad_()
        loss = F.cross_entropy(part, y[i : i + chunk], reduction="sum") / n
        (grad[i : i + chunk],) = torch.autograd.grad(loss, part)
        total += loss.detach()
    return [total, grad]


def head_tensors(rows, hidden, vocab, frozen=False):
    x = randn(rows, hidden)
    w = randn(vocab, hidden, scale=hidden**-0.5 * 2, grad=not frozen)
    return x, w, targets(rows, vocab)


def exact_head(case, chunk=1024):
    x, w, y = case.inputs
    n, w64 = x.shape[0], w.detach().double()
    total, dx, dw = 0.0, torch.empty_like(x, requires_grad=False, dtype=torch.float64), torch.zeros_like(w64)
    for i in range(0, n, chunk):
        part = x[i : i + chunk].detach().double()
        p = torch.softmax(part @ w64.t(), -1)
        rows = torch.arange(p.shape[0], device=p.device)
        total -= p[rows, y[i : i + chunk]].log().sum() / n
        p[rows, y[i : i + chunk]] -= 1
        dx[i : i + chunk] = p @ w64 / n
        if w.requires_grad:
            dw.addmm_(p.t(), part, alpha=1 / n)
    return [total, dx, dw] if w.requires_grad else [total, dx]


def trl_head(x, w, y):
    from trl.kernels import ChunkedLogProbFunction

    return -ChunkedLogProbFunction.apply(x, w, None, y, 1.0, 32768, None, 1.0, ("log_probs",))[0].sum() / y.shape[0]


def cce(x, w, y):
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(x, w, y, filter_eps=None)  # filter_eps=None: the exact variant


def eager_head(x, w, y):
    return F.cross_entropy((x @ w.t()).float(), y)


def linear_cross_entropy(rows, hidden, vocab, frozen=False):
    providers = {
        "ours": lt.linear_cross_entropy,
        "ours lean": lambda x, w, y: lt.linear_cross_entropy(x, w, y, accumulate="lean"),
        "eager": eager_head,
        "compile": torch.compile(eager_head),
        "liger": liger("liger_fused_linear_cross_entropy"),
        "liger fp32": lambda x, w, y: liger("liger_fused_linear_cross_entropy")(x, w, y, accum_dtype=torch.float32),
        "TRL": trl_head,
        "CCE exact": cce,
    }
    if hasattr(F, "linear_cross_entropy"):
        providers["F.linear_cross_entropy"] = lambda x, w, y: F.linear_cross_entropy(x, w, y)
    if frozen:
        del providers["ours lean"], providers["liger fp32"]
    return Case(
        "linear_cross_entropy" + (" frozen" if frozen else ""),
        f"{rows}x{hidden}x{vocab}",
        head_tensors(rows, hidden, vocab, frozen),
        providers,
        exact_head,
        flop=(2 if frozen else 3) * 2 * rows * hidden * vocab,
    )


CASES = {
    "rms_norm": [lambda: rms_norm(16384, 4096), lambda: rms_norm(524288, 128), lambda: rms_norm(65536, 1152)],
    "add_rms_norm": [lambda: add_rms_norm(16384, 4096)],
    "layer_norm": [lambda: layer_norm(16384, 4096)],
    "swiglu": [lambda: swiglu(16384, 14336)],
    "geglu": [lambda: geglu(16384, 14336)],
    "rope": [lambda: rope(4, 4096, 32, 8, 128)],
    "cross_entropy": [lambda: cross_entropy(8192, 128256)],
    "linear_cross_entropy": [
        lambda: linear_cross_entropy(8192, 4096, 128256),
        lambda: linear_cross_entropy(32768, 2048, 151936),
        lambda: linear_cross_entropy(8192, 4096, 128256, frozen=True),
    ],
}
TINY = {
    "rms_norm": [lambda: rms_norm(64, 96)],
    "add_rms_norm": [lambda: add_rms_norm(64, 96)],
    "layer_norm": [lambda: layer_norm(64, 96)],
    "swiglu": [lambda: swiglu(64, 96)],
    "geglu": [lambda: geglu(64, 96)],
    "rope": [lambda: rope(1, 32, 4, 2, 16)],
    "cross_entropy": [lambda: cross_entropy(64, 307)],
    "linear_cross_entropy": [
        lambda: linear_cross_entropy(64, 32, 307),
        lambda: linear_cross_entropy(64, 32, 307, True),
    ],
}
COLUMNS = {
    "operation": ("operation", ""),
    "size": ("size", ""),
    "provider": ("provider", ""),
    "forward_ms": ("fwd ms", ".3f"),
    "ms": ("fwd+bwd ms", ".3f"),
    "of_floor": ("of floor", ".3f"),
    "host_us": ("host us", ".0f"),
    "gib": ("peak GiB", ".2f"),
    "error": ("error", ".1e"),
    "note": ("", ""),
}


def host_us(run, calls=20):
    """Time until the calls are launched, of which the device has done only some."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls * 1e6


def measure(case, provider, fn, exact, floor_s):
    graph = "cross_entropy" not in case.operation  # peers wait for the device in their losses, which a graph cannot
    row = {"operation": case.operation, "size": case.size, "provider": provider}
    try:
        run = forward_backward(fn, case)
        keep = case.inputs[0].detach().clone() if case.operation == "cross_entropy" else None
        row["error"] = relative_error(run(), exact)
        if keep is not None:  # the logits were overwritten: timed on what is there now, which costs the same
            case.inputs[0].data.copy_(keep)
        if not row["error"] < MISMATCH:
            return row | {"note": "wrong, not timed"}
        with torch.no_grad():
            row["forward_ms"] = milliseconds(lambda: fn(*case.inputs), graph=graph)
        row["ms"] = milliseconds(run, graph=graph)
        row["host_us"] = host_us(run)
        row["of_floor"] = floor_s * 1e3 / row["ms"]
        row["gib"] = peak_gib(run)
        if keep is not None:
            case.inputs[0].data.copy_(keep)
        return row
    except Exception as error:  # a peer's failure is a row of the table, not the end of the run
        if provider.startswith("ours"):
            raise
        return row | {"note": f"{type(error).__name__}: {error}".splitlines()[0][:80]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--providers", nargs="*", help="names of providers, default all")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script on a CPU")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    torch.manual_seed(0)
    copy, rate = ceilings()
    print(f"copy {copy / 1e12:.2f} TB/s, bf16 matmul {rate / 1e12:.0f} TFLOP/s")
    rows = []
    for name in options.only:
        for make in (TINY if options.tiny else CASES)[name]:
            case = make()
            floor_s = max(case.bytes / copy, case.flop / rate)
            exact = case.reference(case)
            synchronize()
            for provider, fn in case.providers.items():
                if options.providers and provider not in options.providers:
                    continue
                rows.append(measure(case, provider, fn, exact, floor_s))
                gc.collect()
                if DEVICE == "cuda":
                    torch.cuda.empty_cache()
            del case, exact
            if options.json:  # after every case: a run that is cut short keeps what it has measured
                record = {"copy_bytes_per_s": copy, "matmul_flop_per_s": rate, "rows": rows}
                write(options.json, environment() | record)
    table(rows, COLUMNS)


if __name__ == "__main__":
    main()
