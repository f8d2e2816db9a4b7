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

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from liger_trainer._logging import logger
from liger_trainer.head.module import HeadParameters, call_within, plain_forward


class DeferredLogits:
    """Logits `(..., V)` of an LM head that have not been computed.

    Args:
        hidden (`torch.Tensor`): The head's input `(..., H)`.
        head (`nn.Module`): The LM head.
        vocab_size (`int`): V, at most the head's output features.
        dtype, device, logit_scale, softcap, replay: What the recorded operations amount to; see the module docstring.
            With raw logits r, the value is `softcap * tanh(logit_scale * r / softcap)`, or `logit_scale * r` without a
            softcap.
    """

    def __init__(self, hidden, head, vocab_size, *, dtype=None, device=None, logit_scale=1.0, softcap=None, replay=()):
        self.hidden = hidden
        self.head = head
        self.vocab_size = vocab_size
        self.dtype = hidden.dtype if dtype is None else dtype
        self.device = hidden.device if device is None else device
        self.logit_scale = logit_scale
        self.softcap = softcap
        self.replay = replay  # functions that turn the module's own output into these logits, in order
        self._real = None

    def _but(self, step=None, *, hidden=None, vocab_size=None, dtype=None, device=None, logit_scale=None, softcap=None):
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
    def shape(self):
        return torch.Size((*self.hidden.shape[:-1], self.vocab_size))

    @property
    def ndim(self):
        return self.hidden.ndim

    @property
    def is_materialized(self) -> bool:
        return self._real is not None

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def dim(self):
        return self.hidden.ndim

    def __len__(self):
        return self.shape[0]

    def __repr__(self):
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    # Recorded operations. Once the real logits exist, someone may have written into them: everything goes there.

    def __mul__(self, factor):
        if self._real is not None or not _is_scale(factor):
            return self.materialize("multiplication by a tensor") * _real(factor)
        softcap = None if self.softcap is None else abs(self.softcap * factor)
        return self._but(lambda z: z * factor, logit_scale=self.logit_scale * factor, softcap=softcap)

    __rmul__ = __mul__

    def __truediv__(self, divisor):
        if self._real is not None or not _is_scale(divisor):
            return self.materialize("division by a tensor") / _real(divisor)
        softcap = None if self.softcap is None else abs(self.softcap / divisor)
        return self._but(lambda z: z / divisor, logit_scale=self.logit_scale / divisor, softcap=softcap)

    def mul(self, other):
        return self * other

    def div(self, other, *, rounding_mode=None):
        if rounding_mode is not None:
            return self.materialize("div with rounding_mode").div(_real(other), rounding_mode=rounding_mode)
        return self / other

    def tanh(self):
        if self._real is not None or self.softcap is not None:
            return torch.tanh(self.materialize("a second tanh"))
        return self._but(torch.tanh, softcap=1.0)

    def to(self, *args, **kwargs):
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
        return self._but(None if dtype is None else lambda z: z.to(dtype), dtype=dtype, device=device)

    def float(self):
        return self.to(torch.float32)

    def contiguous(self):
        return self if self._real is None else self._real.contiguous()

    def view(self, *shape):
        return self.reshape(*shape)

    def reshape(self, *shape):
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        rows = self.hidden.shape[:-1].numel()
        keeps_rows = len(shape) > 0 and (
            shape[-1] == self.vocab_size or (shape[-1] == -1 and _numel(shape[:-1]) == rows)
        )
        if self._real is not None or not keeps_rows:
            return self.materialize(f"reshape to {shape}").reshape(*shape)
        return self._but(hidden=self.hidden.reshape(*shape[:-1], self.hidden.shape[-1]))

    def flatten(self, start_dim=0, end_dim=-1):
        end = end_dim if end_dim >= 0 else self.ndim + end_dim
        if self._real is not None or end == self.ndim - 1:
            return self.materialize("flatten over the vocabulary").flatten(start_dim, end_dim)
        return self._but(hidden=self.hidden.flatten(start_dim, end))

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        if self._real is not None:
            return self._real[index]
        used = sum(i.ndim if _is_bool_mask(i) else 1 for i in index if i is not None and i is not Ellipsis)
        last = index[-1] if index[-1] is not Ellipsis and (used == self.ndim or Ellipsis in _plain(index)) else None
        if used > self.ndim or not (last is None or _is_leading_slice(last)):
            return self.materialize(f"indexing with {_describe(index)}")[index]
        if last is None:  # the vocabulary is not touched
            return self._but(hidden=self.hidden[index if Ellipsis in _plain(index) else (*index, Ellipsis)])
        vocab_size = self.vocab_size if last.stop is None else len(range(*last.indices(self.vocab_size)))
        step = None if vocab_size == self.vocab_size else lambda z: z[..., :vocab_size]
        rows = self.hidden[(*index[:-1], slice(None))]
        return self._but(step, hidden=rows, vocab_size=vocab_size)

    # The two ways out

    def fused(self, function, target: torch.Tensor, **kwargs):
        """`function(hidden, weight, target, ...)` of `liger_triton` with the head's parameters and recorded transform.

        Runs inside a call of the head module (and of the modules of an adapter on it). Returns what `function` returns,
        a tensor or a tuple, on `self.device`.
        """

        def compute(hidden):
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
            return tuple(result) if isinstance(result, tuple) else result  # ZeRO-3's hooks rebuild plain tuples only

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

    def __setitem__(self, index, value):
        self.materialize("assignment into")[index] = _real(value)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.materialize(name), name)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        known = _KNOWN.get(func)
        if known is not None:
            return known(*args, **kwargs)
        return func(*tree_map(_real, args), **tree_map(_real, kwargs))


def _delegate(name):
    """`def __add__(self, other)`, ...: dunders are looked up on the type, where `__getattr__` does not reach."""

    def method(self, *args):
        return getattr(self.materialize(name), name)(*tree_map(_real, args))

    return method


for _name in (
    "add",
    "radd",
    "sub",
    "rsub",
    "rtruediv",
    "neg",
    "pow",
    "matmul",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "iter",
):
    setattr(DeferredLogits, f"__{_name}__", _delegate(f"__{_name}__"))
DeferredLogits.__hash__ = object.__hash__


def _real(x):
    return x.materialize("an operation of torch") if isinstance(x, DeferredLogits) else x


def _is_scale(x) -> bool:
    return isinstance(x, numbers.Real) and x != 0


def _numel(shape) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def _is_bool_mask(i) -> bool:
    return isinstance(i, torch.Tensor) and i.dtype == torch.bool


def _plain(index):
    """The index without its tensors, whose `==` is elementwise."""
    return [i for i in index if not isinstance(i, torch.Tensor)]


def _is_leading_slice(i) -> bool:
    return isinstance(i, slice) and i.start in (None, 0) and i.step in (None, 1)


def _describe(index) -> str:
    return ", ".join("tensor" if isinstance(i, torch.Tensor) else str(i) for i in index)


def _cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
):
    fusable = isinstance(input, DeferredLogits) and not input.is_materialized and input.ndim == 2 and target.ndim == 1
    if not fusable or target.is_floating_point() or not (weight is size_average is reduce is None):
        return F.cross_entropy(
            _real(input), _real(target), weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    from liger_triton import linear_cross_entropy

    loss = input.fused(
        linear_cross_entropy, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    return loss.to(input.dtype)


_KNOWN = {
    F.cross_entropy: _cross_entropy,
    torch.tanh: lambda x: x.tanh(),
    torch.mul: lambda x, other: x * other if isinstance(x, DeferredLogits) else other * x,
    torch.div: lambda x, other, **kw: x.div(other, **kw) if isinstance(x, DeferredLogits) else x / _real(other),
    torch.flatten: lambda x, start_dim=0, end_dim=-1: x.flatten(start_dim, end_dim),
    torch.reshape: lambda x, shape: x.reshape(shape),
}
