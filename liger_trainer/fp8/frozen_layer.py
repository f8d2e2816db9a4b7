"""Stores a frozen linear layer in FP8, for adapters on top of it. The matmuls are `liger_triton`'s."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from liger_triton.frozen_float8 import Float8Weight, dequantized, frozen_float8_linear, quantized

_WRITES = ("__setitem__", "__set__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "and", "or", "xor")))
_NO_WRITES = ("requires_grad_", "detach_")
_CODES = torch.uint8  # FP8 numbers as bytes: `model.to(dtype)` does not convert integers, and NCCL can send them
# FP8 bytes in pairs, for FSDP2: before torch 2.13 it shards no integers, and it rounds other floating-point dtypes
_WORDS = torch.bfloat16


class ReadOnly(torch.Tensor):
    """A tensor that raises when it, or a view of it, is written to. Results are plain tensors."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        in_place = name in _WRITES or (name.endswith("_") and name.strip("_") + "_" == name and name not in _NO_WRITES)
        if isinstance(kwargs.get("out"), cls) or (in_place and isinstance(args[0], cls)):
            raise RuntimeError(
                f"{name} would write to an fp8 weight of the base, and the result would be lost. To merge an adapter, "
                "save it and merge it into the 16-bit model: liger-trainer merge."
            )
        with torch._C.DisableTorchFunctionSubclass():
            memory = {t.untyped_storage()._cdata for t in args if isinstance(t, cls)}
            return tree_map_only(
                torch.Tensor,
                lambda t: t.as_subclass(cls) if t.untyped_storage()._cdata in memory else t,
                func(*args, **kwargs),
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).clone()


class FrozenFP8Module(nn.Module):
    """A module with frozen FP8 weights. Each weight is stored as `bits` (..., K), uint8, and `scale` (...), fp32.

    Both are parameters without a gradient. Converting the model does not change them. They are not buffers because DDP
    broadcasts buffers in every forward. After `view_as_bf16` the same bytes are bf16: (..., K / 2) and (..., 2).
    A state dict has the bits under the name of the weight.

    Attributes:
        weights: Maps the name of each weight to the names of its bits and its scale.
        compute_dtype: The dtype of the weights before they were quantized.
    """

    weights: dict[str, tuple[str, str]]
    compute_dtype: torch.dtype

    def view_as_bf16(self) -> None:
        """View bits and scales as bf16. FSDP2 then shards them by the first dimension and gathers them unchanged.

        From then on the state dict has the names of the parameters: torch's distributed checkpoints go by these.
        """
        for names in self.weights.values():
            bits, scale = map(self.get_parameter, names)
            if bits.dtype == _CODES:
                views = (bits.detach().view(_WORDS), scale.detach().view(len(scale), -1).view(_WORDS))
                for name, tensor in zip(names, views, strict=True):
                    self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def stored(self, weight: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bits (..., K), e4m3, and the scale (...), fp32, of the weight with this name."""
        bits, scale = (self._parameters[name] for name in self.weights[weight])
        assert bits is not None and scale is not None, "neither is ever taken away"
        if hasattr(bits, "full_tensor"):
            raise RuntimeError(
                "A frozen fp8 layer was read while FSDP2 had not gathered it. To merge an adapter, save it and merge "
                "it into the 16-bit model: liger-trainer merge."
            )
        if bits.dtype == scale.dtype == _WORDS:
            bits = bits.view(torch.float8_e4m3fn)
            return bits, scale.view(torch.float32).view(bits.shape[:-1])
        if bits.dtype != _CODES or scale.dtype != torch.float32:
            raise RuntimeError(
                f"A frozen fp8 layer has bits of {bits.dtype} and a scale of {scale.dtype}; expected {_CODES} and "
                "torch.float32. `.data` or `.type()` converted them. Load the model again and build the trainer on it."
            )
        return bits.view(torch.float8_e4m3fn), scale

    def freed(self) -> int:
        """Return how many bytes the weights take less than before they were quantized."""
        saved_bytes = 0
        for bits, scale in self.weights.values():
            saved_bytes += self.get_parameter(bits).nbytes * (self.compute_dtype.itemsize - 1)
            saved_bytes -= self.get_parameter(scale).nbytes
        return saved_bytes

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Move or convert the module. Bits and scales are moved, but keep their dtypes and values."""
        names = [name for pair in self.weights.values() for name in pair]
        # `_apply` replaces the parameters, so these tensors stay unconverted
        originals = {name: self.get_parameter(name).detach() for name in names}
        super()._apply(fn, recurse)
        for name, original in originals.items():
            applied = self.get_parameter(name)
            if applied.dtype != original.dtype:
                self.register_parameter(name, nn.Parameter(original.to(applied.device), requires_grad=False))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save a view (1, ..., K) of the bits under the name of the weight.

        The extra dimension makes other modules refuse it, even with `strict=False`. Otherwise their `copy_` would turn
        each byte into a number.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for weight, (bits, _) in self.weights.items():
            if self.get_parameter(bits).dtype == _CODES:
                destination[prefix + weight] = destination.pop(prefix + bits)[None]

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load weight and scale together. A 16-bit weight is an error: `copy_` would turn each number into a byte."""
        renamed = state_dict
        for name, (bits_name, scale_name) in self.weights.items():
            weight = state_dict.get(prefix + name)
            bits = state_dict.get(prefix + bits_name)
            scale = state_dict.get(prefix + scale_name)
            has_own_names = bits is not None and bits.dtype == self.get_parameter(bits_name).dtype
            if has_own_names or (weight is None and scale is None):
                continue  # the state of a sharded model, or of an adapter
            if weight is None or scale is None or not _is_saved_fp8(weight, scale):
                error_msgs.append(
                    f"{prefix.rstrip('.')} is an fp8 layer, but in this state its {name} is {_described(weight)} and "
                    f"{scale_name} is {_described(scale)}; expected {_CODES} with a first dimension of 1 and "
                    "torch.float32, as it saves them. Load 16-bit weights before you build the trainer."
                )
                return
            renamed = {**renamed, prefix + bits_name: weight[0]}
            del renamed[prefix + name]
        super()._load_from_state_dict(
            renamed, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class FrozenFloat8Linear(FrozenFP8Module):
    """x W^T + b with a frozen FP8 W, W ~ bits * scale[:, None]. Reading `weight` returns the dequantized matrix."""

    weights = {"weight": ("bits", "scale")}

    def __init__(self, weight: Float8Weight, bias: nn.Parameter | None, compute_dtype: torch.dtype):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.compute_dtype = compute_dtype
        self.bits = nn.Parameter(weight.bits.view(_CODES), requires_grad=False)
        self.scale = nn.Parameter(weight.scale, requires_grad=False)
        self.register_parameter("bias", bias)

    @classmethod
    def of(cls, linear: nn.Linear, device: torch.device | None = None) -> Self:
        """Return an FP8 layer for `linear`, with its bias and its training mode. A `meta` layer gives a `meta` layer.

        The weight is quantized on `device`, or where it is if `device` is None, and returns to its own device.
        """
        weight = linear.weight
        if weight.is_meta:
            bits = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device="meta")
            float8 = Float8Weight(bits, torch.empty(weight.shape[0], dtype=torch.float32, device="meta"))
        else:
            float8 = Float8Weight(*(t.to(weight.device) for t in quantized(weight.to(device or weight.device))))
        return cls(float8, linear.bias, weight.dtype).train(linear.training)

    @property
    def float8(self) -> Float8Weight:
        """The weight, for the functions of `liger_triton`."""
        return Float8Weight(*self.stored("weight"))

    @property
    def weight(self) -> torch.Tensor:
        """(N, K) in `compute_dtype`, computed at each read. Writing to it raises a `RuntimeError`."""
        return dequantized(self.float8, self.compute_dtype).as_subclass(ReadOnly)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return frozen_float8_linear(x, self.float8, self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            "weight=float8_e4m3fn"
        )


def _is_saved_fp8(weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Return whether a frozen FP8 module has saved these."""
    if weight.dtype != _CODES or scale.dtype != torch.float32:
        return False
    return weight.ndim == scale.ndim + 2 and len(weight) == 1


def _described(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
