"""Tells the linear attention rules of a package where rows begin.

transformers calls flash-linear-attention through a function that it chooses when a modeling file is imported. Some
layers pass `cu_seqlens` on to that function and some do not. A replacement for the function passes it.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from liger_trainer.varlen.proof.packed_rows import Kernel, kernel_behind
from liger_trainer.varlen.rows import Rows
from liger_trainer.varlen.state_layers import current_layer_rows

_ROW_ARGUMENT = "cu_seqlens"


def asks_for_device(forward: types.FunctionType) -> bool:
    """Return whether a forward may run other code on a GPU than in a proof on a CPU."""
    code = forward.__code__
    words = [word for word in code.co_consts if isinstance(word, str)]
    return bool({"is_cuda", "device"} & {*code.co_names}) or any("cuda" in word for word in (*words, *code.co_names))


def replacements(forward: types.FunctionType) -> tuple[tuple[str, Callable], ...]:
    """Return (name, function) of the globals to replace for a layer's forward, one for each rule that takes rows."""
    found = []
    for name in forward.__code__.co_names:
        own = forward.__globals__.get(name)
        kernel = kernel_behind(own)
        if kernel is not None and _ROW_ARGUMENT in kernel.parameters:
            found.append((name, _with_rows(own, kernel)))
    return tuple(found)


@functools.cache
def _with_rows(own: Callable, kernel: Kernel) -> Callable:
    """Return the function that replaces `own`: it calls `own` with the offsets of the layer's rows."""

    @functools.wraps(own)
    def rule(*args: Any, **kwargs: Any) -> Any:
        rows = current_layer_rows()
        if rows is not None:
            kwargs[_ROW_ARGUMENT] = rows.offsets.to(args[0].device)  # layers may be spread over devices
        if args[0].is_cuda or (rows is None and kwargs.get(_ROW_ARGUMENT) is not None):
            return own(*args, **kwargs)
        kwargs.pop(_ROW_ARGUMENT, None)  # on a CPU, as in a proof, where the package's kernel raises
        if rows is None:
            return kernel.torch_function(*args, **kwargs)
        return _row_by_row(kernel.torch_function, rows, args, kwargs)

    return rule


def _row_by_row(function: Callable, rows: Rows, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Run a rule on each of the rows that are concatenated in (1, T, ...). Return the output, and None for a state."""
    outputs = []
    start = 0
    for length in filter(None, rows.lengths):
        row = slice(start, start + length)
        of_row = [_narrowed(x, row, rows.tokens) for x in args]
        named = {name: _narrowed(x, row, rows.tokens) for name, x in kwargs.items()}
        outputs.append(function(*of_row, **named)[0])
        start += length
    return torch.cat(outputs, 1), None


def _narrowed(x: Any, row: slice, tokens: int) -> Any:
    return x[:, row] if isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[1] == tokens else x
