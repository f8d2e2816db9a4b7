"""The stand-in for logits that an intercepted LM head returns.

`DeferredLogits` holds the head's input in place of logits. It records what models do to logits before the loss:
scaling, soft-capping (`c * tanh(z / c)`), casts, a slice of the vocabulary (`recorded.py`). A choice of rows, or
another shape for them, is applied to the head's input at once, because each row of logits depends on one row of input.
When `torch.nn.functional.cross_entropy` gets a stand-in, the fused kernel computes the loss from its hidden states.

Any other operation that reads gets real logits, from the head's own forward, with the autocast and the gradient mode of
the head's call. From then on, the other stand-ins of this call run their recorded steps on these logits when they are
read.

A write into a stand-in is an error: others may have been made from it, and would have to change too. A write into real
logits (through a view that was read) is an error at the next use of a stand-in that was made from them before, as far
as PyTorch counts writes. It does not count them through `numpy`, in inference mode or in traced code.

It is a plain class with `__torch_function__`, not a tensor subclass. C++ code would accept a tensor without storage
where it should fail, and `torch.compile` traces the methods of a plain class without a graph break.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from liger_trainer._logging import logger
from liger_trainer.head.module import call_within, head_parameters, plain_forward
from liger_trainer.head.recorded import (
    FLOATS,
    RULES,
    TAKES_KEYWORDS,
    WAY_OUT,
    HeadCallState,
    RecordedLogits,
    version_of,
    was_written,
    writes,
)
from liger_triton import linear_cross_entropy


class DeferredLogits:
    """Logits `(..., V)` of an LM head that have not been computed. `defer_logits` makes the first one of a call.

    Args:
        recorded (`RecordedLogits`): What the logits are, as a function of the head's input.
        head (`nn.Module`): The LM head.
        call_state (`HeadCallState`): State of the head's call.
        source (`DeferredLogits`, *optional*): The stand-in that this one is made from. Unset: the head returned it.
        step (`Callable`, *optional*): The operation that makes these logits from the real logits of `source`.
    """

    # `__dict__` stays empty. Under ZeRO-3, DeepSpeed looks for weights in `vars` of what a module returns, and
    # torch.compile of 2.15 guards it where a call is broken between the head and the loss.
    __slots__ = (
        "__dict__",
        "__weakref__",
        "_real",
        "_real_version",
        "_source",
        "_step",
        "call_state",
        "head",
        "recorded",
    )
    __hash__ = object.__hash__

    recorded: RecordedLogits
    head: nn.Module
    call_state: HeadCallState
    _source: "DeferredLogits | None"
    _step: Callable[[torch.Tensor], torch.Tensor] | None
    _real: torch.Tensor | None
    _real_version: int | None

    def __init__(
        self,
        recorded: RecordedLogits,
        head: nn.Module,
        call_state: HeadCallState,
        source: "DeferredLogits | None" = None,
        step: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        # Faster than `self.x = x`, which calls the `__setattr__` of this class.
        set_slot = object.__setattr__
        set_slot(self, "recorded", recorded)
        set_slot(self, "head", head)
        set_slot(self, "call_state", call_state)
        set_slot(self, "_source", source)
        set_slot(self, "_step", step)
        set_slot(self, "_real", None)
        set_slot(self, "_real_version", None)

    @property
    def hidden(self) -> torch.Tensor:
        """Return the rows of the head's input that these logits are made from, (..., H)."""
        return self.recorded.hidden

    @property
    def dtype(self) -> torch.dtype:
        return self.recorded.dtype

    @property
    def device(self) -> torch.device:
        return self.recorded.device

    @property
    def shape(self) -> torch.Size:
        return self.recorded.shape

    @property
    def ndim(self) -> int:
        return self.hidden.ndim

    @property
    def is_materialized(self) -> bool:
        """Return whether real logits of this call have been built."""
        return self.call_state.is_materialized

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.hidden.ndim

    if TYPE_CHECKING:  # set at the end of this file, like all methods in `RULES`

        def __getitem__(self, index: Any) -> Any: ...

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @property
    def may_record(self) -> bool:
        """Return whether operations may be recorded now.

        Not if the logits are real already, and not under `no_grad` if they were made with gradients.
        """
        return not self.call_state.is_materialized and (torch.is_grad_enabled() or not self.call_state.grad)

    def _call_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method `name` of these logits, which only reads. If `RULES` has a rule, return another stand-in."""
        # With keywords, a method is recorded only if its rule reads them. Others could change the result unnoticed.
        recorded = None
        if name in RULES and self.may_record and (not kwargs or name in TAKES_KEYWORDS):
            recorded = RULES[name](self.recorded, *args, **kwargs)
        if recorded is None:
            logits = self.materialize(name.strip("_"))
            return getattr(logits, name)(*tree_map(materialize, args), **tree_map(materialize, kwargs))

        def step(logits: torch.Tensor) -> torch.Tensor:
            return getattr(logits, name)(*args, **kwargs)

        return DeferredLogits(recorded, self.head, self.call_state, source=self, step=step)

    def fused(self, function: Callable, target: torch.Tensor, in_fp32: bool = False, **kwargs: Any) -> Any:
        """Call `function(hidden, weight, target, ...)` of `liger_triton` for the head and the recorded operations.

        It is called inside a call of the head and under the autocast of the call that made these logits, or with
        `in_fp32` on everything cast to fp32. Returns its tensor or tuple on `self.device`.
        """
        recorded = self.recorded

        def compute(hidden: torch.Tensor) -> Any:
            parameters = head_parameters(self.head, hidden, recorded.vocab_size)
            hidden = hidden.to(parameters["weight"].device)
            if in_fp32:
                hidden, parameters = tree_map(_to_fp32, (hidden, parameters))
            result = function(
                hidden,
                target=target.to(hidden.device),
                logit_scale=recorded.logit_scale,
                softcap=recorded.softcap,
                **parameters,
                **kwargs,
            )
            return tuple(result) if isinstance(result, tuple) else result  # ZeRO-3's hooks cannot rebuild named tuples

        no_autocast: contextlib.AbstractContextManager = contextlib.nullcontext()
        if in_fp32:
            no_autocast = torch.autocast(recorded.hidden.device.type, enabled=False)
        with self.call_state.under_autocast(), no_autocast:
            result = call_within(self.head, recorded.hidden, compute)
        if isinstance(result, torch.Tensor):
            return result.to(recorded.device)
        on_device = []
        for x in result:
            on_device.append(x.to(recorded.device) if isinstance(x, torch.Tensor) else x)
        return tuple(on_device)

    def materialize(self, operation: str | None = None) -> torch.Tensor:
        """Return the real logits, from the head's own forward. `operation`, which needs them, is logged once.

        Raises:
            RuntimeError: The head's input or the real logits of `source` have been changed in place, or the logits are
                read inside an `autograd.Function`.
        """
        if self.call_state.grad and not torch.is_grad_enabled():
            _refuse_in_a_function()
        if operation is not None and not self.is_materialized:
            logger.warning_once(
                f"The fused LM head does not know `{operation}` on logits: they are built in full. "
                "The numbers are right; the memory is not saved."
            )
        if self._real is None:
            with torch.set_grad_enabled(self.call_state.grad):
                self._real = self._compute()
            self._real_version = version_of(self._real)
        return self._real

    def _compute(self) -> torch.Tensor:
        if self._source is None or self._step is None:
            with self.call_state.under_autocast():
                logits = plain_forward(self.head, self.hidden).to(self.device)
            # No stand-in of this call is fused from now on: the kernel would not see a hook on the real logits.
            self.call_state.is_materialized = True
            return logits
        # The model called the step earlier, and it runs only now. Only a write in between could change its result.
        source = self._source.materialize()
        if was_written(source, self._source._real_version):
            raise RuntimeError(
                "Logits of the fused LM head were written into, in place, after others had been made from them. "
                f"{WAY_OUT}"
            )
        return self._step(source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "data":  # writes into it are not counted
            _refuse_write(name)
        if writes(name):  # raise when it is called, because `hasattr` only asks
            return functools.partial(_refuse_write, name)
        return getattr(self.materialize(name), name)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in DeferredLogits.__slots__:  # such as `data`, which would have to be one of the real logits
            raise AttributeError(f"{name} of logits that the fused LM head has not computed cannot be set. {WAY_OUT}")
        object.__setattr__(self, name, value)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if func in _METHODS and args and isinstance(args[0], DeferredLogits) and not kwargs:
            return args[0]._call_method(_METHODS[func], *args[1:])
        name = getattr(func, "__name__", str(func))
        # Functions of torch write into their first argument or into `out`, never into others.
        if writes(name) or kwargs.get("inplace"):
            first = next(iter((*args, *kwargs.values())))
            _refuse_to_change(first, name)
        _refuse_to_change(kwargs.get("out"), name)
        return func(*tree_map(materialize, args), **tree_map(materialize, kwargs))


_METHODS = {getattr(torch, name): name for name in ("mul", "div", "tanh", "flatten", "reshape")}


def _method(name: str) -> Callable:
    if writes(name):
        return lambda self, *args, **kwargs: _refuse_write(name)
    return lambda self, *args, **kwargs: self._call_method(name, *args, **kwargs)


def _special_methods() -> set[str]:
    """List the methods of tensors that Python looks up on the class, such as `__add__`: `__getattr__` misses them."""
    names = set(dir(torch.Tensor)) - set(dir(object))
    special = {name for name in names if name.startswith("__")}
    special |= {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__reduce_ex__", "__format__"}
    special -= {*vars(DeferredLogits), "__torch_dispatch__", "__setstate__"}
    return {name for name in special if callable(getattr(torch.Tensor, name))}


for _name in {*RULES, *_special_methods()}:
    setattr(DeferredLogits, _name, _method(_name))


def defer_logits(hidden: torch.Tensor, head: nn.Module, vocab_size: int) -> DeferredLogits:
    """Return the stand-in for what `head` returns for `hidden` (..., H): logits (..., vocab_size)."""
    call_state = HeadCallState(hidden)
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type) and dtype in FLOATS:
        dtype = torch.get_autocast_dtype(hidden.device.type)
    return DeferredLogits(RecordedLogits(hidden, vocab_size, dtype, hidden.device), head, call_state)


def _refuse_write(name: str, *args: object, **kwargs: object) -> NoReturn:
    """Raise RuntimeError: `name` writes into a stand-in, or would let its reader write without being seen."""
    raise RuntimeError(f"`{name}` writes into logits that the fused LM head has not computed. {WAY_OUT}")


def _refuse_to_change(changed: object, name: str) -> None:
    """Raise RuntimeError if the argument that the function `name` changes is a stand-in, or holds one."""
    if any(isinstance(x, DeferredLogits) for x in tree_leaves(changed)):
        _refuse_write(name)


def _refuse_in_a_function() -> None:
    """Raise RuntimeError inside an `autograd.Function`, where a stand-in would count as a constant, without gradients.

    The function is recognised by forward-mode AD: it switches that off together with gradients, and `torch.no_grad`
    only gradients. It leaves no other trace, because its `apply` is not Python code since torch 2.15. In inference mode
    no gradient is expected, so nothing is raised.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or torch._C._is_fwd_grad_enabled():
        return
    raise RuntimeError(f"An autograd function was given logits that the fused LM head has not computed. {WAY_OUT}")


def _to_fp32(x: Any) -> Any:
    return x.float() if isinstance(x, torch.Tensor) else x


def materialize(x: Any) -> Any:
    """Return the real logits if `x` is a stand-in for logits, else `x`."""
    return x.materialize("an operation of torch") if isinstance(x, DeferredLogits) else x


def is_deferred(logits: object) -> TypeGuard[DeferredLogits]:
    """Return whether `logits` stands in for logits that have not been computed."""
    return isinstance(logits, DeferredLogits) and not logits.call_state.is_materialized


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
    """Compute `torch.nn.functional.cross_entropy`, with the fused kernel for the arguments that it supports."""
    if (
        not isinstance(input, DeferredLogits)
        or not input.may_record
        or input.call_state.grad != torch.is_grad_enabled()
        or (input.ndim, target.ndim) != (2, 1)
        or target.is_floating_point()
        or not (weight is size_average is reduce is None)
    ):
        return F.cross_entropy(
            materialize(input),
            materialize(target),
            weight,
            size_average,
            ignore_index,
            reduce,
            reduction,
            label_smoothing,
        )
    loss = input.fused(
        linear_cross_entropy, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    if reduction == "mean":
        # The kernel returns 0 for a mean over no labels. PyTorch returns NaN, with gradients of zero, as `where` does.
        has_labels = (target != ignore_index).any().to(loss.device)
        loss = torch.where(has_labels, loss, torch.nan)
    if torch.is_autocast_enabled(input.device.type) and input.dtype != torch.float64:
        return loss.float()  # autocast computes it in fp32, except in float64
    return loss.to(input.dtype)
