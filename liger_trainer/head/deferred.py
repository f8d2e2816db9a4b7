"""The stand-in for logits that a captured LM head returns.

`DeferredLogits` has the shape, dtype and device of the logits, but it holds the head's input and no logits. It records
what models do to logits before the loss: scaling, soft-capping (`c * tanh(z / c)`), casts, and a slice of the
vocabulary. A choice of rows, or another shape for them, is applied to the head's input at once, because each row of
logits depends on one row of input. When `torch.nn.functional.cross_entropy` is called with it, the fused kernel
computes the loss from the recorded hidden states. Whatever else touches it gets the real logits from the module's own
forward, which is slower and never wrong.

It is a plain class with `__torch_function__` and not a tensor subclass: a tensor without storage answers C++ code that
should have failed, and `torch.compile` traces the methods of a plain class without a graph break.
"""

import numbers
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from liger_trainer._logging import logger
from liger_trainer.head.module import HeadParameters, call_within, plain_forward


class DeferredLogits:
    """Logits `(..., V)` of an LM head that have not been computed.

    Args:
        hidden (`torch.Tensor`): The head's input `(..., H)`.
        head (`nn.Module`): The LM head.
        vocab_size (`int`): V, at most the head's output features.
        dtype, device, logit_scale, softcap: What the recorded operations amount to; see the module docstring. With raw
            logits r, the value is `softcap * tanh(logit_scale * r / softcap)`, or `logit_scale * r` without a softcap.
        replay (`tuple`): The recorded operations as functions of logits, in order, which turn the output of the head's
            own forward into these logits.
    """

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
        replay: tuple[Callable, ...] = (),
    ):
        self.hidden = hidden
        self.head = head
        self.vocab_size = vocab_size
        self.dtype = hidden.dtype if dtype is None else dtype
        self.device = hidden.device if device is None else device
        self.logit_scale = logit_scale
        self.softcap = softcap
        self.replay = replay
        self._real: torch.Tensor | None = None

    def _after(
        self,
        step: Callable | None = None,
        *,
        hidden: torch.Tensor | None = None,
        vocab_size: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        logit_scale: float | None = None,
        softcap: float | None = None,
    ) -> "DeferredLogits":
        """The stand-in for what one more operation, `step`, makes of these logits. What is None stays as it is."""
        return DeferredLogits(
            self.hidden if hidden is None else hidden,
            self.head,
            self.vocab_size if vocab_size is None else vocab_size,
            dtype=self.dtype if dtype is None else dtype,
            device=self.device if device is None else device,
            logit_scale=self.logit_scale if logit_scale is None else logit_scale,
            softcap=self.softcap if softcap is None else softcap,
            replay=self.replay if step is None else (*self.replay, step),
        )

    # Shape and type

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

    # Operations that are recorded, and give another stand-in. Once the real logits exist, somebody may have written
    # into them, so from then on every operation is one on them and gives a tensor.

    def __mul__(self, factor: Any) -> Any:
        if self._real is not None or not _is_scale(factor):
            return self.materialize("multiplication by a tensor") * _real(factor)
        softcap = None if self.softcap is None else abs(self.softcap * factor)
        return self._after(lambda z: z * factor, logit_scale=self.logit_scale * factor, softcap=softcap)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        if self._real is not None or not _is_scale(divisor):
            return self.materialize("division by a tensor") / _real(divisor)
        softcap = None if self.softcap is None else abs(self.softcap / divisor)
        return self._after(lambda z: z / divisor, logit_scale=self.logit_scale / divisor, softcap=softcap)

    def mul(self, other: Any) -> Any:
        return self * other

    def div(self, other: Any, *, rounding_mode: str | None = None) -> Any:
        if rounding_mode is not None:
            return self.materialize("div with rounding_mode").div(_real(other), rounding_mode=rounding_mode)
        return self / other

    def tanh(self) -> Any:
        if self._real is not None or self.softcap is not None:
            return torch.tanh(self.materialize("a second tanh"))
        return self._after(torch.tanh, softcap=1.0)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if self._real is not None:
            return self._real.to(*args, **kwargs)
        dtype, device = kwargs.get("dtype"), kwargs.get("device")
        for arg in args:
            if isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, (torch.device, str, int)) and not isinstance(arg, bool):
                device = torch.device(arg)
            elif isinstance(arg, (torch.Tensor, DeferredLogits)):
                dtype, device = arg.dtype, arg.device
        return self._after(None if dtype is None else lambda z: z.to(dtype), dtype=dtype, device=device)

    def float(self) -> Any:
        return self.to(torch.float32)

    def contiguous(self) -> Any:
        return self if self._real is None else self._real.contiguous()

    def view(self, *shape: Any) -> Any:
        return self.reshape(*shape)

    def reshape(self, *shape: Any) -> Any:
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        rows = self.hidden.shape[:-1].numel()
        keeps_rows = len(shape) > 0 and (
            shape[-1] == self.vocab_size or (shape[-1] == -1 and _numel(shape[:-1]) == rows)
        )
        if self._real is not None or not keeps_rows:
            return self.materialize(f"reshape to {shape}").reshape(*shape)
        return self._after(hidden=self.hidden.reshape(*shape[:-1], self.hidden.shape[-1]))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        end = end_dim if end_dim >= 0 else self.ndim + end_dim
        if self._real is not None or end == self.ndim - 1:
            return self.materialize("flatten over the vocabulary").flatten(start_dim, end_dim)
        return self._after(hidden=self.hidden.flatten(start_dim, end))

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        if self._real is not None:
            return self._real[index]
        has_ellipsis = any(i is Ellipsis for i in index)
        indexed_dims = sum(i.ndim if _is_bool_mask(i) else 1 for i in index if i is not None and i is not Ellipsis)
        reaches_vocab = index[-1] is not Ellipsis and (indexed_dims == self.ndim or has_ellipsis)
        of_vocab = index[-1] if reaches_vocab else None
        if indexed_dims > self.ndim or not (of_vocab is None or _is_leading_slice(of_vocab)):
            return self.materialize(f"indexing with {_describe(index)}")[index]
        if of_vocab is None:
            return self._after(hidden=self.hidden[index if has_ellipsis else (*index, Ellipsis)])
        vocab_size = self.vocab_size if of_vocab.stop is None else len(range(*of_vocab.indices(self.vocab_size)))
        step = None if vocab_size == self.vocab_size else lambda z: z[..., :vocab_size]
        rows = self.hidden[(*index[:-1], slice(None))]
        return self._after(step, hidden=rows, vocab_size=vocab_size)

    # What gives real tensors: the fused kernels, and everything that needs the real logits

    def fused(self, function: Callable, target: torch.Tensor, **kwargs: Any) -> Any:
        """Call `function(hidden, weight, target, ...)` of `liger_triton` for the head and the recorded operations.

        This happens inside a call of the head (and of the modules of an adapter on it). Returns what `function`
        returns, a tensor or a tuple, on `self.device`.
        """

        def compute(hidden: torch.Tensor) -> Any:
            parameters = HeadParameters(self.head, hidden).kwargs(self.vocab_size)
            hidden = hidden.to(parameters["weight"].device)
            result = function(
                hidden,
                target=target.to(hidden.device),
                logit_scale=self.logit_scale,
                softcap=self.softcap,
                **parameters,
                **kwargs,
            )
            return tuple(result) if isinstance(result, tuple) else result  # ZeRO-3's hooks cannot rebuild named tuples

        return tree_map(
            lambda x: x.to(self.device) if isinstance(x, torch.Tensor) else x,
            call_within(self.head, self.hidden, compute),
        )

    def materialize(self, why: str | None = None) -> torch.Tensor:
        """The real logits, from the head's own forward; `why` names the operation that needs them, logged once."""
        if self._real is None:
            if why is not None:
                logger.warning_once(
                    f"The fused LM head does not know `{why}` on logits: they are built in full. "
                    "The numbers are right; the memory is not saved."
                )
            logits = plain_forward(self.head, self.hidden)
            for step in self.replay:
                logits = step(logits)
            self._real = logits.to(self.device)
        return self._real

    def __setitem__(self, index: Any, value: Any) -> None:
        self.materialize("assignment into")[index] = _real(value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.materialize(name), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        ours = _KNOWN.get(func)
        if ours is not None:
            return ours(*args, **kwargs)
        return func(*tree_map(_real, args), **tree_map(_real, kwargs))


def _delegate(name: str) -> Callable:
    """A method such as `__add__` that calls the one of the real logits.

    Python looks such methods up on the class, so `__getattr__` does not see them.
    """

    def method(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.materialize(name), name)(*tree_map(_real, args))

    return method


for _name in "add radd sub rsub rtruediv neg pow matmul eq ne lt le gt ge iter".split():
    setattr(DeferredLogits, f"__{_name}__", _delegate(f"__{_name}__"))


def _real(x: Any) -> Any:
    """The real logits if `x` is a stand-in for logits, else `x`."""
    return x.materialize("an operation of torch") if isinstance(x, DeferredLogits) else x


def _is_scale(x: object) -> bool:
    return isinstance(x, numbers.Real) and x != 0


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def _is_bool_mask(i: object) -> bool:
    return isinstance(i, torch.Tensor) and i.dtype == torch.bool


def _is_leading_slice(i: object) -> bool:
    return isinstance(i, slice) and i.start in (None, 0) and i.step in (None, 1)


def _describe(index: tuple) -> str:
    return ", ".join("tensor" if isinstance(i, torch.Tensor) else str(i) for i in index)


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
        or input.is_materialized
        or (input.ndim, target.ndim) != (2, 1)
        or target.is_floating_point()
        or not (weight is size_average is reduce is None)
    ):
        return F.cross_entropy(
            _real(input), _real(target), weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    from liger_triton import linear_cross_entropy

    loss = input.fused(
        linear_cross_entropy, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    return loss.to(input.dtype)


_KNOWN: dict[Callable, Callable] = {  # functions of PyTorch that need no real logits
    F.cross_entropy: _cross_entropy,
    torch.tanh: lambda x: x.tanh(),
    torch.mul: lambda x, other: x * other if isinstance(x, DeferredLogits) else other * x,
    torch.div: lambda x, other, **kw: x.div(other, **kw) if isinstance(x, DeferredLogits) else x / _real(other),
    torch.flatten: lambda x, start_dim=0, end_dim=-1: x.flatten(start_dim, end_dim),
    torch.reshape: lambda x, shape: x.reshape(shape),
}
