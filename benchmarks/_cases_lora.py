"""Cases of LoRA: a layer, and a gated MLP. The floor is two products of each frozen weight: the forward one and dx.

Weights are 16-bit and adapters fp32, as PEFT makes them. Providers run under autocast, as with `bf16=True`, unless they
say otherwise.
"""

import functools

import torch
import torch.nn.functional as F
from _cases import Case, compiled, float64, randn
from _measure import DEVICE

import liger_triton as lt

SCALING = 2.0


def under_autocast(fn):
    """Run `fn` as under `bf16=True`. In fp32 there is no autocast."""

    @functools.wraps(fn)
    def run(x, *inputs):
        with torch.autocast(DEVICE, dtype=x.dtype, enabled=x.dtype != torch.float32):
            return fn(x, *inputs)

    return run


def adapter(width_in, width_out, rank):
    """A and B with a product as large as a trained one."""
    a = randn(rank, width_in, dtype=torch.float32, scale=width_in**-0.5, grad=False)
    b = randn(width_out, rank, dtype=torch.float32, scale=0.1 * rank**-0.5, grad=False)
    return [torch.nn.Parameter(t) for t in (a, b)]


def peft_layer(weight, a, b):
    """PEFT's layer with these tensors."""
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        base = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    base.weight = torch.nn.Parameter(weight, requires_grad=False)
    config = LoraConfig(r=a.shape[0], lora_alpha=SCALING * a.shape[0], target_modules=["0"])
    layer = get_peft_model(torch.nn.Sequential(base), config).base_model.model[0]
    layer.lora_A["default"].weight, layer.lora_B["default"].weight = a, b
    return layer


def plain(x, weight, a, b):
    """The formula of PEFT's layer."""
    y = F.linear(x, weight)
    return (y + F.linear(F.linear(x.to(a.dtype), a), b) * SCALING).to(y.dtype)


def lora_linear(rows, width_in, width_out, rank, *, dtype):
    x = randn(rows, width_in, dtype=dtype)
    weight = randn(width_out, width_in, dtype=dtype, scale=width_in**-0.5, grad=False)
    a, b = adapter(width_in, width_out, rank)
    layer = peft_layer(weight, a, b)

    def ours(x, weight, a, b):
        return lt.lora_linear(x, weight, lora=(a, b, SCALING))

    def peft(x, weight, a, b):
        return layer(x)

    return Case(
        "lora_linear",
        f"{rows}x{width_in}->{width_out}, r={rank}",
        (x, weight, a, b),
        {
            "ours": under_autocast(ours),
            "ours, no autocast": ours,
            "peft": under_autocast(peft),
            "peft, no autocast": peft,
            "compile": under_autocast(compiled(plain)),
        },
        float64(plain),
        dtype,
        flop=2 * 2 * rows * width_in * width_out,
        upstream=(randn(rows, width_out, dtype=dtype, grad=False),),
    )


def lora_mlp(rows, hidden, inner, rank, *, dtype):
    x = randn(rows, hidden, dtype=dtype)
    shapes = ((hidden, inner), (hidden, inner), (inner, hidden))
    flat = []
    for k, n in shapes:
        flat.append(randn(n, k, dtype=dtype, scale=k**-0.5, grad=False))
        flat += adapter(k, n, rank)
    layers = [peft_layer(*flat[k : k + 3]) for k in (0, 3, 6)]

    def gated(gate, up, down, x):
        return down(F.silu(gate(x)) * up(x))

    def eager(x, *flat):
        return gated(*(functools.partial(_plain_of, flat[k : k + 3]) for k in (0, 3, 6)), x)

    def ours(x, *flat):
        return lt.lora_mlp(x, *((flat[k], None, (flat[k + 1], flat[k + 2], SCALING)) for k in (0, 3, 6)))

    def peft(x, *flat):
        return gated(*layers, x)

    return Case(
        "lora_mlp",
        f"{rows}x{hidden}, {inner}, r={rank}",
        (x, *flat),
        {
            "ours": under_autocast(ours),
            "ours, no autocast": ours,
            "peft": under_autocast(peft),
            "compile": under_autocast(compiled(eager)),
        },
        float64(eager),
        dtype,
        flop=3 * 2 * 2 * rows * hidden * inner,
        upstream=(randn(rows, hidden, dtype=dtype, grad=False),),
    )


def _plain_of(tensors, x):
    return plain(x, *tensors)
