"""LoRA: y = x W^T + b + s (x A^T) B^T, with A (r, K) and B (N, r). Hu et al. 2021, arXiv:2106.09685, section 4.1.

    h  = x A^T                         kept, (T, r)
    dh = s dy B         dB = s dy^T h
    dx = dy W + dh A    dA = dh^T x    dW and db only where W and b are trained

Shapes  x (..., K), y (..., N).
Dtypes  W and x bf16, fp16, fp32 (float64: the PyTorch twin). A and B may be fp32 with a W of 16 bits. The products run
        in the dtype of W, or in the autocast dtype, and accumulate in fp32. Without autocast, A, B and h keep their
        fp32 precision (`_low_rank.py`). fp32 A and B with an fp16 layer use the PyTorch twin, because fp16 underflows.
Bytes   b per element, without the product x W^T itself: forward reads x, and writes and reads y once more; backward
        reads dy and x, and writes and reads dx once more. Kept for backward: x itself, h, and A and s B in the dtype of
        the products, where PEFT's layer keeps a 16-bit copy of x for each adapter.
"""

import torch

from . import reference
from ._dispatch import KERNEL_DTYPES, autocast_dtype, is_wrapped, result_dtype
from ._lora import Adapter, Form, Layer, Weight, flattened, output_of
from .dequantize import PackedWeight
from .float8_cast import MULTIPLE, fault_of_device
from .frozen_float8 import Float8Weight, dequantized

Lora = tuple[torch.Tensor, torch.Tensor, float]


def lora_linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    lora: Lora,
    lora_input: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute x W^T + b + s (x A^T) B^T, differentiable in all tensors. A frozen W gets no gradient.

    Args:
        x (`torch.Tensor`): (..., K); bf16, fp16 or fp32 (float64: the PyTorch twin).
        weight (`torch.Tensor`): (N, K), of the dtype of `x`, or of any under autocast. A frozen `Float8Weight` computes
            x W^T and dy W in fp8, so results differ. A frozen `PackedWeight` is unpacked for each product and kept
            packed for backward.
        bias (`torch.Tensor`, *optional*): (N,).
        lora (`tuple`): (A, B, s), with A (r, K) and B (N, r) of any floating-point dtype and a number s.
        lora_input (`torch.Tensor`, *optional*): Input of A instead of `x`, such as `x` after a dropout. It gets its own
            gradient.

    Returns:
        `torch.Tensor` (..., N) in the dtype of `x`, or in the autocast dtype. It runs without Triton too.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    if lora is None:
        raise ValueError("lora is None; use torch.nn.functional.linear.")
    if lora_input is not None and lora_input.shape != x.shape:
        raise ValueError(f"lora_input is {tuple(lora_input.shape)}, x {tuple(x.shape)}; expected the same shape.")
    layers = checked_layers(x, [(weight, bias, lora)])
    if not runs_as_twin(x, layers):
        return output_of(x, lora_input, layers[0], form_of(x, layers))
    ((weight, bias, lora),) = as_tensors([(weight, bias, lora)], x)
    return reference.lora_linear(x, weight, bias, lora=lora, lora_input=lora_input)


def form_of(x: torch.Tensor, layers: list[Layer]) -> Form:
    """Return the `Form` of a group of layers."""
    cast = autocast_dtype(x)
    dtype = x.dtype if cast is None else cast
    split = cast is None and dtype.itemsize == 2 and _has_fp32(layers)
    scalings = tuple([None if layer.adapter is None else layer.adapter.scaling for layer in layers])
    frozen = tuple([None if isinstance(layer.weight, torch.Tensor) else layer.weight for layer in layers])
    return Form(scalings, dtype, 1 + split, frozen)


def as_tensors(layers: list[tuple[Weight, torch.Tensor | None, Lora | None]], x: torch.Tensor) -> list:
    """Return `layers` for the PyTorch twin, with each weight unpacked into a tensor."""
    dtype = result_dtype(x)

    def as_tensor(weight: Weight) -> torch.Tensor:
        if isinstance(weight, Float8Weight):
            return dequantized(weight, dtype)
        return weight.to(dtype) if isinstance(weight, PackedWeight) else weight

    return [(as_tensor(weight), bias, lora) for weight, bias, lora in layers]


def _has_fp32(layers: list[Layer]) -> bool:
    """Return whether any LoRA of `layers` is in fp32."""
    adapters = [layer.adapter for layer in layers if layer.adapter is not None]
    return any([a.dtype == torch.float32 or b.dtype == torch.float32 for a, b, _ in adapters])


def runs_as_twin(x: torch.Tensor, layers: list[Layer]) -> bool:
    """Return whether plain PyTorch computes these layers.

    It does in float64, while a compiler traces (the compiler fuses the passes itself), and for fp32 adapters on an fp16
    layer without autocast (two fp16 numbers cannot represent them).
    """
    if x.dtype == torch.float64 or torch.compiler.is_compiling() or any(map(is_wrapped, (x, *flattened(layers)))):
        return True
    return x.dtype == torch.float16 and _has_fp32(layers) and autocast_dtype(x) is None


def checked_layers(x: torch.Tensor, layers: list[tuple[Weight, torch.Tensor | None, Lora | None]]) -> list[Layer]:
    """Return `layers` if all fit `x`; raise ValueError if one does not."""
    if x.ndim == 0 or x.dtype not in (*KERNEL_DTYPES, torch.float64):
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}; expected (..., K) in bfloat16, float16, float32, float64.")
    width = x.shape[-1]
    device = x.device
    checked = []
    casts = autocast_dtype(x) is not None
    for weight, bias, lora in layers:
        if weight.ndim != 2 or weight.shape[1] != width:
            raise ValueError(f"weight is {tuple(weight.shape)}, x {tuple(x.shape)}; expected weight (N, {width}).")
        if isinstance(weight, Float8Weight):
            if any([width % MULTIPLE for width in weight.shape]):
                raise ValueError(f"weight is {tuple(weight.shape)} in fp8; expected multiples of {MULTIPLE}.")
            fault = fault_of_device(device)
            if fault is not None:
                raise ValueError(f"{fault}; take a weight in 16 bits.")
        elif weight.dtype != x.dtype and not casts:
            raise ValueError(f"weight is {weight.dtype}, x {x.dtype}; convert one of them, or use autocast.")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias is {tuple(bias.shape)}; expected ({weight.shape[0]},) or None.")
        adapter = None if lora is None else Adapter(*lora)
        if adapter is not None:
            rank = adapter.a.shape[0]
            if adapter.a.shape != (rank, width) or adapter.b.shape != (weight.shape[0], rank):
                raise ValueError(
                    f"lora has A {tuple(adapter.a.shape)} and B {tuple(adapter.b.shape)}; expected A (r, {width}) and "
                    f"B ({weight.shape[0]}, r) for weight {tuple(weight.shape)}."
                )
        for k, t in enumerate((weight, bias) if adapter is None else (weight, bias, adapter.a, adapter.b)):
            if t is not None and (t.device != device or not t.dtype.is_floating_point):
                name = ("weight", "bias", "lora A", "lora B")[k]
                raise ValueError(f"{name} is {t.dtype} on {t.device}, x on {x.device}; expected floating point there.")
        checked.append(Layer(weight, bias, adapter))
    return checked
