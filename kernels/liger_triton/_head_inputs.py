"""Check the arguments of the vocabulary losses and flatten them to rows. Errors name the field, the value and the fix.

Losses of several heads take `hidden` as one tensor (K, T, H) or K tensors (T, H). `weight` is one tensor (V, H) for
tied heads, or K tensors (V, H) for untied heads.

Shapes  T rows, H hidden width, V vocabulary, r rank of a LoRA on the head, K heads. hidden (..., H) becomes x (T, H),
        target (...) becomes (T,), and A (r, H), B (V, r) of a LoRA become u (T, r) and lora_b (V, r).
"""

import math
from typing import NamedTuple

import torch

from ._dispatch import KERNEL_DTYPES, autocast_dtype, is_float64, is_wrapped, jit, tl, use_triton
from ._launch import cdiv, launch
from .sizes import now

FLOAT_DTYPES = (*KERNEL_DTYPES, torch.float64)
REDUCTIONS = ("mean", "sum", "none")


def check_options(name, x, target, reduction, label_smoothing, softcap, logit_scale, z_loss) -> None:
    """Raise ValueError unless dtypes and devices of x (called `name`) and target fit and the options are in range."""
    check_float(name, x)
    check_target(name, x, target)
    check_numbers(reduction, label_smoothing, softcap, logit_scale, z_loss)


def check_numbers(reduction, label_smoothing, softcap, logit_scale, z_loss) -> None:
    """Raise ValueError unless the options of a loss are in range. It needs no tensors."""
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
    """Return the dtype of logits and products: the autocast dtype, or without it the dtype of `hidden`.

    Autocast leaves float64 alone. `others` are pairs of a name and a tensor or None. Raise ValueError unless these
    tensors fit `hidden` and are on its device.
    """
    to = autocast_dtype(hidden)
    for name, t in (("hidden", hidden), *others):
        if t is None:
            continue
        check_float(name, t)
        if t.dtype != hidden.dtype and (to is None or is_float64(t)):
            inside = f", or call under torch.autocast({hidden.device.type!r})"
            remedy = "" if is_float64(t, hidden) else inside
            raise ValueError(f"hidden is {hidden.dtype}, {name} {t.dtype}; expected one dtype. Convert one{remedy}.")
        check_device(name, t, "hidden", hidden)
    return hidden.dtype if to is None else to


def check_chunking(accumulate: str, chunk_rows: int | None) -> None:
    """Raise ValueError unless the options of the sum over chunks and of their size are in range."""
    if accumulate not in ("fp32", "lean"):
        raise ValueError(f'accumulate is {accumulate!r}; expected "fp32", or "lean" (the dtype of the weight).')
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; expected 1 or more, or None to choose it by the vocabulary.")


def check_target(name, x, target) -> None:
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(f"target is {target.dtype}; expected class ids, int64 or int32. Convert it: target.long().")
    check_device("target", target, name, x)


def check_target_of_twin(target: torch.Tensor, ignore_index: int, vocab: int, x: torch.Tensor) -> None:
    """Raise IndexError as `check_target_range` does, unless the host cannot read the target: in a trace, in a CUDA
    graph capture, and for tensors without values."""
    if torch.compiler.is_compiling():  # first, because dynamo cannot trace the checks below
        return
    if target.is_meta or is_wrapped(target) or is_wrapped(x):
        return
    if not (target.is_cuda and torch.cuda.is_current_stream_capturing()):
        check_target_range(target, ignore_index, vocab)


def check_device(name, tensor, other_name, other) -> None:
    if tensor.device != other.device:
        raise ValueError(
            f"{name} is on {tensor.device}, {other_name} on {other.device}; move one: {name}.to({str(other.device)!r})."
        )


@jit(do_not_specialize=["n"])
def _count_kernel(TARGET, OUT, n, vocab, ignore_index, BLOCK: tl.constexpr):
    """Add two counts to OUT (2,): the targets among n that are not `ignore_index`, and those outside [0, vocab)."""
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(TARGET + off, mask=off < n, other=ignore_index)
    kept = y != ignore_index
    tl.atomic_add(OUT, tl.sum(kept.to(tl.int32)))
    tl.atomic_add(OUT + 1, tl.sum((kept & ((y < 0) | (y >= vocab))).to(tl.int32)))


def check_target_range(target: torch.Tensor, ignore_index: int, vocab: int) -> int:
    """Return how many targets are not ignored; raise IndexError if one of them is outside [0, vocab). The host waits
    for the device once."""
    if now.computes_nothing:
        return target.numel()
    if use_triton(target) and target.is_contiguous() and 0 < target.numel() < 2**31:
        counts = torch.zeros(2, dtype=torch.int32, device=target.device)
        grid = (cdiv(target.numel(), 1024),)
        launch(_count_kernel, grid, target, counts, target.numel(), vocab, ignore_index, BLOCK=1024)
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


class Head(NamedTuple):
    """One head flattened to rows: x (T, H), weight (V, H), bias (V,), u (T, r), lora_b (V, r)."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    u: torch.Tensor | None
    lora_b: torch.Tensor | None

    def needs(self) -> int:
        """Return the gradients that autograd needs, as a sum of `DX` to `DB`."""
        needs = 0
        if torch.is_grad_enabled():
            for k, t in enumerate(self):
                if t is not None and t.requires_grad:
                    needs |= 1 << k
        return needs


DX, DW, DBIAS, DU, DB = (1 << k for k in range(5))  # a bit for the gradient of each tensor of `Head`


def prepare(hidden, weight, target, bias, lora, lora_input, accumulate, chunk_rows):
    """Check the tensors of a call and flatten them: (`Head`, target (T,), compute dtype)."""
    if hidden.ndim < 1 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1] or target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)}, target {tuple(target.shape)}; expected "
            "hidden (..., H), weight (V, H), target (...). For the next-token loss: hidden[:, :-1] and labels[:, 1:]."
        )
    vocab = weight.shape[0]
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(f"bias is {tuple(bias.shape)}; expected ({vocab},) for weight {tuple(weight.shape)}, or None.")
    dtype = compute_dtype(hidden, ("weight", weight), ("bias", bias))
    check_target("hidden", hidden, target)
    check_chunking(accumulate, chunk_rows)
    u, lora_b = _lora_branch(hidden, weight, lora, lora_input)
    x = _as_unit_rows(hidden)
    u = None if u is None else _as_unit_rows(u)
    return Head(x, weight, bias, u, lora_b), target.reshape(-1).long().contiguous(), dtype


def _as_unit_rows(t: torch.Tensor) -> torch.Tensor:
    """Return t (..., n) as rows (T, n) with unit stride. One vector is one row."""
    rows = t.flatten(0, -2) if t.ndim > 1 else t.unsqueeze(0)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _lora_branch(hidden, weight, lora, lora_input):
    """Return u = scaling * lora_input A^T (..., r) and B. Plain autograd differentiates u, because it is small."""
    if lora is None:
        if lora_input is not None:
            raise ValueError("lora_input was given without lora; pass lora=(A, B, scaling) too, or drop it.")
        return None, None
    if len(lora) != 3:
        raise ValueError(f"lora has {len(lora)} entries; expected (A, B, scaling), A (r, H) and B (V, r).")
    lora_a, lora_b, scaling = lora
    (vocab, width), rank = weight.shape, lora_a.shape[0]
    if lora_a.shape != (rank, width) or lora_b.shape != (vocab, rank):
        raise ValueError(
            f"lora has A {tuple(lora_a.shape)} and B {tuple(lora_b.shape)}; expected A (r, {width}) and B ({vocab}, r) "
            f"for weight {tuple(weight.shape)}."
        )
    source = hidden if lora_input is None else lora_input
    if source.shape != hidden.shape:
        raise ValueError(f"lora_input is {tuple(source.shape)}, hidden {tuple(hidden.shape)}; expected the same shape.")
    for name, t in (("lora A", lora_a), ("lora B", lora_b), ("lora_input", source)):
        if t.dtype not in FLOAT_DTYPES or (is_float64(t) and not is_float64(hidden)):
            also = " or float64" if is_float64(hidden) else ""
            raise ValueError(f"{name} is {t.dtype}, hidden {hidden.dtype}; expected bfloat16, float16, float32{also}.")
        check_device(name, t, "hidden", hidden)
    return torch.nn.functional.linear(source.to(lora_a.dtype), lora_a) * scaling, lora_b


def check_heads(hidden, weight) -> tuple[int, int, bool]:
    """Return (K, T, tied). Raise ValueError unless the shapes fit and all heads share one dtype and device."""
    listed = isinstance(hidden, list | tuple)
    if listed:
        if not hidden:
            raise ValueError("hidden is an empty list; expected the output (T, H) of each head, one or more.")
        first = hidden[0]
        for k, t in enumerate(hidden):
            if (t.shape, t.dtype, t.device) != (first.shape, first.dtype, first.device):
                raise ValueError(
                    f"hidden[{k}] is {tuple(t.shape)} {t.dtype} on {t.device}, hidden[0] {tuple(first.shape)} "
                    f"{first.dtype} on {first.device}; expected one shape, dtype and device for all heads."
                )
    else:
        first = hidden[0] if hidden.ndim == 3 and hidden.shape[0] else hidden.new_empty(0)
    if first.ndim != 2:
        shape = tuple(first.shape) if listed else tuple(hidden.shape)
        raise ValueError(
            f"hidden{'[0]' if listed else ''} is {shape}; expected hidden (K, T, H), or a list of K tensors (T, H). "
            "Flatten batch and sequence: x.flatten(-3, -2)."
        )
    heads, (rows, width) = len(hidden), first.shape
    tied = not isinstance(weight, list | tuple)
    if not tied and len(weight) != heads:
        raise ValueError(
            f"weight has {len(weight)} tensors, hidden {heads} heads; expected one weight for each head, or one tensor "
            "(V, H) for all."
        )
    for k, w in enumerate([weight] if tied else weight):
        name = "weight" if tied else f"weight[{k}]"
        if w.ndim != 2 or w.shape[1] != width:
            raise ValueError(f"{name} is {tuple(w.shape)}, a head's rows {tuple(first.shape)}; expected (V, {width}).")
        if not tied and w.shape != weight[0].shape:
            raise ValueError(
                f"{name} is {tuple(w.shape)}, weight[0] {tuple(weight[0].shape)}; the heads share one vocabulary."
            )
    return heads, rows, tied


def check_per_row(name, t, heads, rows, first) -> None:
    """Raise ValueError unless t is (K, T) on the device of the heads."""
    if t.shape != (heads, rows):
        raise ValueError(f"{name} is {tuple(t.shape)}; expected ({heads}, {rows}): a row for each head.")
    check_device(name, t, "hidden", first)


def check_weights(name, weights, shapes, x) -> None:
    """Raise ValueError unless `weights`, the factors of the rows of x, have one of `shapes` and need no gradient."""
    dtypes = (torch.float32, torch.float64) if is_float64(x) else (torch.float32,)
    if weights.shape not in shapes or weights.dtype not in dtypes or weights.requires_grad:
        raise ValueError(
            f"{name} is {tuple(weights.shape)} {weights.dtype}, requires_grad={weights.requires_grad}; expected "
            f"torch.float32, {' or '.join(str(tuple(shape)) for shape in shapes)}, without gradient. Convert it "
            "(.float(), .detach()); to differentiate in weights, multiply what reduction='none' returns by them."
        )
    check_device(name, weights, "hidden", x)


def spread(row_weight, counted, first):
    """Return `row_weight`, (K,) or (K, T), as a contiguous (K, T) with zeros for rows that do not count. None stays
    None.

    `first` are the hidden states of one head.
    """
    if row_weight is None:
        return None
    check_weights("row_weight", row_weight, (counted.shape[:1], counted.shape), first)
    # `torch.where` keeps the layout of its arguments, and the kernels index rows of a contiguous tensor.
    per_row = row_weight if row_weight.ndim == 2 else row_weight.unsqueeze(1)
    return torch.where(counted, per_row, 0.0).contiguous()
