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


class ReadOnly(torch.Tensor):
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


class InEightBits(nn.Module):
    """A module with frozen weights of eight bits, each of which has `bits` (..., K) and a `scale` (...).

    They are parameters, uint8 and fp32, without a gradient, and stay as they are whatever the model is converted to.
    After `hold_words` they are (..., K / 2) and (..., 2), bf16, of the same bytes. They are no buffers, because DDP
    sends the buffers of a model in every forward pass. `compute_dtype` is the dtype of the weights before they were
    quantised. A state dict has the bits under the name of the weight.
    """

    weights: dict[str, tuple[str, str]]  # names of bits and scale, by that of the weight
    compute_dtype: torch.dtype

    def hold_words(self) -> None:
        """Hold bits and scales as words of 16 bits, which FSDP2 shards by their first dimension and gathers as they
        are.

        From then on a state dict has the names of the parameters, by which torch's distributed checkpoints go.
        """
        for names in self.weights.values():
            bits, scale = map(self.get_parameter, names)
            if bits.dtype == _CODES:
                words = bits.detach().view(_WORDS), scale.detach().view(len(scale), -1).view(_WORDS)
                for name, tensor in zip(names, words, strict=True):
                    self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def stored(self, weight: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bits (..., K) in e4m3 and the scale (...) in fp32 of the weight of that name."""
        bits, scale = (self._parameters[name] for name in self.weights[weight])
        assert bits is not None and scale is not None, "neither is ever taken away"
        if hasattr(bits, "full_tensor"):
            raise RuntimeError(
                "A frozen layer in eight bits was read outside the calls in which FSDP2 gathers it. To merge an "
                "adapter, save it and load it next to the model in 16 bits: liger-trainer merge."
            )
        if bits.dtype == scale.dtype == _WORDS:
            bits = bits.view(torch.float8_e4m3fn)
            return bits, scale.view(torch.float32).view(bits.shape[:-1])
        if bits.dtype != _CODES or scale.dtype != torch.float32:
            raise RuntimeError(
                f"A frozen layer in eight bits has bits of {bits.dtype} and a scale of {scale.dtype}; expected "
                f"{_CODES} and torch.float32. They were converted by `.data` or `.type()`. Build the trainer on a "
                "model that is loaded anew."
            )
        return bits.view(torch.float8_e4m3fn), scale

    def freed(self) -> int:
        """Return how many bytes fewer the weights take than before."""
        kept = [self.get_parameter(name).nbytes for names in self.weights.values() for name in names]
        return sum(kept[::2]) * (self.compute_dtype.itemsize - 1) - sum(kept[1::2])

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Move or convert the module, except its bits and its scales, which keep their dtypes and their values."""
        names = [name for pair in self.weights.values() for name in pair]
        kept = {name: self.get_parameter(name).detach() for name in names}  # which `_apply` does not reach
        super()._apply(fn, recurse)
        for name, before in kept.items():
            if (now := self.get_parameter(name)).dtype != before.dtype:
                self.register_parameter(name, nn.Parameter(before.to(now.device), requires_grad=False))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save the bits as a weight (1, ..., K), a view, which no other module loads, not even with `strict=False`.

        Its `copy_` would make a number of each byte.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for weight, (bits, _) in self.weights.items():
            if self.get_parameter(bits).dtype == _CODES:
                destination[prefix + weight] = destination.pop(prefix + bits)[None]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Load weight and scale together. A weight of numbers is an error: `copy_` would make a byte of each."""
        given = state_dict
        for own, names in self.weights.items():
            weight, bits, scale = (state_dict.get(prefix + name) for name in (own, *names))
            is_held = bits is not None and bits.dtype == self.get_parameter(names[0]).dtype
            if is_held or (weight is None and scale is None):
                continue  # such as the state of a sharded model, or of an adapter
            if weight is None or scale is None or not _is_ours(weight, scale):
                found = " and ".join(
                    f"{name} is {'missing' if t is None else f'{tuple(t.shape)} {t.dtype}'}"
                    for name, t in ((own, weight), (names[1], scale))
                )
                error_msgs.append(
                    f"{prefix.rstrip('.')} has eight bits (fp8), but in this state its {found}; expected {_CODES} with "
                    "a first dimension of 1 and torch.float32, as it saves them. Load weights in 16 bits before the "
                    "trainer is built."
                )
                return
            given = {**given, prefix + names[0]: weight[0]}
            del given[prefix + own]
        super()._load_from_state_dict(given, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


class FrozenFloat8Linear(InEightBits):
    """x W^T + b with a frozen W of eight bits, W ~ bits * scale[:, None].

    Code that reads the `weight` of a layer gets the dequantised numbers.
    """

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


def _is_ours(weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Return whether a layer in eight bits has saved these."""
    return (
        weight.dtype == _CODES and weight.ndim == scale.ndim + 2 and len(weight) == 1 and scale.dtype == torch.float32
    )
