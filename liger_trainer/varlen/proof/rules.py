"""Tells the linear attention rules of a package where rows begin.

A rule is the recurrence of a linear attention layer, such as the gated delta rule. transformers calls
flash-linear-attention through a function that it chooses when a modeling file is imported. Some layers pass
`cu_seqlens` on to that function and some do not. A replacement for the function always passes it.
"""

import functools
import importlib.metadata
import importlib.util
import types
from collections.abc import Callable
from typing import Any

import torch

from liger_trainer.varlen.proof.packed_rows import Kernel, choice_behind, kernel_behind
from liger_trainer.varlen.rows import NotForRows, Rows, StaticRows
from liger_trainer.varlen.state_layers import current_layer_rows

# The arguments of a package's rule.
_ROW_ARGUMENT = "cu_seqlens"
_ON_HOST = "cu_seqlens_cpu"
_CHUNKS = "chunk_indices"
# The rules of packages that can be captured: name -> (package, the versions with which it was tried).
_CAPTURED = {"chunk_gated_delta_rule": ("fla-core", ("0.6.0",))}
# Layers call these for single tokens with a cache. They do not take the chunks of static rows, so calling one in a
# capture raises `NotForRows`.
_FOR_GENERATION = ("fused_recurrent_gated_delta_rule",)
_BACKENDS = ("tilelang", "flash_qla")  # if one of these packages is installed, fla runs it instead of its own kernels


def asks_for_device(forward: types.FunctionType) -> bool:
    """Return whether a forward may run other code on a GPU than in a proof on a CPU, by the names in its code."""
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
            kwargs |= _row_arguments(rows, kernel, args[0].device)
        if args[0].is_cuda or (rows is None and kwargs.get(_ROW_ARGUMENT) is not None):
            return own(*args, **kwargs)
        # This is a proof: on a CPU, the package's kernel raises.
        for name in (_ROW_ARGUMENT, _ON_HOST, _CHUNKS):
            kwargs.pop(name, None)
        if rows is None:
            return kernel.torch_function(*args, **kwargs)
        return _row_by_row(kernel.torch_function, rows, args, kwargs)

    return rule


def _row_arguments(rows: Rows, kernel: Kernel, device: torch.device) -> dict[str, Any]:
    """Return the arguments that tell a package's rule where rows begin."""
    if not isinstance(rows, StaticRows):
        arguments = {_ROW_ARGUMENT: rows.offsets.to(device)}  # layers may be on several devices
        if _ON_HOST in kernel.parameters:
            arguments[_ON_HOST] = rows.offsets_on_host  # without it, the rule waits for the device to count chunks
        return arguments
    if rows.chunks is None or _CHUNKS not in kernel.parameters:
        raise NotForRows("the rule of its layers that keep a state counts the chunks of rows on the host")
    offsets, indices = rows.chunks
    # The package caches what it computes from offsets, by the identity of their tensor. But the values change from
    # replay to replay. With a new tensor object for each call, the computation is captured instead of cached.
    return {_ROW_ARGUMENT: offsets.view_as(offsets), _CHUNKS: indices}


def why_not_captured(forward: types.FunctionType) -> str | None:
    """Return why a layer's rule cannot be captured in a CUDA graph, or None.

    The number of chunks decides how a rule is launched. It is computed on the host from the offsets of rows, unless the
    rule takes the chunks as an argument. `_CAPTURED` lists the versions where that was read and tried.
    """
    for name in forward.__code__.co_names:
        own = forward.__globals__.get(name)
        kernel, choice = kernel_behind(own), choice_behind(own)
        if kernel is None or choice is None or _ROW_ARGUMENT not in kernel.parameters:
            continue
        function = choice["func_name"]
        if function in _FOR_GENERATION:
            continue
        package, versions = _CAPTURED.get(function, ("", ()))
        if not versions:
            return f"{function} counts the chunks of rows on the host"
        version = _version_of(package)
        if version not in versions:
            return f"captures of {function} were tried with {package} {', '.join(versions)}, not with {version}"
        for other in _BACKENDS:
            if importlib.util.find_spec(other) is not None:
                return f"captures of {function} were not tried with {other}, which it runs if that is installed"
    return None


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "a version that is not known"


def _row_by_row(function: Callable, rows: Rows, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Run a rule on each of the rows that are concatenated in (1, T, ...). Return (the output, None for the state)."""
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
    """Return the tokens of one row, if `x` is a tensor (1, T, ...); else `x`."""
    return x[:, row] if isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[1] == tokens else x
