"""Cases of LoRA on each quantisation library's bases: q, k and v, or an MLP. The floor is two products per weight.

The reference is PEFT's layers on the same weights, in the same dtype and under the same autocast. So the error of ours
is its distance to PEFT's results and gradients.
"""

import copy
import functools
import importlib

import torch
from _cases import Case, forward_backward, randn
from _cases_lora import SCALING, under_autocast
from _measure import DEVICE


class Attention(torch.nn.Module):
    """Projections of q, k and v, with a quarter as many heads for k and v."""

    def __init__(self, hidden):
        super().__init__()
        widths = {"q_proj": hidden, "k_proj": hidden // 4, "v_proj": hidden // 4}
        for name, width in widths.items():
            self.add_module(name, torch.nn.Linear(hidden, width, bias=False))

    def forward(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def _bitsandbytes_4bit(linear, **settings):
    import bitsandbytes as bnb

    size = linear.in_features, linear.out_features
    layer = bnb.nn.Linear4bit(*size, bias=False, compute_dtype=linear.weight.dtype, device="meta", **settings)
    layer.weight = bnb.nn.Params4bit(linear.weight.data, False, module=layer, **settings).to(DEVICE)
    return layer


def _bitsandbytes_int8(linear):
    import bitsandbytes as bnb

    size = linear.in_features, linear.out_features
    layer = bnb.nn.Linear8bitLt(*size, bias=False, has_fp16_weights=False, threshold=6.0, device="meta")
    layer.weight = bnb.nn.Int8Params(linear.weight.data, False, has_fp16_weights=False).to(DEVICE)
    return layer


def _torchao(linear, bits, group=None):
    from torchao import quantization
    from torchao.quantization import granularity

    if bits == 4:
        config = quantization.Int4WeightOnlyConfig(group_size=group)
    else:
        grain = granularity.PerRow() if group is None else granularity.PerGroup(group)
        config = quantization.Int8WeightOnlyConfig(granularity=grain)
    holder = torch.nn.Sequential(linear)
    quantization.quantize_(holder, config)
    return holder[0]


def _hqq(linear):
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config = BaseQuantizeConfig(nbits=4, group_size=64, axis=1)
    return HQQLinear(linear, config, compute_dtype=linear.weight.dtype, device=DEVICE)


def _gptqmodel(linear, module, name, **settings):
    """A gptqmodel layer with random numbers, because packing a weight compiles an extension."""
    cls = getattr(importlib.import_module(f"gptqmodel.nn_modules.qlinear.{module}"), name)
    layer = cls(4, 32, False, False, linear.in_features, linear.out_features, False, register_buffers=True, **settings)
    for buffer in ("qweight", "qzeros"):
        layer._buffers[buffer].random_(-(2**31), 2**31)
    layer.scales.uniform_(0.5 / 16, 1 / 16).mul_(linear.in_features**-0.5)
    layer = layer.to(DEVICE)
    layer.post_init()
    return layer


# Functions that make a frozen layer from a 16-bit linear one.
BASES = {
    "16 bits": lambda linear: linear,
    "bitsandbytes NF4": functools.partial(_bitsandbytes_4bit, quant_type="nf4", compress_statistics=False),
    "bitsandbytes NF4, double": functools.partial(_bitsandbytes_4bit, quant_type="nf4", compress_statistics=True),
    "bitsandbytes FP4": functools.partial(_bitsandbytes_4bit, quant_type="fp4", compress_statistics=False),
    "bitsandbytes int8": _bitsandbytes_int8,
    "torchao int8 rows": functools.partial(_torchao, bits=8),
    "torchao int8 groups": functools.partial(_torchao, bits=8, group=64),
    "torchao int4": functools.partial(_torchao, bits=4, group=64),
    "hqq 4 bits": _hqq,
    "gptq": functools.partial(_gptqmodel, module="torch", name="TorchLinear", format="gptq_v2"),
    "gptq TritonV2": functools.partial(_gptqmodel, module="tritonv2", name="TritonV2Linear", format="gptq_v2"),
    "awq": functools.partial(_gptqmodel, module="torch_awq", name="AwqTorchLinear", dtype=torch.bfloat16),
}


def lora_base(rows, hidden, inner, rank, group, kind, *, dtype):
    """The layers of a `group` on a base of this `kind`: `"attention"` (q, k and v), or `"mlp"`, a Llama's."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    from liger_trainer import apply_liger
    from liger_trainer.lora import layers

    layers.LEAST_WORK = 0
    with torch.device(DEVICE):
        of_group = (
            Attention(hidden)
            if group == "attention"
            else LlamaMLP(LlamaConfig(hidden_size=hidden, intermediate_size=inner))
        )
    of_group.to(dtype).requires_grad_(False)
    linear = {name: child for name, child in of_group.named_children() if isinstance(child, torch.nn.Linear)}
    sizes = [tuple(child.weight.shape) for child in linear.values()]
    for name, child in linear.items():
        setattr(of_group, name, BASES[kind](child))
    config = LoraConfig(r=rank, lora_alpha=SCALING * rank, target_modules=list(linear), init_lora_weights=False)
    holder = torch.nn.ModuleDict({"group": of_group})
    # PEFT asks for its device
    holder.register_parameter("of_the_model", torch.nn.Parameter(torch.zeros(1, device=DEVICE)))
    # PEFT chooses its layer by these
    holder.is_loaded_in_4bit = kind.startswith(("bitsandbytes NF4", "bitsandbytes FP4"))
    holder.is_loaded_in_8bit = kind == "bitsandbytes int8"
    stock = get_peft_model(holder, config)
    model = copy.deepcopy(stock)
    trained = {name: p for name, p in stock.named_parameters() if p.requires_grad}
    for name, p in trained.items():
        parent, _, own = name.rpartition(".")
        model.get_submodule(parent)._parameters[own] = p  # one leaf for both
    fused = len(apply_liger(model)["lora"].swapped)

    def peft(x, *adapters):
        return stock.base_model.model["group"](x)

    def ours(x, *adapters):
        return model.base_model.model["group"](x)

    name = "ours" if fused == len(linear) else f"ours, {fused} of {len(linear)} fused"
    x = randn(rows, hidden, dtype=dtype)
    outputs = [n for n, _ in sizes] if group == "attention" else [hidden]
    return Case(
        "lora_base",
        f"{rows}x{hidden}, r={rank}, {group}, {kind}",
        (x, *trained.values()),
        {name: under_autocast(ours), "peft": under_autocast(peft)},
        lambda case: forward_backward(case.providers["peft"], case)(),
        dtype,
        flop=2 * 2 * rows * sum(n * k for n, k in sizes),
        upstream=tuple(randn(rows, width, dtype=dtype, grad=False) for width in outputs),
        graph=False,  # the host waits in some libraries
    )
