"""The engine under `linear_cross_entropy` and `linear_logprobs`: logits of a few rows at a time, never all of them.

    l = x W^T + bias + u B^T      x (T, H), W (V, H), bias (V,), u (T, r) = scaling * x' A^T and B (V, r) of a LoRA
    dx = dl W,  dW = dl^T x,  dbias = sum over rows of dl,  du = dl B,  dB = dl^T u

Rows with an ignored target are dropped first; the rest is walked in chunks of C rows. The logits of a chunk are one
matrix product; `_row_pass.row_pass` turns them into statistics and, in place, into dl; the gradients are further
products. Formulas of loss, entropy and dl: `_row_pass.py`. Chunking: Liger report, arXiv:2410.10989.

When the gradient is computed. The mode is chosen from what is known of the upstream gradient:

    "uniform"    it is one number for all rows (a sum or mean, with or without row weights, which are then factors of
                 dl). The gradients come out of the forward pass, three products in all; the backward pass multiplies by
                 the number. Were it not one number after all, they become NaN: compared on the device, without waiting
                 for it.
    "rows"       any upstream, but W, bias and B are frozen: dx and du of each row come out of the forward pass, the
                 backward pass multiplies each row. Two products.
    "recompute"  any upstream, entropy included: the backward pass computes the logits again. Four products.

Rounding. Neither 1 / T nor the upstream gradient is a factor of dl, so that fp16 does not lose p_v / T to underflow.
dW, dbias and dB are accumulated over the chunks in fp32 and rounded once, after the multiplication by the upstream
gradient; `accumulate="lean"` accumulates dW and dB in their own dtype and saves the fp32 buffers. dx and du are rounded
after their product, and once more by an upstream gradient that is not a power of two.

Memory beyond inputs and gradients: C * V elements of the compute dtype (plain PyTorch: 4 * C * V of fp32), the fp32
copy of dW until the backward pass rounds it, and the converted weight under autocast.
"""

from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ._dispatch import kernel_op, use_triton
from ._head_checks import FLOAT_DTYPES, check_device, check_target, check_target_range
from ._products import add_outer, back, project
from ._row_pass import ENTROPY, LOSS, N_STATS, RowSpec, row_pass
from ._scale import scaled

# Bits of `needs`: which gradients are wanted.
DX, DW, DBIAS, DU, DB = (1 << k for k in range(5))

# Past 4096 rows the products do not get faster. 640 MiB hold 2048 rows of the vocabularies of 150 thousand.
_GPU_CHUNK_BYTES, _GPU_CHUNK_ROWS = 640 << 20, 4096
_CPU_CHUNK_BYTES = 64 << 20  # of fp32 logits


class HeadSpec(NamedTuple):
    """What stays constant over a call. `chunk_rows` 0: chosen by `chunk_size`. `compute_dtype`: of logits and
    products."""

    rows: RowSpec
    needs: int
    lean: bool
    chunk_rows: int
    compute_dtype: torch.dtype

    def flat(self):
        """As arguments of an op, whose schema knows no tuples of mixed types."""
        return (*self.rows, self.needs, self.lean, self.chunk_rows, self.compute_dtype)


def chunk_size(rows: int, vocab: int, dtype: torch.dtype, device_type: str, later_bytes: int = 0) -> int:
    """Rows per chunk: bounded memory, chunks of about equal size, on GPUs a multiple of the products' tile of 128 rows.

    `later_bytes`: what the backward pass will allocate anyway after the logits are gone, so that as much costs nothing.
    """
    if device_type == "cpu":
        most, tile = max(1, _CPU_CHUNK_BYTES // (4 * vocab)), 1
    else:
        allowed = max(_GPU_CHUNK_BYTES, later_bytes)
        most, tile = min(_GPU_CHUNK_ROWS, max(128, allowed // (dtype.itemsize * vocab) // 128 * 128)), 128
    chunks = max(1, -(-rows // most))
    even = -(-rows // chunks)
    return max(1, -(-even // tile) * tile)


def _kept_rows(target, ignore_index, vocab):
    """Indices of the rows that count, None for all. The one place where the host waits for the device."""
    if target.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # a CUDA graph cannot wait: row_pass gives ignored rows zeros and bad targets NaN
    if check_target_range(target, ignore_index, vocab) == target.shape[0]:
        return None
    return (target != ignore_index).nonzero().squeeze(1)


def _sum_dtype(like, lean):
    """Of a gradient summed over chunks. fp16 would overflow: the sum is not yet divided by the number of rows."""
    return like.dtype if lean and like.dtype != torch.float16 else torch.float32


class _Accumulator:
    """Sum over the chunks of a^T b (V, k), where k is the last dimension of `like`."""

    def __init__(self, like, lean, chunks):
        new = torch.empty if chunks else torch.zeros
        self.sum = new(like.shape, dtype=_sum_dtype(like, lean), device=like.device)
        self.started = False

    def add(self, a, b):
        add_outer(self.sum, a, b, self.started)
        self.started = True


def _walk(x, weight, bias, u, lora_b, target, stats, g_loss, g_entropy, spec: HeadSpec):
    """Statistics (7, T), computed unless `stats` is given, and the gradients in `spec.needs` (None where not
    wanted)."""
    total, vocab, dtype = x.shape[0], weight.shape[0], spec.compute_dtype
    kept = _kept_rows(target, spec.rows.ignore_index, vocab)
    rows = total if kept is None else kept.shape[0]
    rounded = (
        weight.numel() * weight.element_size()
        if spec.needs & DW and _sum_dtype(weight, spec.lean) != weight.dtype
        else 0
    )
    size = min(spec.chunk_rows or chunk_size(rows, vocab, dtype, x.device.type, rounded), max(rows, 1))
    chunks = -(-rows // size)
    w = weight.to(dtype)
    b = None if bias is None else bias.to(dtype)
    lb = None if lora_b is None else lora_b.to(dtype)
    needs, do_stats = spec.needs, stats is None
    if do_stats:
        stats = torch.zeros((N_STATS, total), dtype=torch.float32, device=x.device)
    # Dropped rows keep the zeros; without dropping every row is written.
    new = torch.empty_like if kept is None else torch.zeros_like
    dx = new(x, memory_format=torch.contiguous_format) if needs & DX else None
    du = new(u, memory_format=torch.contiguous_format) if needs & DU else None
    dw = _Accumulator(weight, spec.lean, chunks) if needs & DW else None
    dlb = _Accumulator(lora_b, spec.lean, chunks) if needs & DB else None
    dbias = torch.zeros(vocab, dtype=torch.float32, device=x.device) if needs & DBIAS else None
    # Columns padded to 64 elements: rows start at a cache line and load in full width, whatever the vocabulary.
    width = -(-vocab // 64) * 64 if use_triton(x) else vocab
    buffer = torch.empty((size, width), dtype=dtype, device=x.device)

    for start in range(0, rows, size):
        part = slice(start, min(start + size, rows))
        where = part if kept is None else kept[part]
        x_c, y_c = x[where].to(dtype), target[where]
        u_c = None if u is None else u[where].to(dtype)
        logits = buffer[: y_c.shape[0], :vocab]
        project(x_c, w, logits, b)
        if u_c is not None:
            project(u_c, lb, logits, add=True)
        stats_c = stats[:, where]  # a copy if rows were dropped
        gl_c, ge_c = (None if g is None else g[where] for g in (g_loss, g_entropy))
        row_pass(logits, logits if needs else None, y_c, stats_c, gl_c, ge_c, spec.rows, do_stats, width)
        if do_stats and kept is not None:
            stats[:, where] = stats_c
        for grad, factor in ((dx, w), (du, lb)):
            if grad is None:
                continue
            if kept is None and grad.dtype == dtype:
                back(logits, factor, out=grad[part])
            else:
                grad[where] = back(logits, factor).to(grad.dtype)
        if dw is not None:
            dw.add(logits, x_c)
        if dlb is not None:
            dlb.add(logits, u_c)
        if dbias is not None:
            dbias += logits.sum(0, dtype=torch.float32)
    return stats, (dx, None if dw is None else dw.sum, dbias, du, None if dlb is None else dlb.sum)


def _unflat(flat):
    return HeadSpec(RowSpec(*flat[:6]), *flat[6:])


def _filled(x, grads):
    """An op returns tensors only: an empty one stands for None."""
    return tuple(x.new_empty(0) if g is None else g for g in grads)


@kernel_op("linear_head_forward")
def _forward_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, u: torch.Tensor | None,
    lora_b: torch.Tensor | None, target: torch.Tensor, row_weight: torch.Tensor | None, ignore_index: int, scale: float,
    softcap: float, smoothing: float, z_loss: float, extras: int, needs: int, lean: bool, chunk_rows: int,
    compute_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    spec = _unflat((ignore_index, scale, softcap, smoothing, z_loss, extras, needs, lean, chunk_rows, compute_dtype))
    with torch.autocast(x.device.type, enabled=False):
        stats, grads = _walk(x, weight, bias, u, lora_b, target, None, row_weight, None, spec)
    return stats, *_filled(x, grads)


@kernel_op("linear_head_backward")
def _backward_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, u: torch.Tensor | None,
    lora_b: torch.Tensor | None, target: torch.Tensor, stats: torch.Tensor, g_loss: torch.Tensor,
    g_entropy: torch.Tensor | None, ignore_index: int, scale: float, softcap: float, smoothing: float, z_loss: float,
    extras: int, needs: int, lean: bool, chunk_rows: int, compute_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    spec = _unflat((ignore_index, scale, softcap, smoothing, z_loss, extras, needs, lean, chunk_rows, compute_dtype))
    with torch.autocast(x.device.type, enabled=False):
        _, grads = _walk(x, weight, bias, u, lora_b, target, stats, g_loss, g_entropy, spec)
    return _filled(x, grads)


def _fake_grads(x, weight, u, lora_b, needs, lean):
    def sum_like(t):
        return t.new_empty(t.shape, dtype=_sum_dtype(t, lean))

    return (
        x.new_empty(x.shape if needs & DX else 0),
        sum_like(weight) if needs & DW else x.new_empty(0),
        x.new_empty(weight.shape[0], dtype=torch.float32) if needs & DBIAS else x.new_empty(0),
        u.new_empty(u.shape) if needs & DU else x.new_empty(0),
        sum_like(lora_b) if needs & DB else x.new_empty(0),
    )


@_forward_op.register_fake
def _(x, weight, bias, u, lora_b, target, row_weight, *flat):
    spec = _unflat(flat)
    stats = x.new_empty((N_STATS, x.shape[0]), dtype=torch.float32)
    return stats, *_fake_grads(x, weight, u, lora_b, spec.needs, spec.lean)


@_backward_op.register_fake
def _(x, weight, bias, u, lora_b, target, stats, g_loss, g_entropy, *flat):
    spec = _unflat(flat)
    return _fake_grads(x, weight, u, lora_b, spec.needs, spec.lean)


def _one_number(g, counted):
    """The value that g (T,) has in every counted row, shape (): NaN if there are two, 0 if there is no such row."""
    if g.shape[0] == 0:
        return g.new_zeros(())
    if g.stride(0) == 0 and not torch.compiler.is_compiling():
        return torch.where(counted.any(), g[0], 0.0)  # one number expanded, as the sum of the rows hands it down
    low = torch.where(counted, g, torch.inf).amin()
    high = torch.where(counted, g, -torch.inf).amax()
    value = torch.where(low == high, low, torch.nan)
    return torch.where(counted.any(), value, 0.0)


class _LinearHead(torch.autograd.Function):
    """(loss * row_weight, entropy, stats), each of T rows; the modes are those of the module docstring."""

    @staticmethod
    def forward(ctx, x, weight, bias, u, lora_b, target, row_weight, mode, spec):
        ctx.set_materialize_grads(False)
        ctx.mode, ctx.spec, ctx.held = mode, spec, None
        early = mode != "recompute"
        now = spec if early else spec._replace(needs=0)
        stats, *grads = _forward_op(x, weight, bias, u, lora_b, target, row_weight, *now.flat())
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias, u, lora_b)]
        if not early:
            ctx.save_for_backward(x, weight, bias, u, lora_b, target, row_weight, stats)
        elif torch.compiler.is_compiling():
            ctx.save_for_backward(target, *grads)
        else:  # not saved: the backward gives them away, and only their sole owner can
            ctx.save_for_backward(target)
            ctx.held = grads
        loss = stats[LOSS].clone() if row_weight is None else stats[LOSS] * row_weight
        entropy = stats[ENTROPY].clone()
        ctx.mark_non_differentiable(stats)
        return loss, entropy, stats

    @staticmethod
    @once_differentiable
    def backward(ctx, g_loss, g_entropy, _):
        spec = ctx.spec
        if not spec.rows.extras >> ENTROPY & 1:
            g_entropy = None  # not asked for; traced, a gradient of zeros arrives all the same
        if ctx.mode == "recompute":
            x, weight, bias, u, lora_b, target, row_weight, stats = ctx.saved_tensors
            g = torch.zeros_like(stats[LOSS]) if g_loss is None else g_loss.float()
            g = (g if row_weight is None else g * row_weight).contiguous()
            g_entropy = None if g_entropy is None else g_entropy.float().contiguous()
            grads = _backward_op(x, weight, bias, u, lora_b, target, stats, g, g_entropy, *spec.flat())
            wanted = [spec.needs >> k & 1 for k in range(5)]
            grads = [g.to(d) if want else None for g, d, want in zip(grads, ctx.dtypes, wanted, strict=True)]
            return *grads, None, None, None, None
        if g_entropy is not None and not torch.compiler.is_compiling():
            raise RuntimeError(
                "The entropy received a gradient, but uniform_grad=True computed only the gradient of log_probs. Call "
                "linear_logprobs with uniform_grad=False, or detach the entropy."
            )
        if g_loss is None:
            return (None,) * 9
        if torch.compiler.is_compiling():
            target, *grads = ctx.saved_tensors
        else:
            (target,) = ctx.saved_tensors
            grads, ctx.held = ctx.held, None
            if grads is None:
                raise RuntimeError(
                    "Second backward through a fused linear head: its gradients were computed with the loss and handed "
                    "over in the first backward. Add the losses up and call backward once, or call the head again."
                )
        g, counted = g_loss.float(), target != spec.rows.ignore_index
        factor = _one_number(g, counted) if ctx.mode == "uniform" else torch.where(counted, g, 0.0)
        if g_entropy is not None:  # traced: the value decides, as for a broken promise
            factor = torch.where((g_entropy == 0).all(), factor, torch.nan)
        if torch.compiler.is_compiling():
            wanted = [spec.needs >> k & 1 for k in range(5)]
            out = [scaled(g, factor, d) if want else None for g, d, want in zip(grads, ctx.dtypes, wanted, strict=True)]
            return *out, None, None, None, None
        out = []
        for k in range(5):
            out.append(scaled(grads[k], factor, ctx.dtypes[k]) if spec.needs >> k & 1 else None)
            grads[k] = None  # an fp32 sum is freed before the next is rounded
        return *out, None, None, None, None


def run_head(prepared, row_weight, rows: RowSpec, known_upstream, accumulate, chunk_rows):
    """(loss, entropy, stats), of T rows each; picks the mode. `prepared` is what `prepare` returned, `known_upstream`
    says that the upstream gradient of the loss is one number for all rows."""
    x, weight, bias, u, lora_b, target, dtype = prepared
    grads_on = torch.is_grad_enabled()
    needs = sum(
        1 << k for k, t in enumerate((x, weight, bias, u, lora_b)) if grads_on and t is not None and t.requires_grad
    )
    spec = HeadSpec(rows, needs, accumulate == "lean", chunk_rows or 0, dtype)
    if not needs:
        stats = _forward_op(x, weight, bias, u, lora_b, target, None, *spec.flat())[0]
        return stats[LOSS] if row_weight is None else stats[LOSS] * row_weight, stats[ENTROPY], stats
    if known_upstream:
        mode = "uniform"
    elif not needs & (DW | DBIAS | DB) and not rows.extras >> ENTROPY & 1:
        mode = "rows"
    else:
        mode = "recompute"
    return _LinearHead.apply(x, weight, bias, u, lora_b, target, row_weight, mode, spec)


def prepare(hidden, weight, target, bias, lora, lora_input, accumulate, chunk_rows):
    """Check the tensors of a head call and flatten them: (x, weight, bias, u, B, target, compute dtype)."""
    if hidden.ndim < 1 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1] or target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)}, target {tuple(target.shape)}; expected "
            "hidden (..., H), weight (V, H), target (...). For the next-token loss: hidden[:, :-1] and labels[:, 1:]."
        )
    vocab = weight.shape[0]
    autocast = torch.is_autocast_enabled(hidden.device.type)
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(f"bias is {tuple(bias.shape)}; expected ({vocab},) for weight {tuple(weight.shape)}, or None.")
    for name, t in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if t is None:
            continue
        if t.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name} is {t.dtype}; expected bfloat16, float16 or float32. Convert it: {name}.float().")
        if t.dtype != dtype and not autocast:
            raise ValueError(
                f"hidden is {hidden.dtype}, {name} {t.dtype}; expected one dtype. Convert one of them, or call under "
                f"torch.autocast({hidden.device.type!r})."
            )
        check_device(name, t, "hidden", hidden)
    check_target("hidden", hidden, target)
    if accumulate not in ("fp32", "lean"):
        raise ValueError(f'accumulate is {accumulate!r}; expected "fp32", or "lean" (the dtype of the weight).')
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; expected 1 or more, or None to choose it by the vocabulary.")
    u, lora_b = _lora_branch(hidden, weight, lora, lora_input)
    flat = [t if t is None else t.reshape(-1, t.shape[-1]) for t in (hidden, u)]
    x, u = (t if t is None or t.stride(-1) == 1 else t.contiguous() for t in flat)
    return x, weight, bias, u, lora_b, target.reshape(-1).long().contiguous(), dtype


def _lora_branch(hidden, weight, lora, lora_input):
    """u = scaling * lora_input A^T (..., r), by plain autograd since it is small, and B."""
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
        if t.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name} is {t.dtype}; expected bfloat16, float16 or float32.")
        check_device(name, t, "hidden", hidden)
    return torch.nn.functional.linear(source.to(lora_a.dtype), lora_a) * scaling, lora_b
