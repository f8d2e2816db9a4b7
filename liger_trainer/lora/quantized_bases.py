"""Reads the base layers of quantization libraries (bitsandbytes, HQQ, torchao, gptqmodel) under LoRA adapters.

Each reader returns a `PackedWeight`. It unpacks the 16-bit matrix at every use, with our kernel or the library's code.
Some libraries do not multiply by that matrix in forward. There the library's forward computes the product, and the
matrix is used in backward, as the library does. The numbers are the library's in every case.

Per-call checks read `__dict__`: attribute access on quantized parameters goes through `__torch_function__`.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensor

from liger_trainer.patching.core.hooks import home
from liger_trainer.patching.core.pattern import names_of
from liger_triton.dequantize import Nested, PackedWeight, dequantize_4bit


class Library(NamedTuple):
    """Functions that read and copy the layers of one quantization library.

    Attributes:
        lora: Module and name of PEFT's LoRA class for such a layer.
        read: Returns the weight for an input like `x`, or None if the layer's own code has to run.
        why_not: Returns why the layer always runs its own code, or None.
        copy: Returns a layer with the settings of the first argument, and weight and bias of the linear layer given.
        widths: (K, N) of that linear layer.
    """

    lora: tuple[str, str]
    read: Callable[[Any, torch.Tensor], PackedWeight | None]
    why_not: Callable[[Any], str | None]
    copy: Callable[[Any, nn.Linear], nn.Module]
    widths: tuple[int, int] = (64, 32)


def quantized_class(layer: nn.Module) -> type:
    """Return the class that names the library: torchao replaces the weight of an `nn.Linear`, others the layer."""
    return type(layer._parameters.get("weight")) if type(layer) is nn.Linear else type(layer)


def library_of(layer: nn.Module) -> Library | None:
    """Return the readers for `layer`, or None if its library is unknown or its forward was replaced."""
    library = _LIBRARIES.get(names_of(quantized_class(layer)))
    if library is None or home(type(layer).forward) != type(layer).__module__:
        return None
    return library


def weight_of(layer: nn.Module, x: torch.Tensor) -> PackedWeight | None:
    """Return the packed weight of a layer of a known library, or None if its own code has to run for `x`.

    The layer must compute in the dtype of `x`. An fp32 input within autocast, for example, is left to the library.
    """
    library = library_of(layer)
    device = x.device.type
    if library is None or (torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != x.dtype):
        return None
    return library.read(layer, x)


def _without_subclass(parameter: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach()


# bitsandbytes 4-bit: NF4 and FP4, blocks of any size, scales in fp32 or quantized to 8-bit


def _read_4bit(layer: Any, x: torch.Tensor) -> PackedWeight | None:
    parameter = layer._parameters["weight"]
    shape = torch.Size((layer.out_features, layer.in_features))
    state = parameter.__dict__.get("quant_state")
    is_packed = type(parameter) is FakeTensor or names_of(type(parameter)) == _PARAMETER_4BIT  # fake: in `fit`
    if not is_packed or state is None:
        return None
    if not layer.compute_type_is_set:  # bitsandbytes decides this in its first forward, which does not run here
        layer.set_compute_type(x)
        layer.compute_type_is_set = True
    if layer.compute_dtype not in (None, x.dtype) or state.dtype != x.dtype or state.shape != shape:
        return None  # bitsandbytes casts, or rounds its weight twice in backward
    if x.device.type == "cpu" and _differs_on_cpu(layer, state, x):
        return None
    packed = _without_subclass(parameter)
    weights_in_memory = 2 * packed.numel() * packed.itemsize  # two in each byte
    if weights_in_memory != shape.numel():  # a part of the weight, as in a shard
        return None
    second = state.__dict__.get("state2")
    nested = None if second is None else Nested(second.code, second.absmax, second.blocksize, state.offset)
    unpack = functools.partial(dequantize_4bit, packed, state.code, state.absmax, state.blocksize, shape, nested)
    return PackedWeight(shape, x.dtype, packed.device, unpack, (packed, state.absmax))


def _differs_on_cpu(layer: Any, state: Any, x: torch.Tensor) -> bool:
    """Return whether bitsandbytes computes other numbers on a CPU, or may do so.

    In a forward without training it repacks its weight with rounded scales, and keeps it so. bitsandbytes 0.50 unpacks
    wrong numbers if a row is not a multiple of the block size.
    """
    repacks = not (layer.training or x.requires_grad)
    return repacks or getattr(state, "packing_format_for_cpu", False) or state.shape[1] % state.blocksize != 0


def _why_not_4bit(layer: Any) -> str | None:
    state = layer._parameters["weight"].__dict__.get("quant_state")
    dtype = layer.compute_dtype
    if state is None:
        return "its base has no quantized weight yet"
    if layer.compute_type_is_set and dtype not in (None, state.dtype):
        mismatch = f"its base was quantized from {state.dtype} and computes in {dtype}"
        return f"{mismatch}: set bnb_4bit_compute_dtype: {str(state.dtype).removeprefix('torch.')}"
    return None


def _copy_4bit(layer: Any, linear: nn.Linear) -> nn.Module:
    state = layer.weight.quant_state
    library = importlib.import_module("bitsandbytes").nn
    settings = {"compress_statistics": state.nested, "quant_type": state.quant_type}
    copy = library.Linear4bit(*_widths(linear), False, compute_dtype=linear.weight.dtype, **settings)
    copy.weight = library.Params4bit(linear.weight.detach(), False, module=copy, **settings).to("cpu")
    copy.bias = _frozen(linear.bias)
    return copy


# bitsandbytes int8: its forward quantizes the input too


def _read_8bit(layer: Any, x: torch.Tensor) -> PackedWeight | None:
    parameter = layer._parameters["weight"]
    state = layer.state
    if names_of(type(parameter)) != _PARAMETER_8BIT or state.has_fp16_weights or parameter.dtype != torch.int8:
        return None

    def unpack(dtype: torch.dtype) -> torch.Tensor:
        return state.CB.to(dtype, copy=True).mul_(state.SCB.unsqueeze(1).mul(1 / 127))

    shape = torch.Size((layer.out_features, layer.in_features))
    by_row = not state.threshold  # with a threshold, a column with an outlier in any row is multiplied in 16-bit
    return PackedWeight(shape, x.dtype, parameter.device, unpack, (), layer.forward, by_row=by_row)


def _why_not_8bit(layer: Any) -> str | None:
    return "its base has 16-bit weights (has_fp16_weights)" if layer.state.has_fp16_weights else None


def _copy_8bit(layer: Any, linear: nn.Linear) -> nn.Module:
    library = importlib.import_module("bitsandbytes").nn
    settings = {"has_fp16_weights": False}
    copy = library.Linear8bitLt(*_widths(linear), False, threshold=layer.state.threshold, **settings)
    copy.weight = library.Int8Params(linear.weight.detach(), False, **settings).to("cpu")
    copy.bias = _frozen(linear.bias)
    return copy


# HQQ: 1-bit to 8-bit, unpacked by HQQ's code


def _read_hqq(layer: Any, x: torch.Tensor) -> PackedWeight | None:
    if layer.compute_dtype != x.dtype:
        return None

    def unpack(dtype: torch.dtype) -> torch.Tensor:
        return layer.dequantize().to(dtype)

    shape = torch.Size(layer.meta["shape"])
    return PackedWeight(shape, x.dtype, layer.W_q.device, unpack, (_without_subclass(layer.W_q),))


def _why_not_hqq(layer: Any) -> str | None:
    return None if layer.ready else "its base has no quantized weight yet"


def _copy_hqq(layer: Any, linear: nn.Linear) -> nn.Module:
    config = {**layer.quant_config, "offload_meta": False}
    return type(layer)(linear, config, compute_dtype=linear.weight.dtype, device="cpu")


# torchao int8 weights: its forward multiplies the integers and scales each row of the result


def _read_torchao(layer: Any, x: torch.Tensor) -> PackedWeight | None:
    weight = layer._parameters["weight"]
    if _why_not_torchao(layer) is not None:
        return None
    packed = weight.qdata
    scaled_by_row = weight.block_size[-1] == packed.shape[1]

    def unpack(dtype: torch.dtype) -> torch.Tensor:
        return packed.to(dtype) if scaled_by_row else weight.dequantize().to(dtype)

    # With a scale for each row, backward multiplies by the integers and scales dy instead, as PEFT does.
    forward_and_scales = (layer.forward, weight.scale.flatten().expand(packed.shape[0])) if scaled_by_row else ()
    return PackedWeight(packed.shape, x.dtype, packed.device, unpack, (packed, weight.scale), *forward_and_scales)


def _why_not_torchao(layer: Any) -> str | None:
    weight = layer._parameters["weight"]
    if weight.act_quant_kwargs is not None or weight.act_pre_scale is not None:
        return "its base quantizes or scales its input"
    return None


def _copy_torchao(layer: Any, linear: nn.Linear) -> nn.Module:
    full_weight = layer._parameters["weight"]
    library = importlib.import_module("torchao.quantization.granularity")
    if full_weight.block_size[-1] != full_weight.shape[1]:
        granularity = library.PerGroup(32)
    elif full_weight.scale.numel() == 1:
        granularity = library.PerTensor()
    else:
        granularity = library.PerRow()
    weight = type(full_weight).from_hp(linear.weight.detach(), granularity)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


# gptqmodel GPTQ: any bits, group size and order, unpacked by gptqmodel's code


def _read_gptq(layer: Any, x: torch.Tensor) -> PackedWeight | None:
    buffers = layer._buffers
    if buffers["g_idx"].numel() != layer.in_features or not (layer.training or type(layer).__name__ == "TorchLinear"):
        return None  # in evaluation, TritonV2Linear rounds its weight once, to the dtype of x

    def unpack(dtype: torch.dtype) -> torch.Tensor:
        return layer.dequantize_weight().to(dtype).t()

    packed = buffers["qweight"]
    shape = torch.Size((layer.out_features, layer.in_features))
    return PackedWeight(shape, x.dtype, packed.device, unpack, (packed, buffers["scales"]))


def _why_not_gptqmodel(layer: Any) -> str | None:
    if any(getattr(layer, name, None) for name in ("adapter", "online_full_had", "online_partial_had")):
        return "its base rotates its input, or has a gptqmodel adapter"
    return None


def _copy_gptq(layer: Any, linear: nn.Linear) -> nn.Module:
    library = importlib.import_module("gptqmodel.nn_modules.qlinear.torch")
    settings = layer.bits, 32, layer.sym, layer.desc_act, *_widths(linear), linear.bias is not None
    return _with_random_numbers(library.TorchLinear(*settings, format=layer.format), linear)


def _with_random_numbers(copy: Any, linear: nn.Linear) -> nn.Module:
    """Return `copy` with random packed weights. Packing a real weight makes gptqmodel compile an extension."""
    source = torch.Generator().manual_seed(0)
    for name in ("qweight", "qzeros"):
        copy._buffers[name].random_(-(2**31), 2**31, generator=source)
    copy.scales.uniform_(0.5 / 2**copy.bits, 1 / 2**copy.bits, generator=source)
    if linear.bias is not None:
        copy.bias.copy_(linear.bias.detach())
    return copy


# gptqmodel AWQ, unpacked by gptqmodel's code


def _read_awq(layer: Any, x: torch.Tensor) -> PackedWeight | None:
    if x.dtype not in (torch.float16, torch.bfloat16):
        return None  # gptqmodel casts the input
    packed, zeros, scales = (layer._buffers[name] for name in ("qweight", "qzeros", "scales"))

    def unpack(dtype: torch.dtype) -> torch.Tensor:
        library = importlib.import_module(type(layer).__module__)
        return library.dequantize_gemm(packed, zeros, scales.to(dtype), layer.bits, layer.group_size).t()

    shape = torch.Size((layer.out_features, layer.in_features))
    return PackedWeight(shape, x.dtype, packed.device, unpack, (packed, scales))


def _copy_awq(layer: Any, linear: nn.Linear) -> nn.Module:
    settings = layer.bits, 32, layer.sym, layer.desc_act, *_widths(linear), linear.bias is not None
    return _with_random_numbers(type(layer)(*settings, register_buffers=True, dtype=torch.bfloat16), linear)


def _widths(linear: nn.Linear) -> tuple[int, int]:
    return linear.in_features, linear.out_features


def _frozen(bias: nn.Parameter | None) -> nn.Parameter | None:
    return None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)


_PARAMETER_4BIT = ("bitsandbytes.nn.modules", "Params4bit")
_PARAMETER_8BIT = ("bitsandbytes.nn.modules", "Int8Params")
_GPTQ = Library(("peft.tuners.lora.gptq", "GPTQLoraLinear"), _read_gptq, _why_not_gptqmodel, _copy_gptq)
_AWQ = Library(("peft.tuners.lora.awq", "AwqLoraLinear"), _read_awq, _why_not_gptqmodel, _copy_awq)
_4BIT = Library(("peft.tuners.lora.bnb", "Linear4bit"), _read_4bit, _why_not_4bit, _copy_4bit)
_LIBRARIES = {
    **{("bitsandbytes.nn.modules", name): _4BIT for name in ("Linear4bit", "LinearNF4", "LinearFP4")},
    ("bitsandbytes.nn.modules", "Linear8bitLt"): Library(
        ("peft.tuners.lora.bnb", "Linear8bitLt"), _read_8bit, _why_not_8bit, _copy_8bit
    ),
    ("hqq.core.quantize", "HQQLinear"): Library(
        ("peft.tuners.lora.hqq", "HqqLoraLinear"), _read_hqq, _why_not_hqq, _copy_hqq
    ),
    ("gptqmodel.nn_modules.qlinear.torch", "TorchLinear"): _GPTQ,
    ("gptqmodel.nn_modules.qlinear.tritonv2", "TritonV2Linear"): _GPTQ,
    ("gptqmodel.nn_modules.qlinear.torch_awq", "AwqTorchLinear"): _AWQ,
    ("torchao.quantization", "Int8Tensor"): Library(
        ("peft.tuners.lora.torchao", "TorchaoLoraLinear"), _read_torchao, _why_not_torchao, _copy_torchao
    ),
}
