"""Checks of arguments that the vocabulary losses share. Each error names the field, its value and what to do."""

import math

import torch

from ._dispatch import KERNEL_DTYPES, _device_guard, jit, takes_twin, tl, use_triton
from ._launch import cdiv
from .sizes import computes_nothing

FLOAT_DTYPES = (*KERNEL_DTYPES, torch.float64)
REDUCTIONS = ("mean", "sum", "none")


def check_options(name, x, target, reduction, label_smoothing, softcap, logit_scale, z_loss) -> None:
    """ValueError unless dtypes and devices of x (called `name`) and target fit and the options are in range."""
    check_float(name, x)
    check_target(name, x, target)
    check_numbers(reduction, label_smoothing, softcap, logit_scale, z_loss)


def check_numbers(reduction, label_smoothing, softcap, logit_scale, z_loss) -> None:
    """ValueError unless the options of a loss, which need no tensors, are in range."""
    if reduction not in REDUCTIONS:
        raise ValueError(f'reduction is {reduction!r}; expected "mean", "sum" or "none".')
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}; expected a number from 0 to 1.")
    if softcap is not None and not (softcap > 0.0 and math.isfinite(softcap)):
        raise ValueError(f"softcap is {softcap}; expected a positive number, or None for no softcap.")
    for option, value in (("logit_scale", logit_scale), ("z_loss", z_loss)):
        if not math.isfinite(value):
            raise ValueError(f"{option} is {value}; expected a finite number.")


def check_float(name, x) -> None:
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"{name} is {x.dtype}; expected bfloat16, float16, float32 or float64. Convert it: {name}.float()."
        )


def compute_dtype(hidden, *others) -> torch.dtype:
    """The dtype of logits and products: inside autocast the one of autocast, which leaves float64 alone, otherwise the
    one of `hidden`. `others` are pairs of a name and a tensor or None; ValueError unless these tensors fit `hidden` and
    are on its device."""
    device_type = hidden.device.type
    autocast = torch.is_autocast_enabled(device_type)
    for name, t in (("hidden", hidden), *others):
        if t is None:
            continue
        check_float(name, t)
        if t.dtype != hidden.dtype and (not autocast or takes_twin(t, hidden)):
            inside = "" if takes_twin(t, hidden) else f", or call under torch.autocast({device_type!r})"
            raise ValueError(f"hidden is {hidden.dtype}, {name} {t.dtype}; expected one dtype. Convert one{inside}.")
        check_device(name, t, "hidden", hidden)
    return torch.get_autocast_dtype(device_type) if autocast and not takes_twin(hidden) else hidden.dtype


def weight_dtypes(x) -> tuple[torch.dtype, ...]:
    """The dtypes that factors of the rows of x may have: fp32, and for x in float64 also float64."""
    return (torch.float32, torch.float64) if takes_twin(x) else (torch.float32,)


def check_chunking(accumulate: str, chunk_rows: int | None) -> None:
    """ValueError unless the options of the sum over chunks and of their size are in range."""
    if accumulate not in ("fp32", "lean"):
        raise ValueError(f'accumulate is {accumulate!r}; expected "fp32", or "lean" (the dtype of the weight).')
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; expected 1 or more, or None to choose it by the vocabulary.")


def check_target(name, x, target) -> None:
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(f"target is {target.dtype}; expected class ids, int64 or int32. Convert it: target.long().")
    check_device("target", target, name, x)


def check_target_of_twin(target: torch.Tensor, ignore_index: int, vocab: int) -> None:
    """IndexError as in `check_target_range`, except while a call is traced or captured, when the host cannot wait."""
    if torch.compiler.is_compiling():  # this comes first, because dynamo cannot trace the question below
        return
    if not (target.is_cuda and torch.cuda.is_current_stream_capturing()):
        check_target_range(target, ignore_index, vocab)


def check_device(name, tensor, other_name, other) -> None:
    if tensor.device != other.device:
        raise ValueError(
            f"{name} is on {tensor.device}, {other_name} on {other.device}; move one: {name}.to({str(other.device)!r})."
        )


@jit
def _count_kernel(TARGET, OUT, n, vocab, ignore_index, BLOCK: tl.constexpr):
    """Adds two counts to OUT (2,): of the n targets that are not `ignore_index`, and of those among them that are
    outside [0, vocab)."""
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(TARGET + off, mask=off < n, other=ignore_index)
    kept = y != ignore_index
    tl.atomic_add(OUT, tl.sum(kept.to(tl.int32)))
    tl.atomic_add(OUT + 1, tl.sum((kept & ((y < 0) | (y >= vocab))).to(tl.int32)))


def check_target_range(target: torch.Tensor, ignore_index: int, vocab: int) -> int:
    """The number of targets that are not ignored. IndexError if one of these is outside [0, vocab). The host waits for
    the device once."""
    if computes_nothing():
        return target.numel()
    if use_triton(target) and target.is_contiguous() and 0 < target.numel() < 2**31:
        counts = torch.zeros(2, dtype=torch.int32, device=target.device)
        with _device_guard(target):
            _count_kernel[(cdiv(target.numel(), 1024),)](
                target, counts, target.numel(), vocab, ignore_index, BLOCK=1024
            )
    else:
        kept = target != ignore_index
        counts = torch.stack((kept.sum(), (kept & ((target < 0) | (target >= vocab))).sum()))
    n_kept, n_bad = counts.tolist()
    if n_bad:
        bad = (target != ignore_index) & ((target < 0) | (target >= vocab))
        row = int(bad.flatten().nonzero()[0])
        raise IndexError(
            f"target[{row}] is {int(target.flatten()[row])} (counted in the flattened target; {n_bad} such); expected "
            f"0 to {vocab - 1}, or {ignore_index} to ignore the row. Check that labels and model share one vocabulary."
        )
    return n_kept
