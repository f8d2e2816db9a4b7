"""Cases of the layers: norms, gated activations, rotary embeddings. The floor of each is its bytes."""

import torch
import torch.nn.functional as F
from _cases import Case, compiled, float64, liger, randn
from _measure import DEVICE

import liger_triton as lt


def eager_rms_norm(x, w, eps=1e-6):
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return w * h.to(x.dtype)


def exact_rms_norm(x, w, eps=1e-6):
    return w * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(rows, hidden, *, dtype):
    x, w, dy = (
        randn(rows, hidden, dtype=dtype),
        randn(hidden, dtype=dtype),
        randn(rows, hidden, dtype=dtype, grad=False),
    )
    return Case(
        "rms_norm",
        f"{rows}x{hidden}",
        (x, w),
        {
            "ours": lambda x, w: lt.rms_norm(x, w, 1e-6),
            "eager": eager_rms_norm,
            "compile": compiled(eager_rms_norm),
            "liger": lambda x, w: liger("liger_rms_norm")(x, w, 1e-6, 0.0, "llama", False),
            "F.rms_norm": lambda x, w: F.rms_norm(x, (hidden,), w, 1e-6),
        },
        float64(exact_rms_norm),
        dtype,
        bytes=dtype.itemsize * 5 * rows * hidden,
        upstream=(dy,),
    )


def add_rms_norm(rows, hidden, *, dtype):
    x, r, w = randn(rows, hidden, dtype=dtype), randn(rows, hidden, dtype=dtype), randn(hidden, dtype=dtype)
    upstream = tuple(randn(rows, hidden, dtype=dtype, grad=False) for _ in range(2))

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
            "compile": compiled(eager),
            "liger": lambda x, r, w: liger("liger_fused_add_rms_norm")(x, r, w, 1e-6, 0.0, "llama", False),
        },
        float64(exact),
        dtype,
        # Forward reads x and r, and writes y and s. Backward reads dy, ds and s, and writes one gradient for x and r.
        bytes=dtype.itemsize * 8 * rows * hidden,
        upstream=upstream,
    )


def layer_norm(rows, hidden, *, dtype):
    x, w, b = randn(rows, hidden, dtype=dtype), randn(hidden, dtype=dtype), randn(hidden, dtype=dtype)

    def eager(x, w, b):
        return F.layer_norm(x, (hidden,), w, b, 1e-6)

    return Case(
        "layer_norm",
        f"{rows}x{hidden}",
        (x, w, b),
        {
            "ours": lambda x, w, b: lt.layer_norm(x, w, b, 1e-6),
            "eager": eager,
            "compile": compiled(eager),
            "liger": lambda x, w, b: liger("liger_layer_norm")(x, w, b, 1e-6),
        },
        float64(eager),
        dtype,
        bytes=dtype.itemsize * 5 * rows * hidden,
        upstream=(randn(rows, hidden, dtype=dtype, grad=False),),
    )


def gated(operation, rows, hidden, dtype, eager, ours, liger_name):
    g, u = randn(rows, hidden, dtype=dtype), randn(rows, hidden, dtype=dtype)
    return Case(
        operation,
        f"{rows}x{hidden}",
        (g, u),
        {"ours": ours, "eager": eager, "compile": compiled(eager), "liger": liger(liger_name)},
        float64(eager),
        dtype,
        bytes=dtype.itemsize * 8 * rows * hidden,
        upstream=(randn(rows, hidden, dtype=dtype, grad=False),),
    )


def swiglu(rows, hidden, *, dtype):
    return gated("swiglu", rows, hidden, dtype, lambda g, u: F.silu(g) * u, lt.swiglu, "liger_swiglu")


def geglu(rows, hidden, *, dtype):
    return gated("geglu", rows, hidden, dtype, lambda g, u: F.gelu(g, approximate="tanh") * u, lt.geglu, "liger_geglu")


def rope(batch, tokens, heads, kv_heads, dim, *, dtype):
    def view(h):  # a transposed view of the output of a projection, as in attention
        return randn(batch, tokens, h, dim, dtype=dtype).detach().transpose(1, 2).requires_grad_()

    q, k = view(heads), view(kv_heads)
    angle = torch.arange(tokens, device=DEVICE)[:, None] * 1e4 ** (-torch.arange(0, dim, 2, device=DEVICE) / dim)
    cos, sin = (f(torch.cat((angle, angle), -1))[None].to(dtype) for f in (torch.cos, torch.sin))

    def eager(q, k, cos, sin):
        def turn(x):
            a, b = x.chunk(2, -1)
            return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]

        return turn(q), turn(k)

    return Case(
        "rope",
        f"{batch}x{tokens}, {heads}+{kv_heads} heads of {dim}",
        (q, k, cos, sin),
        {"ours": lt.rope, "eager": eager, "compile": compiled(eager), "liger": liger("liger_rope")},
        float64(eager),
        dtype,
        bytes=dtype.itemsize * 4 * (q.numel() + k.numel()),
        upstream=tuple(randn(*t.shape, dtype=dtype, grad=False) for t in (q, k)),
    )
