"""The contents of a stand-in for logits: the state of the head's call, and the operations that were recorded, not run.

`RULES` has a rule for each method of tensors that can be recorded. A rule gets the `RecordedLogits` so far and the
method's arguments. It returns the `RecordedLogits` after the operation, or None if the operation needs real logits.
"""

import contextlib
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WAY_OUT = 'Call the model with skip_logits=False, or set liger_config={"fused_linear_cross_entropy": false}.'


class HeadCallState:
    """State shared by all stand-ins of one call of a head.

    Attributes:
        hidden (`torch.Tensor`): The head's input.
        grad (`bool`): Whether gradients were on.
        autocast (`tuple`): The dtype of autocast, whether it was on, and whether its cache was.
        is_materialized (`bool`): Whether the logits that the head returned have become real.
    """

    def __init__(self, hidden: torch.Tensor):
        self.hidden = hidden
        self.grad = torch.is_grad_enabled()
        self.autocast = _autocast_of(hidden.device.type)
        self.is_materialized = False
        self._version = version_of(hidden)

    def under_autocast(self) -> contextlib.AbstractContextManager:
        """Return a context with the autocast of the head's call.

        Raises:
            RuntimeError: The head's input has been changed in place since the call, so the logits would change too.
        """
        if was_written(self.hidden, self._version):
            raise RuntimeError(
                f"The input of the LM head was changed in place between the call of the head and the loss. {WAY_OUT}"
            )
        device_type = self.hidden.device.type
        if self.autocast == _autocast_of(device_type):
            return contextlib.nullcontext()
        return torch.autocast(device_type, *self.autocast)


def _autocast_of(device_type: str) -> tuple[torch.dtype, bool, bool]:
    """Return the arguments of `torch.autocast` that follow the device type: (dtype, is on, cache is on)."""
    dtype = torch.get_autocast_dtype(device_type)
    return dtype, torch.is_autocast_enabled(device_type), torch.is_autocast_cache_enabled()


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the number of writes into a tensor, or None if PyTorch does not count them."""
    if torch.compiler.is_compiling() or tensor.is_inference():
        return None
    return tensor._version


def was_written(tensor: torch.Tensor, version: int | None) -> bool:
    """Return whether a tensor is known to have been written into since `version_of` returned `version`."""
    now = version_of(tensor)
    return version is not None and now is not None and now != version


class RecordedLogits(NamedTuple):
    """Logits as a function of the head's input.

    With raw logits r, the value is `softcap * tanh(logit_scale * r / softcap)`, or `logit_scale * r` without a softcap.

    Attributes:
        hidden (`torch.Tensor`): The rows of the head's input, (..., H).
        vocab_size (`int`): V, how many of the head's outputs the logits have, from the first on.
        dtype (`torch.dtype`): The dtype of the logits.
        device (`torch.device`): Their device.
        logit_scale (`float`): The factor of the raw logits.
        softcap (`float` or `None`): The cap. None: no cap.
    """

    hidden: torch.Tensor
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    logit_scale: float = 1.0
    softcap: float | None = None

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the logits, (..., V)."""
        return torch.Size((*self.hidden.shape[:-1], self.vocab_size))


Rule = Callable[..., RecordedLogits | None]


def _scaled(logits: RecordedLogits, factor: object) -> RecordedLogits | None:
    if not isinstance(factor, numbers.Real) or factor == 0 or not math.isfinite(factor):
        return None
    scale = float(factor)
    # f * c * tanh(s * r / c) = c' * tanh(s' * r / c') with s' = f * s and c' = |f * c|, since tanh is odd.
    softcap = None if logits.softcap is None else abs(logits.softcap * scale)
    return logits._replace(logit_scale=logits.logit_scale * scale, softcap=softcap)


def _divided(logits: RecordedLogits, divisor: object) -> RecordedLogits | None:
    if not isinstance(divisor, numbers.Real) or divisor == 0:
        return None
    return _scaled(logits, 1 / float(divisor))


def _tanh(logits: RecordedLogits) -> RecordedLogits | None:
    # A model's soft cap is a division by c, this, and a product with c, which `_scaled` turns into a softcap of c.
    return logits._replace(softcap=1.0) if logits.softcap is None else None


def _to_fp32(logits: RecordedLogits) -> RecordedLogits:
    return logits._replace(dtype=torch.float32)


def _contiguous(logits: RecordedLogits) -> RecordedLogits:
    return logits


def _to(logits: RecordedLogits, *args: object, non_blocking: bool = False, **kwargs: object) -> RecordedLogits | None:
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, torch.dtype) and argument in FLOATS:
            logits = logits._replace(dtype=argument)
        elif isinstance(argument, (torch.device, str, int)) and not isinstance(argument, bool):
            logits = logits._replace(device=torch.device(argument))
        else:
            return None
    return logits


def _reshaped(logits: RecordedLogits, *sizes: Any) -> RecordedLogits | None:
    in_a_sequence = len(sizes) == 1 and isinstance(sizes[0], (tuple, list))
    shape = tuple(sizes[0]) if in_a_sequence else sizes
    if not shape:
        return None
    rows = math.prod(logits.shape[:-1])
    keeps_vocabulary = shape[-1] == logits.vocab_size
    infers_vocabulary = shape[-1] == -1 and math.prod(shape[:-1]) == rows
    if not keeps_vocabulary and not infers_vocabulary:
        return None
    return logits._replace(hidden=logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1]))


def _flattened(logits: RecordedLogits, start_dim: int = 0, end_dim: int = -1) -> RecordedLogits | None:
    dims = logits.hidden.ndim
    if end_dim % dims == dims - 1:  # the vocabulary too
        return None
    return logits._replace(hidden=logits.hidden.flatten(start_dim, end_dim))


def _indexed(logits: RecordedLogits, index: Any) -> RecordedLogits | None:
    """Record an index that chooses rows and, by a slice in the last place, the first entries of the vocabulary."""
    dims = logits.hidden.ndim
    items = index if isinstance(index, tuple) else (index,)
    indexed = 0  # how many dimensions the index consumes
    has_ellipsis = False
    for item in items:
        if item is Ellipsis:
            has_ellipsis = True
        elif isinstance(item, torch.Tensor) and item.dtype == torch.bool:
            indexed += item.ndim
        elif item is not None:
            indexed += 1
    if indexed < dims and not has_ellipsis:
        items = (*items, Ellipsis)
    last = items[-1]
    if last is Ellipsis:
        return logits._replace(hidden=logits.hidden[items]) if indexed < dims else None
    if indexed > dims or not isinstance(last, slice):
        return None
    starts_at_first = last.start in (None, 0)
    takes_each = last.step in (None, 1)
    if not starts_at_first or not takes_each:
        return None
    vocab_size = len(range(*last.indices(logits.vocab_size)))
    return logits._replace(hidden=logits.hidden[(*items[:-1], slice(None))], vocab_size=vocab_size)


RULES: dict[str, Rule] = {
    "__mul__": _scaled,
    "__rmul__": _scaled,
    "mul": _scaled,
    "__truediv__": _divided,
    "div": _divided,
    "tanh": _tanh,
    "to": _to,
    "float": _to_fp32,
    "contiguous": _contiguous,
    "view": _reshaped,
    "reshape": _reshaped,
    "flatten": _flattened,
    "__getitem__": _indexed,
}
TAKES_KEYWORDS = ("to", "flatten")

_IN_PLACE_OPERATORS = (
    "__setitem__",
    "__delitem__",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__idiv__",
    "__itruediv__",
    "__ifloordiv__",
    "__imod__",
    "__ipow__",
    "__iand__",
    "__ior__",
    "__ixor__",
    "__ilshift__",
    "__irshift__",
)


def writes(name: str) -> bool:
    """Return whether a method or a function of torch of this name changes its first argument."""
    return name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
