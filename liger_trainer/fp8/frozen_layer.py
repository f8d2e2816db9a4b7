"""A linear layer of a frozen base model in eight bits, for adapters on top of it. `liger_triton` multiplies."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from liger_triton.frozen_float8 import Float8Weight, dequantized, frozen_float8_linear, quantized

_WRITES = ("__setitem__", "__set__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "and", "or", "xor")))
_NO_WRITES = ("requires_grad_", "detach_")
_CODES = torch.uint8  # holds the bits: converting a model to another dtype leaves it alone, and NCCL can send it
# For FSDP2, which takes no integers before torch 2.13, and rounds other floating-point numbers where it gathers them
_WORDS = torch.bfloat16


class _ReadOnly(torch.Tensor):
    """A tensor that raises when it, or a view of it, is written to. Results are plain tensors."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        in_place = name in _WRITES or (name.endswith("_") and name.strip("_") + "_" == name and name not in _NO_WRITES)
        if isinstance(kwargs.get("out"), cls) or (in_place and isinstance(args[0], cls)):
            raise RuntimeError(
                f"{name} would write to a weight of the base, which has eight bits (fp8), and be lost. To merge an "
                "adapter, save it and load it next to the model in 16 bits: liger-trainer merge."
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


class FrozenFloat8Linear(nn.Module):
    """x W^T + b with a frozen W of eight bits, W ~ bits * scale[:, None].

    Code that reads the `weight` of a layer gets the dequantised numbers. A state dict has the bits under that name.

    `bits` (N, K), uint8, and `scale` (N,), fp32, have no gradient, and stay as they are whatever the model is converted
    to. After `hold_words` they are (N, K / 2) and (N, 2), bf16, of the same bytes. They are no buffers, because DDP
    sends the buffers of a model in every forward pass. `compute_dtype` is the dtype of the weight before it was
    quantised.
    """

    def __init__(self, weight: Float8Weight, bias: nn.Parameter | None, compute_dtype: torch.dtype):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.compute_dtype = compute_dtype
        self.bits = nn.Parameter(weight.bits.view(_CODES), requires_grad=False)
        self.scale = nn.Parameter(weight.scale, requires_grad=False)
        self.register_parameter("bias", bias)

    @classmethod
    def of(cls, linear: nn.Linear, device: torch.device | None = None) -> Self:
        """Return a layer for `linear`, with its bias and its mode. On `meta` it has no values either.

        `device` is where the weight is put into eight bits. Unset, that is where it is.
        """
        weight = linear.weight
        if weight.is_meta:
            bits = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device="meta")
            float8 = Float8Weight(bits, torch.empty(weight.shape[0], dtype=torch.float32, device="meta"))
        else:
            float8 = Float8Weight(*(t.to(weight.device) for t in quantized(weight.to(device or weight.device))))
        return cls(float8, linear.bias, weight.dtype).train(linear.training)

    def hold_words(self) -> None:
        """Hold bits and scale as words of 16 bits, which FSDP2 shards by rows and gathers as they are.

        From then on a state dict has the names of the parameters, by which torch's distributed checkpoints go.
        """
        if self.bits.dtype == _CODES:
            self.bits = nn.Parameter(self.bits.detach().view(_WORDS), requires_grad=False)
            self.scale = nn.Parameter(self.scale.detach()[:, None].view(_WORDS), requires_grad=False)

    @property
    def float8(self) -> Float8Weight:
        """The weight, for the functions of `liger_triton`."""
        bits, scale = self._parameters["bits"], self._parameters["scale"]
        assert bits is not None and scale is not None, "neither is ever taken away"
        if hasattr(bits, "full_tensor"):
            raise RuntimeError(
                "A frozen layer in eight bits was read outside the calls in which FSDP2 gathers it. To merge an "
                "adapter, save it and load it next to the model in 16 bits: liger-trainer merge."
            )
        if bits.dtype == scale.dtype == _WORDS:
            return Float8Weight(bits.view(torch.float8_e4m3fn), scale.view(torch.float32).view(-1))
        if bits.dtype != _CODES or scale.dtype != torch.float32:
            raise RuntimeError(
                f"A frozen layer in eight bits has bits of {bits.dtype} and a scale of {scale.dtype}; expected "
                f"{_CODES} and torch.float32. They were converted by `.data` or `.type()`. Build the trainer on a "
                "model that is loaded anew."
            )
        return Float8Weight(bits.view(torch.float8_e4m3fn), scale)

    @property
    def weight(self) -> torch.Tensor:
        """(N, K) in `compute_dtype`, computed at each read. Writing to it raises a `RuntimeError`."""
        return dequantized(self.float8, self.compute_dtype).as_subclass(_ReadOnly)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return frozen_float8_linear(x, self.float8, self.bias)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Move or convert the layer, except its bits and its scale, which keep their dtypes and their values."""
        kept = {name: self._parameters[name].detach() for name in ("bits", "scale")}  # which `_apply` does not reach
        super()._apply(fn, recurse)
        for name, before in kept.items():
            if (now := self._parameters[name]).dtype != before.dtype:
                self.register_parameter(name, nn.Parameter(before.to(now.device), requires_grad=False))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save the bits as a weight (1, N, K), a view, which no other layer loads, not even with `strict=False`.

        Its `copy_` would make a number of each byte.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.bits.dtype == _CODES:
            destination[prefix + "weight"] = destination.pop(prefix + "bits")[None]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Load weight and scale together. A weight of numbers is an error: `copy_` would make a byte of each."""
        bits, weight, scale = (state_dict.get(prefix + name) for name in ("bits", "weight", "scale"))
        if (weight is None and scale is None) or (bits is not None and bits.dtype == self.bits.dtype):
            pass  # such as the state of an adapter, or of a sharded model
        elif weight is not None and scale is not None and _is_ours(weight, scale):
            state_dict = {**state_dict, prefix + "bits": weight[0]}
            del state_dict[prefix + "weight"]
        else:
            found = " and ".join(
                f"{name} is {'missing' if t is None else f'{tuple(t.shape)} {t.dtype}'}"
                for name, t in (("weight", weight), ("scale", scale))
            )
            error_msgs.append(
                f"{prefix.rstrip('.')} has eight bits (fp8), but in this state its {found}; expected (1, N, K) "
                f"{_CODES} and (N,) torch.float32. Load weights in 16 bits before the trainer is built."
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            "weight=float8_e4m3fn"
        )


def _is_ours(weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Return whether a layer in eight bits has saved these."""
    return weight.dtype == _CODES and weight.ndim == 3 and len(weight) == 1 and scale.dtype == torch.float32
