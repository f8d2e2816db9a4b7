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
    "recompute"  any upstream, entropy included: the backward pass computes the logits again, but for those of the last
                 chunk, which are kept. Four products, three where one chunk is all.

One chunk. Where the logits of all rows fit one chunk, they are kept in the mode "uniform" too and the gradients are
computed in the backward pass: three products, and nothing to accumulate. They fit where they take no more memory than
the fp32 sum of dW that they make superfluous: up to 2 H rows of 16 bits.

Rounding. dW, dbias and dB are accumulated over the chunks in fp32 and rounded once, after the multiplication by the
upstream gradient; `accumulate="lean"` accumulates dW and dB in their own dtype and saves the fp32 buffers. dx and du
are rounded after their product, and in the mode "uniform" once more by an upstream gradient that is not a power of two.
In one chunk, and in the mode "recompute", the upstream gradient is a factor of dl and rounded with it, as in PyTorch's
own backward pass of the logits; with fp16 in the mode "uniform" it never is, so as not to lose p_v / T to underflow.

Memory beyond inputs and gradients: C * V elements of the compute dtype (plain PyTorch: 4 * C * V of fp32), the fp32
copy of dW until the backward pass rounds it, and the converted weight under autocast.
"""

from typing import NamedTuple

import torch

from ._dispatch import _device_guard, graph_is_kept, kernel_op, once_differentiable, takes_twin, use_triton
from ._head_checks import FLOAT_DTYPES, check_device, check_target, check_target_range, compute_dtype
from ._products import add_outer, back, project
from ._row_pass import ENTROPY, LOSS, N_STATS, RowSpec, row_pass
from ._scale import scaled

# Bits of `needs`: which gradients are wanted.
DX, DW, DBIAS, DU, DB = (1 << k for k in range(5))

# Past 4096 rows the products hardly get faster. 640 MiB hold 2048 rows of the vocabularies of 150 thousand.
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


def chunk_size(
    rows: int, vocab: int, dtype: torch.dtype, device_type: str, allowed: int = 0, all_rows: bool = False
) -> int:
    """Rows per chunk: bounded memory, on GPUs all rows or a power of two (below 1024 a multiple of 128).

    A power of two, since of dx, (rows, H), the tiles of 128 x 128 elements then fill the multiprocessors in whole
    rounds more often: with H = 1024 and 132 of them 2048 rows are one round and 2176 are two.

    `allowed`: bytes that a chunk may have where they are more than `_GPU_CHUNK_BYTES`; `all_rows`: so may a chunk of
    all rows.
    """
    if device_type == "cpu":
        most = max(1, _CPU_CHUNK_BYTES // (4 * vocab))
        return max(1, -(-rows // max(1, -(-rows // most))))
    allowed, row_bytes = max(_GPU_CHUNK_BYTES, allowed), vocab * dtype.itemsize
    if rows * row_bytes <= (allowed if all_rows else _GPU_CHUNK_BYTES):
        return max(1, rows)
    fitting = allowed // row_bytes
    if fitting < 1024:
        return max(128, fitting // 128 * 128)
    return min(_GPU_CHUNK_ROWS, 1 << fitting.bit_length() - 1)


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


class Head(NamedTuple):
    """One head flattened to rows: x (T, H), weight (V, H), bias (V,), u (T, r), lora_b (V, r)."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    u: torch.Tensor | None
    lora_b: torch.Tensor | None


class _Chunks(NamedTuple):
    """`target` (T,), the indices `kept` of the rows that count (None if all do), how many `rows` these are, and the
    `size` of a chunk."""

    target: torch.Tensor
    kept: torch.Tensor | None
    rows: int
    size: int

    @property
    def number(self) -> int:
        return -(-self.rows // self.size)


def _chunks_of(head: Head, target, spec: HeadSpec, all_rows: bool) -> _Chunks:
    """`all_rows`: one chunk would need no sum over chunks."""
    weight, vocab = head.weight, head.weight.shape[0]
    kept = _kept_rows(target, spec.rows.ignore_index, vocab)
    rows = head.x.shape[0] if kept is None else kept.shape[0]
    size = spec.chunk_rows
    if not size:
        summed = spec.needs & DW and _sum_dtype(weight, spec.lean) != weight.dtype
        of_sum = 4 * weight.numel() if summed else 0
        all_rows = all_rows and weight.dtype != torch.float16  # whose gradient is summed in fp32 all the same
        size = chunk_size(rows, vocab, spec.compute_dtype, head.x.device.type, of_sum, all_rows)
    return _Chunks(target, kept, rows, min(size, max(rows, 1)))


def _walk(head: Head, chunks: _Chunks, needs, lean, spec: HeadSpec, g_loss, g_entropy, stats=None, buffer=None):
    """(statistics (7, T), gradients in `needs`, buffer of the logits); a gradient that is not wanted is None.

    Statistics that are given are not computed again. The walk then begins at the last chunk, whose logits may still be
    in `buffer`.
    """
    x, weight, bias, u, lora_b = head
    total, vocab, dtype = x.shape[0], weight.shape[0], spec.compute_dtype
    target, kept, rows, size = chunks
    w = weight.to(dtype)
    b = None if bias is None else bias.to(dtype)
    lb = None if lora_b is None else lora_b.to(dtype)
    do_stats, held = stats is None, buffer is not None
    if do_stats:
        stats = torch.zeros((N_STATS, total), dtype=torch.float32, device=x.device)
    # Dropped rows keep the zeros; without dropping every row is written.
    new = torch.empty_like if kept is None else torch.zeros_like
    dx = new(x, memory_format=torch.contiguous_format) if needs & DX else None
    du = new(u, memory_format=torch.contiguous_format) if needs & DU else None
    dw = _Accumulator(weight, lean, chunks.number) if needs & DW else None
    dlb = _Accumulator(lora_b, lean, chunks.number) if needs & DB else None
    dbias = torch.zeros(vocab, dtype=torch.float32, device=x.device) if needs & DBIAS else None
    # Columns padded to 64 elements: rows start at a cache line and load in full width, whatever the vocabulary. With a
    # bias to 16, mostly none: into rows that lie apart, cuBLAS rounds the product before it adds the bias.
    align = 1 if not use_triton(x) else 64 if bias is None else 16
    width = -(-vocab // align) * align
    if not held:
        buffer = torch.empty((size, width), dtype=dtype, device=x.device)

    starts = range(0, rows, size)
    for start in starts if do_stats else reversed(starts):
        part = slice(start, min(start + size, rows))
        where = part if kept is None else kept[part]
        x_c, y_c = x[where].to(dtype), target[where]
        u_c = None if u is None else u[where].to(dtype)
        logits = buffer[: y_c.shape[0], :vocab]
        if not held:
            project(x_c, w, logits, b)
            if u_c is not None:
                project(u_c, lb, logits, add=True)
        held = False
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
    return stats, (dx, None if dw is None else dw.sum, dbias, du, None if dlb is None else dlb.sum), buffer


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
    head = Head(x, weight, bias, u, lora_b)
    with torch.autocast(x.device.type, enabled=False):
        chunks = _chunks_of(head, target, spec, all_rows=False)
        stats, grads, _ = _walk(head, chunks, needs, lean, spec, row_weight, None)
    return stats, *_filled(x, grads)


@kernel_op("linear_head_backward")
def _backward_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, u: torch.Tensor | None,
    lora_b: torch.Tensor | None, target: torch.Tensor, stats: torch.Tensor, g_loss: torch.Tensor,
    g_entropy: torch.Tensor | None, ignore_index: int, scale: float, softcap: float, smoothing: float, z_loss: float,
    extras: int, needs: int, lean: bool, chunk_rows: int, compute_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    spec = _unflat((ignore_index, scale, softcap, smoothing, z_loss, extras, needs, lean, chunk_rows, compute_dtype))
    head = Head(x, weight, bias, u, lora_b)
    with torch.autocast(x.device.type, enabled=False):
        _, grads, _ = _walk(
            head, _chunks_of(head, target, spec, all_rows=False), needs, lean, spec, g_loss, g_entropy, stats
        )
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


class _KeptLogits(NamedTuple):
    """What the forward pass leaves to a backward pass that computes the gradients: the logits of the last chunk, or
    None where that backward pass may not write over them."""

    chunks: _Chunks
    buffer: torch.Tensor | None


def _statistics(head: Head, target, row_weight, mode, spec: HeadSpec, may_keep_logits):
    """(statistics, gradients or None, `_KeptLogits` or None)."""
    with _device_guard(head.x), torch.autocast(head.x.device.type, enabled=False):
        # A held chunk of logits is paid for by the sum that one chunk does without, in calls that are not one of many.
        summed = spec.needs & DW and spec.compute_dtype != torch.float16
        all_rows = mode == "recompute" or bool(may_keep_logits and summed)
        chunks = _chunks_of(head, target, spec, all_rows)
        if mode == "recompute" or (all_rows and chunks.number <= 1):
            stats, _, buffer = _walk(head, chunks, 0, False, spec, None, None)
            return stats, None, _KeptLogits(chunks, buffer)
        stats, grads, _ = _walk(head, chunks, spec.needs, spec.lean, spec, row_weight, None)
        return stats, list(grads), None


def _gradients(head: Head, target, kept_logits: _KeptLogits | None, stats, g_loss, g_entropy, spec: HeadSpec):
    """Gradients in `spec.needs`, from `kept_logits` and, for the other chunks, from logits that are computed again."""
    with _device_guard(head.x), torch.autocast(head.x.device.type, enabled=False):
        chunks, buffer = kept_logits or (_chunks_of(head, target, spec, True), None)
        lean = spec.lean or chunks.number <= 1  # nothing to sum up, and the upstream gradient is in dl already
        return _walk(head, chunks, spec.needs, lean, spec, g_loss, g_entropy, stats, buffer)[1]


class _LinearHead(torch.autograd.Function):
    """(loss * row_weight, entropy or None, stats), each of T rows; the modes are those of the module docstring."""

    @staticmethod
    def forward(ctx, x, weight, bias, u, lora_b, target, row_weight, mode, spec, may_keep_logits):
        ctx.set_materialize_grads(False)
        head = Head(x, weight, bias, u, lora_b)
        ctx.mode, ctx.spec, ctx.dtypes = mode, spec, [None if t is None else t.dtype for t in head]
        ctx.grads = ctx.kept_logits = None
        if torch.compiler.is_compiling():
            ctx.early = mode != "recompute"
            now = spec if ctx.early else spec._replace(needs=0)
            stats, *grads = _forward_op(x, weight, bias, u, lora_b, target, row_weight, *now.flat())
        else:
            stats, grads, ctx.kept_logits = _statistics(head, target, row_weight, mode, spec, may_keep_logits)
            ctx.early = grads is not None
        if not ctx.early:
            ctx.save_for_backward(*head, target, row_weight, stats)
        elif torch.compiler.is_compiling():
            ctx.save_for_backward(target, *grads)
        else:  # not saved, like `kept_logits`: the last backward gives them away or writes over them, as an owner may
            ctx.save_for_backward(target)
            ctx.grads = grads
        loss = stats[LOSS].clone() if row_weight is None else stats[LOSS] * row_weight
        asked = spec.rows.extras >> ENTROPY & 1 or torch.compiler.is_compiling()
        entropy = stats[ENTROPY].clone() if asked else None
        ctx.mark_non_differentiable(stats)
        return loss, entropy, stats

    @staticmethod
    @once_differentiable
    def backward(ctx, g_loss, g_entropy, _):
        spec, traced = ctx.spec, torch.compiler.is_compiling()
        wanted = [spec.needs >> k & 1 for k in range(5)]
        if not spec.rows.extras >> ENTROPY & 1:
            g_entropy = None  # not asked for; traced, a gradient of zeros arrives all the same
        if ctx.mode != "recompute":
            if g_entropy is not None and not traced:
                raise RuntimeError(
                    "The entropy received a gradient, but uniform_grad=True computed only the gradient of log_probs. "
                    "Call linear_logprobs with uniform_grad=False, or detach the entropy."
                )
            if g_loss is None:
                return (None,) * 10
        saved = ctx.saved_tensors  # an error of PyTorch if an earlier backward did not keep the graph
        keep = not traced and graph_is_kept()
        if not ctx.early:
            *tensors, target, row_weight, stats = saved
            head, kept_logits = Head(*tensors), ctx.kept_logits
            if keep and kept_logits is not None:
                kept_logits = kept_logits._replace(buffer=None)  # written over; the last backward may
            else:
                ctx.kept_logits = None
            g = torch.zeros_like(stats[LOSS]) if g_loss is None else g_loss.float()
            if ctx.mode == "uniform" and g.stride(0) != 0:  # else it is one number expanded
                g = _one_number(g, target != spec.rows.ignore_index).expand(g.shape)
            g = (g if row_weight is None else g * row_weight).contiguous()
            g_entropy = None if g_entropy is None else g_entropy.float().contiguous()
            if traced:
                grads = _backward_op(*head, target, stats, g, g_entropy, *spec.flat())
            else:
                grads = _gradients(head, target, kept_logits, stats, g, g_entropy, spec)
            del kept_logits  # its logits, before an fp32 sum is rounded
            out = [g.to(d) if want else None for g, d, want in zip(grads, ctx.dtypes, wanted, strict=True)]
            return *out, *(None,) * 5
        target, *grads = saved
        if not traced:
            grads = list(ctx.grads)
            if not keep:
                ctx.grads = None
        g, counted = g_loss.float(), target != spec.rows.ignore_index
        factor = _one_number(g, counted) if ctx.mode == "uniform" else torch.where(counted, g, 0.0)
        if g_entropy is not None:  # traced: the value decides, as for a broken promise
            factor = torch.where((g_entropy == 0).all(), factor, torch.nan)
        if traced:
            out = [scaled(g, factor, d) if want else None for g, d, want in zip(grads, ctx.dtypes, wanted, strict=True)]
            return *out, *(None,) * 5
        out = []
        for k in range(5):
            out.append(scaled(grads[k], factor, ctx.dtypes[k], keep) if wanted[k] else None)
            grads[k] = None  # an fp32 sum is freed before the next is rounded
        return *out, *(None,) * 5


def run_head(prepared, row_weight, rows: RowSpec, known_upstream, accumulate, chunk_rows, may_keep_logits=True):
    """(loss, entropy, stats), each of T rows, in the mode that fits.

    `prepared` is what `prepare` returned. `known_upstream` promises that the upstream gradient of the loss is one
    number for all rows. `may_keep_logits` allows the call to hold a chunk of logits until its backward pass; it is
    False for calls of which several wait for one backward pass.
    """
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
    return _LinearHead.apply(x, weight, bias, u, lora_b, target, row_weight, mode, spec, may_keep_logits)


def prepare(hidden, weight, target, bias, lora, lora_input, accumulate, chunk_rows):
    """Check the tensors of a head call and flatten them: (x, weight, bias, u, B, target, compute dtype)."""
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
        if t.dtype not in FLOAT_DTYPES or (takes_twin(t) and not takes_twin(hidden)):
            also = " or float64" if takes_twin(hidden) else ""
            raise ValueError(f"{name} is {t.dtype}, hidden {hidden.dtype}; expected bfloat16, float16, float32{also}.")
        check_device(name, t, "hidden", hidden)
    return torch.nn.functional.linear(source.to(lora_a.dtype), lora_a) * scaling, lora_b
