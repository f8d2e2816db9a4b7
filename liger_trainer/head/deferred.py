"""The stand-in for logits that a captured LM head returns.

`DeferredLogits` holds the head's input in place of logits. It records what models do to logits before the loss:
scaling, soft-capping (`c * tanh(z / c)`), casts, a slice of the vocabulary. A choice of rows, or another shape for
them, is applied to the head's input at once, because each row of logits depends on one row of input. Where it meets
`torch.nn.functional.cross_entropy`, the fused kernel computes the loss from the recorded hidden states.

Any other operation gets real logits, from the head's own forward with the autocast and the gradients of its call. At
that moment all stand-ins of this call become real, each from the one it was made of. So a write into a view reaches its
base and the other way round, and hooks see what they see in stock.

It is a plain class with `__torch_function__` and not a tensor subclass: a tensor without storage answers C++ code that
should have failed, and `torch.compile` traces the methods of a plain class without a graph break.
"""

import contextlib
import math
import numbers
import weakref
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from liger_trainer._logging import logger
from liger_trainer.head.module import call_within, head_parameters, plain_forward
from liger_triton import linear_cross_entropy

_OTHERWISE = 'Call the model with skip_logits=False, or set liger_config={"fused_linear_cross_entropy": false}.'
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class _Origin:
    """State shared by all stand-ins of one call of a head: its input, its modes, and weak references to them."""

    def __init__(self, hidden: torch.Tensor):
        traced = torch.compiler.is_compiling()
        self.hidden, self.grad, self.autocast = hidden, torch.is_grad_enabled(), _autocast_of(hidden.device.type)
        self.version = None if traced or hidden.is_inference() else hidden._version
        self.made: list[Callable[[], DeferredLogits | None]] = []
        self.reference: Callable = (lambda made: lambda: made) if traced else weakref.ref

    def under_autocast(self) -> contextlib.AbstractContextManager:
        """The autocast of the call. RuntimeError if its input has changed: the logits would differ from the call's."""
        if self.version is not None and self.hidden._version != self.version:
            raise RuntimeError(
                f"The input of the LM head was changed in place between the call of the head and the loss. {_OTHERWISE}"
            )
        kind = self.hidden.device.type
        return contextlib.nullcontext() if self.autocast == _autocast_of(kind) else torch.autocast(kind, *self.autocast)


def _autocast_of(device_type: str) -> tuple[torch.dtype, bool, bool]:
    """Arguments of `torch.autocast` after the type of the device: dtype, whether it is on, whether it keeps casts."""
    on = torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type), on, torch.is_autocast_cache_enabled()


class DeferredLogits:
    """Logits `(..., V)` of an LM head that have not been computed.

    Args:
        hidden (`torch.Tensor`): The head's input `(..., H)`.
        head (`nn.Module`): The LM head.
        vocab_size (`int`): V, at most the head's output features.
        dtype, device, logit_scale, softcap: What the recorded operations amount to. With raw logits r, the value is
            `softcap * tanh(logit_scale * r / softcap)`, or `logit_scale * r` without a softcap.
        source (`DeferredLogits`, *optional*): What this one is made of. Unset: of a call of the head, now.
        step (`Callable`, *optional*): The operation that makes these logits of the real ones of `source`.
    """

    # `__dict__` stays empty. Under ZeRO-3, DeepSpeed looks for weights in `vars` of what a module returns, and
    # torch.compile of 2.15 guards it where a call is broken between the head and the loss.
    __slots__ = (
        "__dict__", "__weakref__", "_real", "_source", "_step", "device", "dtype", "head", "hidden", "logit_scale",
        "origin", "softcap", "vocab_size",
    )  # fmt: skip
    __hash__ = object.__hash__

    def __init__(
        self,
        hidden: torch.Tensor,
        head: nn.Module,
        vocab_size: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        source: "DeferredLogits | None" = None,
        step: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        self.hidden, self.head, self.vocab_size = hidden, head, vocab_size
        self.origin: _Origin = _Origin(hidden) if source is None else source.origin
        dtype_of_products, on, _ = self.origin.autocast
        self.dtype = dtype or (dtype_of_products if on and hidden.dtype in _FLOATS else hidden.dtype)
        self.device = hidden.device if device is None else device
        self.logit_scale, self.softcap = logit_scale, softcap
        self._source, self._step = source, step
        self._real: torch.Tensor | None = None
        self.origin.made.append(self.origin.reference(self))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.vocab_size))

    @property
    def ndim(self) -> int:
        return self.hidden.ndim

    @property
    def is_materialized(self) -> bool:
        """Whether the real logits have been built."""
        return self._real is not None

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.hidden.ndim

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @property
    def _records(self) -> bool:
        """Whether operations may be recorded now: on logits that are not real, with the gradients they have."""
        return self._real is None and (torch.is_grad_enabled() or not self.origin.grad)

    def _do(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method `name` of these logits. A rule of `_RULES` returns another stand-in."""
        known = name in _RULES and self._records and (not kwargs or name in ("to", "flatten"))
        changed = _RULES[name](self, *args, **kwargs) if known else None
        if changed is None:
            return getattr(self.materialize(name.strip("_")), name)(*tree_map(real, args), **tree_map(real, kwargs))
        kept = {
            "hidden": self.hidden, "vocab_size": self.vocab_size, "dtype": self.dtype, "device": self.device,
            "logit_scale": self.logit_scale, "softcap": self.softcap,
        }  # fmt: skip
        step = lambda real: getattr(real, name)(*args, **kwargs)  # noqa: E731
        return DeferredLogits(head=self.head, source=self, step=step, **(kept | changed))

    def fused(self, function: Callable, target: torch.Tensor, in_fp32: bool = False, **kwargs: Any) -> Any:
        """Call `function(hidden, weight, target, ...)` of `liger_triton` for the head and the recorded operations.

        It is called inside a call of the head and under the autocast of the call that made these logits, or with
        `in_fp32` on everything cast to fp32. Returns its tensor or tuple on `self.device`.
        """

        def compute(hidden: torch.Tensor) -> Any:
            parameters = head_parameters(self.head, hidden, self.vocab_size)
            hidden = hidden.to(parameters["weight"].device)
            if in_fp32:
                hidden, parameters = _each_tensor(torch.Tensor.float, (hidden, parameters))
            scaling = {"logit_scale": self.logit_scale, "softcap": self.softcap}
            result = function(hidden, target=target.to(hidden.device), **scaling, **parameters, **kwargs)
            return tuple(result) if isinstance(result, tuple) else result  # ZeRO-3's hooks cannot rebuild named tuples

        none = torch.autocast(self.hidden.device.type, enabled=False) if in_fp32 else contextlib.nullcontext()
        with self.origin.under_autocast(), none:
            result = call_within(self.head, self.hidden, compute)
        return _each_tensor(lambda x: x.to(self.device), result)

    def materialize(self, why: str | None = None) -> torch.Tensor:
        """The real logits, from the head's own forward; `why` names the operation that needs them, logged once."""
        if self.origin.grad and not torch.is_grad_enabled():
            _refuse_in_a_function()
        if self._real is None:
            if why is not None:
                logger.warning_once(
                    f"The fused LM head does not know `{why}` on logits: they are built in full. "
                    "The numbers are right; the memory is not saved."
                )
            with torch.set_grad_enabled(self.origin.grad), self.origin.under_autocast():
                for reference in self.origin.made:
                    if (made := reference()) is not None:
                        made._make_real()
        assert self._real is not None
        return self._real

    def _make_real(self) -> None:
        if self._source is None or self._step is None:
            self._real = plain_forward(self.head, self.hidden).to(self.device)
        else:
            self._real = self._step(real(self._source))  # it is older, so it is real by now

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.materialize(name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in DeferredLogits.__slots__:  # such as `data`, which would have to be one of the real logits
            raise AttributeError(
                f"{name} of logits that the fused LM head has not computed cannot be set. {_OTHERWISE}"
            )
        object.__setattr__(self, name, value)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if func in _METHODS and args and isinstance(args[0], DeferredLogits) and not kwargs:
            return args[0]._do(_METHODS[func], *args[1:])
        return func(*tree_map(real, args), **tree_map(real, kwargs))


# What is recorded: for a method of tensors, a function of a stand-in and the method's arguments. It returns the changed
# arguments of `DeferredLogits`, or None where real logits are needed.


def _times(logits: DeferredLogits, factor: Any) -> dict[str, Any] | None:
    if not (isinstance(factor, numbers.Real) and factor != 0 and math.isfinite(factor)):
        return None
    softcap = None if logits.softcap is None else abs(logits.softcap * factor)
    return {"logit_scale": logits.logit_scale * factor, "softcap": softcap}


def _over(logits: DeferredLogits, divisor: Any) -> dict[str, Any] | None:
    return _times(logits, 1 / divisor) if isinstance(divisor, numbers.Real) and divisor != 0 else None


def _tanh(logits: DeferredLogits) -> dict[str, Any] | None:
    return {"softcap": 1.0} if logits.softcap is None else None


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
    changed: dict[str, Any] = {}
    for given in (*args, *(value for name, value in kwargs.items() if name != "non_blocking")):
        if isinstance(given, torch.dtype) and given in _FLOATS:
            changed["dtype"] = given
        elif isinstance(given, (torch.device, str, int)) and not isinstance(given, bool):
            changed["device"] = torch.device(given)
        else:
            return None
    return changed


def _in_shape(logits: DeferredLogits, *given: Any) -> dict[str, Any] | None:
    shape = tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    rows = math.prod(logits.shape[:-1])
    if shape and (shape[-1] == logits.vocab_size or (shape[-1] == -1 and math.prod(shape[:-1]) == rows)):
        return {"hidden": logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1])}
    return None


def _flat(logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> dict[str, Any] | None:
    of_rows = end_dim % logits.ndim < logits.ndim - 1
    return {"hidden": logits.hidden.flatten(start_dim, end_dim)} if of_rows else None


def _indexed(logits: DeferredLogits, index: Any) -> dict[str, Any] | None:
    items = index if isinstance(index, tuple) else (index,)
    dims = 0
    for item in items:
        is_mask = isinstance(item, torch.Tensor) and item.dtype == torch.bool
        dims += item.ndim if is_mask else item is not None and item is not Ellipsis
    if dims < logits.ndim and not any(item is Ellipsis for item in items):
        items = (*items, Ellipsis)
    if items[-1] is Ellipsis:
        return {"hidden": logits.hidden[items]} if dims < logits.ndim else None
    last = items[-1]
    if dims > logits.ndim or not (isinstance(last, slice) and last.start in (None, 0) and last.step in (None, 1)):
        return None
    rows = logits.hidden[(*items[:-1], slice(None))]
    return {"hidden": rows, "vocab_size": len(range(*last.indices(logits.vocab_size)))}


_RULES: dict[str, Callable[..., dict[str, Any] | None]] = {
    "__mul__": _times, "__rmul__": _times, "mul": _times, "__truediv__": _over, "div": _over, "tanh": _tanh, "to": _to,
    "float": lambda logits: {"dtype": torch.float32}, "contiguous": lambda logits: {}, "view": _in_shape,
    "reshape": _in_shape, "flatten": _flat, "__getitem__": _indexed,
}  # fmt: skip
_METHODS = {getattr(torch, name): name for name in ("mul", "div", "tanh", "flatten", "reshape")}


def _method(name: str) -> Callable:
    return lambda self, *args, **kwargs: self._do(name, *args, **kwargs)


# Python looks methods such as `__add__` up on the class, so `__getattr__` does not see them.
_SPECIAL = {name for name in set(dir(torch.Tensor)) - set(dir(object)) if name.startswith("__")}
_SPECIAL |= {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__reduce_ex__", "__format__"}
_SPECIAL -= {*vars(DeferredLogits), "__torch_dispatch__", "__setstate__"}
for _name in {*_RULES, *(name for name in _SPECIAL if callable(getattr(torch.Tensor, name)))}:
    setattr(DeferredLogits, _name, _method(_name))


def _refuse_in_a_function() -> None:
    """RuntimeError inside an `autograd.Function`, which takes a stand-in for a constant: gradients would be lost.

    Such a function switches forward-mode AD off as well as gradients, in C++, and `torch.no_grad` gradients alone. It
    leaves no other trace: its `apply` is no Python code since torch 2.15. In inference mode no gradient is expected.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or torch._C._is_fwd_grad_enabled():
        return
    raise RuntimeError(f"An autograd function was given logits that the fused LM head has not computed. {_OTHERWISE}")


def _each_tensor(change: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    return tree_map(lambda x: change(x) if isinstance(x, torch.Tensor) else x, values)


def real(x: Any) -> Any:
    """The real logits if `x` is a stand-in for logits, else `x`."""
    return x.materialize("an operation of torch") if isinstance(x, DeferredLogits) else x


def is_deferred(logits: Any) -> TypeGuard[DeferredLogits]:
    """Return whether `logits` stands in for logits that have not been computed."""
    return isinstance(logits, DeferredLogits) and not logits.is_materialized


def _cross_entropy(
    input: torch.Tensor | DeferredLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy`, by the fused kernel where it computes the same."""
    if (
        not isinstance(input, DeferredLogits)
        or not input._records
        or input.origin.grad != torch.is_grad_enabled()
        or (input.ndim, target.ndim) != (2, 1)
        or target.is_floating_point()
        or not (weight is size_average is reduce is None)
    ):
        return F.cross_entropy(
            real(input), real(target), weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    loss = input.fused(
        linear_cross_entropy, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    if reduction == "mean":
        # The kernel returns 0 for a mean over no labels. PyTorch returns NaN, with gradients of zero, as `where` does.
        has_labels = (target != ignore_index).any().to(loss.device)
        loss = torch.where(has_labels, loss, torch.nan)
    return loss if torch.is_autocast_enabled(input.device.type) else loss.to(input.dtype)
