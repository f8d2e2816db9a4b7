"""Tests on a small copy of a model whether packed rows would see each other, with the batch that a collator makes.

Attention keeps packed rows apart by their positions. A layer that keeps a state (a convolution, linear attention, a
state space) has to be told where rows begin, by other arguments. If it is not told, it silently carries its state into
the next row. So the copy gets exactly the arguments that the collator makes, and a model that keeps a state has to
prove that its rows stay apart.
"""

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DataCollatorWithFlattening, PreTrainedModel

from liger_trainer.head.module import base_model_of
from liger_trainer.patching.core import probe
from liger_trainer.patching.core.pattern import attempt
from liger_trainer.varlen import unpadded_backbone
from liger_trainer.varlen.model_parts import backbone_of
from liger_trainer.varlen.proof.small_model import small_copy

_TESTABLE_ATTENTION = ("eager", "sdpa")  # run on a CPU; others, such as flash-attn, read the lengths of rows
_LENGTHS = (7, 5, 11)  # the sum is prime, so no other dimension of a small copy is equal to it
_RTOL = 1e-3  # relative to the largest hidden state; a token of another row changes it by 1e-2 or more
_STATE_KINDS = {"linear_attention", "conv", "mamba", "recurrent", "hybrid"}  # `layer_types` of a config
_ROW_ARGUMENTS = ("seq_idx", "cu_seqlens")  # tell a convolution, and a rule or scan, where rows begin


class Kernel(NamedTuple):
    """A function of transformers that calls a package if it is installed, and PyTorch code otherwise."""

    torch_function: Callable
    parameters: tuple[str, ...]  # of the package's function; other arguments are dropped


def why_rows_mix(model, collate: Callable[[list[dict]], dict] | None = None) -> str | None:
    """Return the reason why packed rows would see each other in `model`, or None.

    A model with layers that keep a state has to prove that rows stay apart. Another model only gets a reason if a test
    shows that rows mix.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): The model.
        collate (`Callable`, *optional*): Makes a batch of a list of rows with `input_ids` and `labels`. A batch with
            several rows or an `attention_mask` is not packed. Unset: [`~transformers.DataCollatorWithFlattening`] with
            its defaults.
    """
    model = base_model_of(model)
    batch = packed_batch(collate)
    if batch is None:
        return None
    backbone = backbone_of(model) if isinstance(model, PreTrainedModel) else None
    config = getattr(model, "config", None)
    stateful = keeps_state(model)
    attention = getattr(config, "_attn_implementation", None)
    name = f"{type(model).__name__} with attn_implementation={attention!r}"
    unproven = f"the layers of {name} keep a state, and a small copy could not show that packed rows stay apart in it"
    if not isinstance(backbone, PreTrainedModel):
        return f"{unproven}: no part before its head was found" if stateful else None
    ours = unpadded_backbone.BackboneBinding.of(backbone)
    if ours is not None and not ours.fallback_active and ours.proven.padding_reason is None and "position_ids" in batch:
        return None
    if attention not in _TESTABLE_ATTENTION:
        if not stateful:
            return None
        attention = "sdpa" if backbone._supports_sdpa else "eager"  # the states mix rows with any attention
    with probe.isolated():
        result, failed = attempt(lambda part: _rows_stay_apart(part, attention, batch), backbone)
    if result is None:
        return f"{unproven}: {failed}" if stateful else None
    if result.raised is not None:
        return f"with rows packed in this way, {name} fails: {result.raised}"
    if result.apart:
        return None
    return f"in {name}, packed rows see each other, so that it would learn from tokens that it must not see"


def keeps_state(model) -> bool:
    """Return whether layers of `model` keep a state between tokens other than keys and values."""
    backbone = backbone_of(model) if isinstance(model, PreTrainedModel) else None
    if any(getattr(module, "_is_stateful", False) for module in (model, *(model.children()))):
        return True
    if backbone is None:
        return False
    if _STATE_KINDS & {*(getattr(backbone.config, "layer_types", None) or ())}:
        return True
    stack = getattr(backbone, "layers", None)  # only the decoder's layers, since an audio encoder may have convolutions
    layers = stack.modules() if isinstance(stack, nn.ModuleList) else ()
    return any(isinstance(layer, nn.Conv1d) and layer.groups == layer.in_channels > 1 for layer in layers)


def packed_batch(collate: Callable[[list[dict]], dict] | None) -> dict[str, Any] | None:
    """Return a batch that `collate` makes of a few rows, without its labels, or None if it does not pack them.

    A user's collator may need more columns than tokens and labels. Then the batch is a minimal packed one, with
    positions only.
    """
    flatten = DataCollatorWithFlattening()
    batch, _ = attempt(lambda given: (dict(given(_rows())), None), flatten if collate is None else collate)
    if batch is None or not isinstance(batch.get("input_ids"), torch.Tensor):
        batch = dict(flatten(_rows()))
    if batch["input_ids"].shape[0] != 1 or batch.get("attention_mask") is not None:
        return None
    return {key: value for key, value in batch.items() if key != "labels"}


def _rows() -> list[dict[str, list[int]]]:
    source = probe.generator()
    rows = [torch.randint(3, 40, (length,), generator=source).tolist() for length in _LENGTHS]
    return [{"input_ids": row, "labels": row} for row in rows]


class _PackedResult(NamedTuple):
    """What a small copy did with the packed batch: whether rows stayed apart, or the error that it raised."""

    apart: bool
    raised: str | None = None


def _rows_stay_apart(backbone, attention: str, batch: dict[str, Any]) -> tuple[_PackedResult, None]:
    """Compare rows run one by one with the packed batch. An error that only the packed batch raises is a result too."""
    copy = small_copy(backbone, probe.SEED, attention).eval()
    rows = [torch.tensor([row["input_ids"]]) for row in _rows()]
    total = sum(_LENGTHS)
    with torch.no_grad(), kernels_in_torch(copy):
        one_by_one = torch.cat([copy(input_ids=ids, use_cache=False)[0] for ids in rows], 1)
        packed, raised = attempt(lambda given: (copy(**given, use_cache=False)[0], None), batch)
    if packed is None:
        return _PackedResult(False, raised), None
    without_padding = packed[:, :total]  # the collator may have padded the end
    return _PackedResult(probe.allclose_to_max(without_padding, one_by_one, _RTOL)), None


@contextlib.contextmanager
def kernels_in_torch(model: nn.Module) -> Iterator[None]:
    """Context manager: layers of `model`, on the CPU, run PyTorch code instead of a package's GPU kernels.

    A kernel that is passed the rows runs row by row. One that is not runs across them, as it does on the GPU.
    """
    names = {type(module).__module__ for module in model.modules()}
    scopes = [vars(sys.modules[name]) for name in sorted(names)]
    replaced: list[tuple[dict, str, Any]] = []
    try:
        for scope in scopes:
            for name, value in list(scope.items()):
                kernel = kernel_behind(value)
                if kernel is not None:
                    replaced.append((scope, name, value))
                    scope[name] = _row_by_row(kernel)
        yield
    finally:
        for scope, name, value in replaced:
            scope[name] = value


def kernel_behind(value: Any) -> Kernel | None:
    """Return the kernel of a package that a global of a modeling file calls, or None if it calls no package."""
    choice = choice_behind(value)
    if choice is None or choice["is_new_implementation"] is not True:
        return None
    return Kernel(choice["torch_function"], choice["applicable_params"])


def choice_behind(value: Any) -> dict[str, Any] | None:
    """Return the variables of the closure that chooses between a package and transformers' own code, or None.

    They are local variables of transformers' decorator `use_kernel_func_from_hub_with_fallback`, among them
    `is_new_implementation`, `torch_function`, `func_name` and `applicable_params`.
    """
    function = type(value).forward if isinstance(value, nn.Module) else value  # `kernels` wraps a function in a module
    for _ in range(3):  # decorators may lie around the closure
        if not isinstance(function, types.FunctionType):
            return None
        variables = inspect.getclosurevars(function).nonlocals
        if "is_new_implementation" in variables:
            return dict(variables)
        function = variables.get("func")
    return None


def _row_by_row(kernel: Kernel) -> Callable:
    """Return PyTorch code in place of the kernel: row by row if the call says where rows begin, else across them."""
    total = sum(_LENGTHS)

    def run(*args: Any, **kwargs: Any) -> Any:
        row_arguments = [kwargs.pop(name, None) for name in _ROW_ARGUMENTS if name in kernel.parameters]
        kwargs = {name: value for name, value in kwargs.items() if name not in _ROW_ARGUMENTS}
        if all(rows is None for rows in row_arguments):
            return kernel.torch_function(*args, **kwargs)
        outputs = []
        start = 0
        for length in _LENGTHS:
            of_row = [_narrowed(x, start, length, total) for x in args]
            named = {name: _narrowed(x, start, length, total) for name, x in kwargs.items()}
            outputs.append(kernel.torch_function(*of_row, **named))
            start += length
        return _joined(outputs)

    return run


def _narrowed(x: Any, start: int, length: int, total: int) -> Any:
    """Return the tokens of one row, if `x` is a tensor with all tokens along a dimension; else `x`."""
    if not isinstance(x, torch.Tensor) or total not in x.shape:
        return x
    return x.narrow(x.shape.index(total), start, length)


def _joined(outputs: list) -> Any:
    """Concatenate the outputs of all rows. A state has no token dimension, so the last row's is returned."""
    if isinstance(outputs[0], tuple):
        return tuple(_joined(list(parts)) for parts in zip(*outputs, strict=True))
    if not isinstance(outputs[0], torch.Tensor):
        return outputs[-1]
    shapes = zip(*(output.shape for output in outputs), strict=True)
    along = next((i for i, sizes in enumerate(shapes) if sizes == _LENGTHS), None)
    return outputs[-1] if along is None else torch.cat(outputs, along)
