"""Cases of the layers: norms, gates, rotary embeddings, short convolutions. The floor of each is its bytes."""

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


def layer(operation, size, inputs, passes, ours, eager, peer, exact=None, outputs=1, **more):
    """A case with outputs shaped like the first inputs. It reads or writes such an input `passes` times.

    `peer` is Liger's function, if there is one. `more` are further providers.
    """
    dtype, like = inputs[0].dtype, inputs[:outputs]
    providers = {"ours": ours, "eager": eager, "compile": compiled(eager)}
    if peer is not None:
        providers["liger"] = peer
    return Case(
        operation,
        size,
        inputs,
        providers | more,
        float64(exact or eager),
        dtype,
        bytes=dtype.itemsize * passes * inputs[0].numel(),
        upstream=tuple(randn(*x.shape, dtype=dtype, grad=False) for x in like),
    )


def rms_norm(rows, hidden, *, dtype):
    inputs = randn(rows, hidden, dtype=dtype), randn(hidden, dtype=dtype)

    def peer(x, w):
        return liger("liger_rms_norm")(x, w, 1e-6, 0.0, "llama", False)

    def of_torch(x, w):
        return F.rms_norm(x, (hidden,), w, 1e-6)

    return layer(
        "rms_norm",
        f"{rows}x{hidden}",
        inputs,
        5,
        lambda x, w: lt.rms_norm(x, w, 1e-6),
        eager_rms_norm,
        peer,
        exact_rms_norm,
        **{"F.rms_norm": of_torch},
    )


def add_rms_norm(rows, hidden, *, dtype):
    inputs = randn(rows, hidden, dtype=dtype), randn(rows, hidden, dtype=dtype), randn(hidden, dtype=dtype)

    def eager(x, r, w):
        s = x + r
        return eager_rms_norm(s, w), s

    def exact(x, r, w):
        return exact_rms_norm(x + r, w), x + r

    def peer(x, r, w):
        return liger("liger_fused_add_rms_norm")(x, r, w, 1e-6, 0.0, "llama", False)

    # Forward reads x and r, and writes y and s. Backward reads dy, ds and s, and writes one gradient for x and r.
    return layer(
        "add_rms_norm",
        f"{rows}x{hidden}",
        inputs,
        8,
        lambda x, r, w: lt.add_rms_norm(x, r, w, 1e-6),
        eager,
        peer,
        exact,
        outputs=2,
    )


def layer_norm(rows, hidden, *, dtype):
    inputs = randn(rows, hidden, dtype=dtype), randn(hidden, dtype=dtype), randn(hidden, dtype=dtype)

    def eager(x, w, b):
        return F.layer_norm(x, (hidden,), w, b, 1e-6)

    def peer(x, w, b):
        return liger("liger_layer_norm")(x, w, b, 1e-6)

    return layer("layer_norm", f"{rows}x{hidden}", inputs, 5, lambda x, w, b: lt.layer_norm(x, w, b, 1e-6), eager, peer)


def gated(operation, rows, hidden, dtype, ours, eager):
    inputs = randn(rows, hidden, dtype=dtype), randn(rows, hidden, dtype=dtype)
    return layer(operation, f"{rows}x{hidden}", inputs, 8, ours, eager, liger(f"liger_{operation}"))


def swiglu(rows, hidden, *, dtype):
    return gated("swiglu", rows, hidden, dtype, lt.swiglu, lambda g, u: F.silu(g) * u)


def geglu(rows, hidden, *, dtype):
    return gated("geglu", rows, hidden, dtype, lt.geglu, lambda g, u: F.gelu(g, approximate="tanh") * u)


def rope(batch, tokens, heads, kv_heads, dim, *, dtype):
    def view(h):  # a transposed view of a projection's output, as in attention
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


def short_conv(rows, tokens, channels, taps, *, dtype):
    """The convolution of a gated delta net, on concatenated rows of one length."""
    total = rows * tokens
    inputs = randn(total, channels, dtype=dtype), randn(channels, taps, dtype=dtype)
    cu_seqlens = torch.arange(0, total + 1, tokens, device=DEVICE, dtype=torch.int32)

    def ours(x, w):
        return lt.short_conv(x, w, cu_seqlens=cu_seqlens, activation="silu")

    def eager(x, w):
        by_channel = x.view(rows, tokens, channels).transpose(1, 2)
        y = F.conv1d(by_channel, w[:, None], padding=taps - 1, groups=channels)[..., :tokens]
        return F.silu(y).transpose(1, 2).reshape(total, channels)

    def fla(x, w):
        from fla.modules.conv import causal_conv1d

        return causal_conv1d(x[None], w, activation="silu", cu_seqlens=cu_seqlens)[0][0]

    def of_dao(x, w):
        from causal_conv1d import causal_conv1d_fn

        by_channel = x.view(rows, tokens, channels).transpose(1, 2)
        return causal_conv1d_fn(by_channel, w, activation="silu").transpose(1, 2).reshape(total, channels)

    size = f"{rows}x{tokens}, {channels} channels, {taps} taps"
    return layer("short_conv", size, inputs, 5, ours, eager, None, fla=fla, causal_conv1d=of_dao)


def short_conv_split(rows, tokens, key_width, value_width, taps, *, dtype):
    """The same, with queries, keys and values as three contiguous tensors, as the rule after it takes them."""
    widths, total = (key_width, key_width, value_width), rows * tokens
    channels = sum(widths)
    x, w = randn(total, channels, dtype=dtype), randn(channels, taps, dtype=dtype)
    cu_seqlens = torch.arange(0, total + 1, tokens, device=DEVICE, dtype=torch.int32)

    def ours(x, w):
        return lt.short_conv(x, w, cu_seqlens=cu_seqlens, activation="silu", split=widths)

    def copied(x, w):
        y = lt.short_conv(x, w, cu_seqlens=cu_seqlens, activation="silu")
        return tuple(part.contiguous() for part in y.split(widths, 1))

    def eager(x, w):
        by_channel = x.view(rows, tokens, channels).transpose(1, 2)
        y = F.conv1d(by_channel, w[:, None], padding=taps - 1, groups=channels)[..., :tokens]
        y = F.silu(y).transpose(1, 2).reshape(total, channels)
        return tuple(part.contiguous() for part in y.split(widths, 1))

    return Case(
        "short_conv_split",
        f"{rows}x{tokens}, {key_width}+{key_width}+{value_width} channels, {taps} taps",
        (x, w),
        {"ours": ours, "ours, copied": copied, "eager": eager, "compile": compiled(eager)},
        float64(eager),
        dtype,
        bytes=dtype.itemsize * 5 * x.numel(),
        upstream=tuple(randn(total, width, dtype=dtype, grad=False) for width in widths),
    )
