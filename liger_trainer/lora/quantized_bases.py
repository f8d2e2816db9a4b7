"""Base layers of a library of quantisation, as LoRA has them under its adapters.

Each gives our functions a `PackedWeight`: its matrix in 16 bits, made by our kernel or by the library's own code each
time that it is used. Where the library multiplies in another way than by that matrix, its own forward is the product,
and the matrix is what its backward pass multiplies by. So the numbers are those of the library.

What is asked of a layer in each call is read from dictionaries, because an attribute of a quantised parameter goes
through `__torch_function__`.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensor

from liger_trainer.instance.hooks import home
from liger_trainer.instance.kind import names_of
from liger_triton.dequantize import Nested, PackedWeight, dequantize_4bit


class Library(NamedTuple):
    """How layers of one kind are read.

    Attributes:
        lora: Names of PEFT's class for a LoRA on such a layer.
        read: Returns the weight for an input like the one that it is given; None where the layer's own code has to run.
        why_not: Returns why the layer always runs its own code, or None.
        copy: Returns a layer with the settings of one, and the weight and bias of a linear layer.
        widths: (K, N) of such a linear layer.
    """

    lora: tuple[str, str]
    read: Callable[[Any, torch.Tensor], PackedWeight | None]
    why_not: Callable[[Any], str | None]
    copy: Callable[[Any, nn.Linear], nn.Module]
    widths: tuple[int, int] = (64, 32)


def kind_of(layer: nn.Module) -> type:
    """The class of `layer`, or that of its weight if it is a linear layer of PyTorch, as torchao leaves it."""
    return type(layer._parameters.get("weight")) if type(layer) is nn.Linear else type(layer)


def library_of(layer: nn.Module) -> Library | None:
    """How `layer` is read; None where it is none of a known library, or its forward was replaced."""
    found = _LIBRARIES.get(names_of(kind_of(layer)))
    return found if found is not None and home(type(layer).forward) == type(layer).__module__ else None


def weight_of(layer: nn.Module, x: torch.Tensor) -> PackedWeight | None:
    """The weight of a layer of a known library that multiplies `x`, in whose dtype it computes and returns.

    None where the layer does it otherwise: by fp32 within an autocast, for example.
    """
    library, device = library_of(layer), x.device.type
    if library is None or (torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != x.dtype):
        return None
    return library.read(layer, x)


def _plain(parameter: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach()


# bitsandbytes, four bits: NF4 and FP4, blocks of any size, scales in fp32 or in eight bits


def _read_4bit(layer: Any, x: torch.Tensor) -> PackedWeight | None:
    parameter, shape = layer._parameters["weight"], torch.Size((layer.out_features, layer.in_features))
    state = parameter.__dict__.get("quant_state")
    if (type(parameter) is not FakeTensor and names_of(type(parameter)) != _PARAMETER_4BIT) or state is None:
        return None
    if not layer.compute_type_is_set:  # the first call decides
        layer.set_compute_type(x)
        layer.compute_type_is_set = True
    if layer.compute_dtype not in (None, x.dtype) or state.dtype != x.dtype or state.shape != shape:
        return None  # it casts, or rounds its weight twice in the backward pass
    if x.device.type == "cpu" and _is_other_on_cpus(layer, state, x):
        return None
    second, packed = state.__dict__.get("state2"), _plain(parameter)
    if packed.numel() * packed.itemsize * 2 != shape.numel():
        return None
    nested = None if second is None else Nested(second.code, second.absmax, second.blocksize, state.offset)
    unpack = functools.partial(dequantize_4bit, packed, state.code, state.absmax, state.blocksize, shape, nested)
    return PackedWeight(shape, x.dtype, packed.device, unpack, (packed, state.absmax))


def _is_other_on_cpus(layer: Any, state: Any, x: torch.Tensor) -> bool:
    """Whether bitsandbytes has other numbers there, or may have: it packs its weight anew where nothing is trained,
    with rounded scales, and keeps it so. With rows that are no multiple of a block, its 0.50 unpacks wrong ones."""
    packs_anew = not (layer.training or x.requires_grad)
    return packs_anew or getattr(state, "packing_format_for_cpu", False) or state.shape[1] % state.blocksize != 0


def _why_not_4bit(layer: Any) -> str | None:
    state, dtype = layer._parameters["weight"].__dict__.get("quant_state"), layer.compute_dtype
    if state is None:
        return "its base has no quantised weight yet"
    if layer.compute_type_is_set and dtype not in (None, state.dtype):
        other = f"its base was quantised from {state.dtype} and computes in {dtype}"
        return f"{other}: set bnb_4bit_compute_dtype to the first"
    return None


def _copy_4bit(layer: Any, linear: nn.Linear) -> nn.Module:
    state, library = layer.weight.quant_state, importlib.import_module("bitsandbytes").nn
    settings = {"compress_statistics": state.nested, "quant_type": state.quant_type}
    copy = library.Linear4bit(*_widths(linear), False, compute_dtype=linear.weight.dtype, **settings)
    weight = library.Params4bit(linear.weight.detach(), False, module=copy, **settings)
    copy.weight, copy.bias = weight.to("cpu"), _frozen(linear.bias)
    return copy


# bitsandbytes, int8: its own forward rounds the input as well


def _read_8bit(layer: Any, x: torch.Tensor) -> PackedWeight | None:
    parameter, state = layer._parameters["weight"], layer.state
    if names_of(type(parameter)) != _PARAMETER_8BIT or state.has_fp16_weights or parameter.dtype != torch.int8:
        return None

    def unpack(dtype: torch.dtype) -> torch.Tensor:
        return state.CB.to(dtype, copy=True).mul_(state.SCB.unsqueeze(1).mul(1 / 127))

    shape = torch.Size((layer.out_features, layer.in_features))
    by_row = not state.threshold  # columns that have an outlier in any row are multiplied in 16 bits
    return PackedWeight(shape, x.dtype, parameter.device, unpack, (), layer.forward, by_row=by_row)


def _why_not_8bit(layer: Any) -> str | None:
    return "its base has weights in 16 bits" if layer.state.has_fp16_weights else None


def _copy_8bit(layer: Any, linear: nn.Linear) -> nn.Module:
    library = importlib.import_module("bitsandbytes").nn
    settings = {"has_fp16_weights": False}
    copy = library.Linear8bitLt(*_widths(linear), False, threshold=layer.state.threshold, **settings)
    copy.weight = library.Int8Params(linear.weight.detach(), False, **settings).to("cpu")
    copy.bias = _frozen(linear.bias)
    return copy


# HQQ: 1 to 8 bits, by its own code


def _read_hqq(layer: Any, x: torch.Tensor) -> PackedWeight | None:
    if layer.compute_dtype != x.dtype:
        return None

    def unpack(dtype: torch.dtype) -> torch.Tensor:
        return layer.dequantize().to(dtype)

    return PackedWeight(torch.Size(layer.meta["shape"]), x.dtype, layer.W_q.device, unpack, (_plain(layer.W_q),))


def _why_not_hqq(layer: Any) -> str | None:
    return None if layer.ready else "its base has no quantised weight yet"


def _copy_hqq(layer: Any, linear: nn.Linear) -> nn.Module:
    config = {**layer.quant_config, "offload_meta": False}
    return type(layer)(linear, config, compute_dtype=linear.weight.dtype, device="cpu")


# torchao, int8 weights: its own product, which scales what it has multiplied by a whole row


def _read_torchao(layer: Any, x: torch.Tensor) -> PackedWeight | None:
    weight = layer._parameters["weight"]
    if _why_not_torchao(layer) is not None:
        return None
    packed = weight.qdata

    def unpack(dtype: torch.dtype) -> torch.Tensor:
        return packed.to(dtype) if in_rows else weight.dequantize().to(dtype)

    in_rows = weight.block_size[-1] == packed.shape[1]
    by_row = (layer.forward, weight.scale.flatten().expand(packed.shape[0])) if in_rows else ()
    return PackedWeight(packed.shape, x.dtype, packed.device, unpack, (packed, weight.scale), *by_row)


def _why_not_torchao(layer: Any) -> str | None:
    weight = layer._parameters["weight"]
    if weight.act_quant_kwargs is not None or weight.act_pre_scale is not None:
        return "its base quantises or scales its input"
    return None


def _copy_torchao(layer: Any, linear: nn.Linear) -> nn.Module:
    of_layer, granularity = layer._parameters["weight"], importlib.import_module("torchao.quantization.granularity")
    if of_layer.block_size[-1] != of_layer.shape[1]:
        grain = granularity.PerGroup(32)
    else:
        grain = granularity.PerTensor() if of_layer.scale.numel() == 1 else granularity.PerRow()
    linear.weight = nn.Parameter(type(of_layer).from_hp(linear.weight.detach(), grain), requires_grad=False)
    return linear


# gptqmodel: GPTQ of any bits, groups and order, by its own code


def _read_gptq(layer: Any, x: torch.Tensor) -> PackedWeight | None:
    buffers = layer._buffers
    if buffers["g_idx"].numel() != layer.in_features or not (layer.training or type(layer).__name__ == "TorchLinear"):
        return None  # out of training, TritonV2Linear rounds its weight to the dtype of x alone

    def unpack(dtype: torch.dtype) -> torch.Tensor:
        return layer.dequantize_weight().to(dtype).t()

    packed = buffers["qweight"]
    shape = torch.Size((layer.out_features, layer.in_features))
    return PackedWeight(shape, x.dtype, packed.device, unpack, (packed, buffers["scales"]))


def _why_not_gptqmodel(layer: Any) -> str | None:
    if any(getattr(layer, name, None) for name in ("adapter", "online_full_had", "online_partial_had")):
        return "its base rotates its input, or has an adapter of gptqmodel"
    return None


def _copy_gptq(layer: Any, linear: nn.Linear) -> nn.Module:
    library = importlib.import_module("gptqmodel.nn_modules.qlinear.torch")
    settings = layer.bits, 32, layer.sym, layer.desc_act, *_widths(linear), linear.bias is not None
    return _with_random_numbers(library.TorchLinear(*settings, format=layer.format), linear)


def _with_random_numbers(copy: Any, linear: nn.Linear) -> nn.Module:
    """`copy` with some weight, since packing that of `linear` has gptqmodel compile an extension."""
    source = torch.Generator().manual_seed(0)
    for name in ("qweight", "qzeros"):
        copy._buffers[name].random_(-(2**31), 2**31, generator=source)
    copy.scales.uniform_(0.5 / 2**copy.bits, 1 / 2**copy.bits, generator=source)
    if linear.bias is not None:
        copy.bias.copy_(linear.bias.detach())
    return copy


# gptqmodel: AWQ, by its own code


def _read_awq(layer: Any, x: torch.Tensor) -> PackedWeight | None:
    if x.dtype not in (torch.float16, torch.bfloat16):
        return None  # it casts
    packed, zeros, scales = (layer._buffers[name] for name in ("qweight", "qzeros", "scales"))

    def unpack(dtype: torch.dtype) -> torch.Tensor:
        library = importlib.import_module(type(layer).__module__)
        return library.dequantize_gemm(packed, zeros, scales.to(dtype), layer.bits, layer.group_size).t()

    shape = torch.Size((layer.out_features, layer.in_features))
    return PackedWeight(shape, x.dtype, packed.device, unpack, (packed, scales))


def _copy_awq(layer: Any, linear: nn.Linear) -> nn.Module:
    settings, bias = (layer.bits, 32, layer.sym, layer.desc_act, *_widths(linear)), linear.bias is not None
    return _with_random_numbers(type(layer)(*settings, bias, register_buffers=True, dtype=torch.bfloat16), linear)


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
