"""Losses and statistics of LM head logits, computed for a few rows at a time: all logits never exist at once.

    l = x W^T + bias + u B^T      x (T, H), W (V, H), bias (V,), u (T, r) = scaling * x' A^T and B (V, r) of a LoRA
    dx = dl W,  dW = dl^T x,  dbias = sum over rows of dl,  du = dl B,  dB = dl^T u

Rows with an ignored target are dropped first. The rest is processed in chunks of C rows (`_chunks.py`). One matrix
product gives the logits of a chunk. `_row_pass.row_pass` (see there for the formulas) turns them into statistics and,
in place, into dl. Further products give the gradients. The mode says what is known about the upstream gradient of the
losses:

    "uniform"    It is one number for all rows, as for a sum or a mean. (Row weights are factors of dl.) The forward
                 pass computes the gradients, three products in all, and the backward pass multiplies them by the
                 number. The device checks that it is one number; if not, the gradients become NaN.
    "rows"       Nothing is known, but W, bias and B are frozen. The forward pass computes dx and du, and the backward
                 pass multiplies each of their rows by a number of its own. Two products.
    "recompute"  Nothing is known, and there may be one of the entropy too. The backward pass computes the logits again,
                 except for the last chunk, which is kept. Four products, or three if there is one chunk.

One chunk. If all logits take no more memory than the fp32 sum of dW (up to 2 H rows of 16 bits), they are kept in the
mode "uniform" too, and the backward pass computes the gradients: three products, and no sum.

Rounding. dW, dbias and dB are summed over the chunks in fp32 and rounded once, after the multiplication by the upstream
gradient; with `accumulate="lean"`, dW and dB are summed in their own dtype. dx and du are rounded after their product,
and in the mode "uniform" a second time if the upstream gradient is not a power of two. In the mode "recompute", and
with one chunk, the upstream gradient is a factor of dl and is rounded with it, as in PyTorch's backward pass of the
logits. In the mode "uniform" with fp16 it never is, because p_v / T would underflow.

Memory beyond inputs and gradients: C * V elements of the compute dtype (plain PyTorch takes 4 * C * V of fp32), the
fp32 sum of dW until the backward pass rounds it, and the converted weight under autocast.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from . import reference
from ._autograd import graph_is_kept, once_differentiable
from ._chunks import Chunks, HeadGradients, logits_buffer, sum_dtype
from ._dispatch import kernel_op, no_autocast, takes_twin
from ._head_inputs import (
    DB,
    DBIAS,
    DW,
    Head,
    check_heads,
    check_numbers,
    check_options,
    check_per_row,
    check_target_of_twin,
    check_target_range,
    check_weights,
    compute_dtype,
    prepare,
    spread,
)
from ._products import project
from ._row_pass import ENTROPY, IS_TOP1, LOG_SUM_SQ, LOSS, MEAN_LOGITS, N_STATS, RowSpec, row_pass
from .known_gradients import one_number, split_pow2_scale, stash_grads, take_scaled_grads, with_gradients
from .results import HeadsLoss, LogProbs

EVERY_ROW = -(2**31)  # an ignore_index that promises: all targets count, and `counted_rows` has checked them
_STATISTIC = {"entropy": ENTROPY, "log_sum_sq_probs": LOG_SUM_SQ, "mean_logits": MEAN_LOGITS, "is_top1": IS_TOP1}


class HeadSpec(NamedTuple):
    """Constants of a call.

    `needs` has a bit (`DX` to `DB`) for each gradient that is needed. `lean` is `accumulate="lean"`. `chunk_rows` 0:
    `chunk_size` chooses. `compute_dtype` is the dtype of products.
    """

    rows: RowSpec
    needs: int
    lean: bool
    chunk_rows: int
    compute_dtype: torch.dtype

    def flat(self):
        """Return the fields as arguments of an op: its schema has no tuples of mixed types."""
        return (*self.rows, self.needs, self.lean, self.chunk_rows, self.compute_dtype)


_on_host: ContextVar[torch.Tensor | None] = ContextVar("the targets of the head on the host", default=None)


@contextmanager
def targets_on_host(values: torch.Tensor | None) -> Iterator[None]:
    """Tell one call of a head its target values, so that the host does not wait for the device.

    Args:
        values (`torch.Tensor`, *optional*): The targets on the CPU, in the shape that the call gets. None: the call
            waits.
    """
    before = _on_host.set(values)
    try:
        yield
    finally:
        _on_host.reset(before)


def _kept_rows(target, ignore_index, vocab):
    """Return the indices of the rows that count, or None if all do.

    This is the only place where the host waits for the device. If it knows the targets, it does not wait here either.
    """
    if ignore_index == EVERY_ROW or (target.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None  # a CUDA graph cannot wait: row_pass gives ignored rows zeros and bad targets NaN
    known = _on_host.get()
    known = target if known is None else known.reshape(-1)
    if known.shape != target.shape:
        raise ValueError(
            f"targets_on_host has {known.numel()} targets, but the head has {target.numel()}; expected the same."
        )
    if check_target_range(known, ignore_index, vocab) == target.shape[0]:
        return None
    kept = (known != ignore_index).nonzero().squeeze(1)
    if kept.device == target.device:
        return kept
    return (kept.pin_memory() if target.is_cuda else kept).to(target.device, non_blocking=True)


def _chunks_of(head: Head, target, spec: HeadSpec, all_rows: bool) -> Chunks:
    """Cut the rows into chunks. `all_rows`: the gradients need no sum over chunks if there is only one."""
    x, weight = head.x, head.weight
    summed = spec.needs & DW and sum_dtype(weight, spec.lean) != weight.dtype
    allowed = 4 * weight.numel() if summed else 0
    all_rows = all_rows and weight.dtype != torch.float16  # a gradient in fp16 is summed in fp32 even for one chunk
    vocab = weight.shape[0]
    kept = _kept_rows(target, spec.rows.ignore_index, vocab)
    return Chunks(x.shape[0], kept, spec.chunk_rows, vocab, spec.compute_dtype, x.device.type, allowed, all_rows)


def _walk(head: Head, target, chunks: Chunks, needs, lean, spec: HeadSpec, g_loss, g_entropy, stats=None, buffer=None):
    """Return (statistics (7, T), the gradients in `needs`, logits buffer). Gradients that are not needed are None.

    Given statistics are not computed again. The walk then starts at the last chunk: its logits may still be in
    `buffer`.
    """
    x, weight, bias, u, lora_b = head
    vocab = weight.shape[0]
    dtype = spec.compute_dtype
    every_row = chunks.kept is None
    w = weight.to(dtype)
    b = None if bias is None else bias.to(dtype)
    lb = None if lora_b is None else lora_b.to(dtype)
    do_stats = stats is None
    held = buffer is not None  # the buffer holds the logits of the next chunk already
    if do_stats:  # rows that are dropped keep these zeros
        stats = torch.zeros((N_STATS, x.shape[0]), dtype=torch.float32, device=x.device)
    gradients = HeadGradients(head, needs, lean, chunks.number, fill=every_row)
    if not held:
        # With a bias, columns are padded only to 16 elements, so most vocabularies need no padding: if rows have gaps,
        # cuBLAS rounds the product before it adds the bias.
        buffer = logits_buffer(chunks.size, vocab, dtype, x, align=64 if bias is None else 16)

    # A second walk starts where the first one ended: the logits of the last chunk are still in the buffer.
    for rows in chunks.each(last_first=not do_stats):
        x_c, y_c = x[rows].to(dtype), target[rows]
        u_c = None if u is None else u[rows].to(dtype)
        logits = buffer[: y_c.shape[0], :vocab]
        if not held:
            project(x_c, w, logits, b)
            if u_c is not None:
                project(u_c, lb, logits, add=True)
        held = False  # the other chunks need their logits again
        stats_c = stats[:, rows]  # a copy, if rows were dropped
        g_loss_c = None if g_loss is None else g_loss[rows]
        g_entropy_c = None if g_entropy is None else g_entropy[rows]
        dl = logits if needs else None  # dl overwrites the logits
        row_pass(logits, dl, y_c, stats_c, g_loss_c, g_entropy_c, spec.rows, do_stats, buffer.shape[1])
        if do_stats and not every_row:
            stats[:, rows] = stats_c
        if needs:
            gradients.add(logits, rows, w, lb, x_c, u_c)
            gradients.add_bias(logits)
    return stats, gradients.all(), buffer


@kernel_op("linear_head")
def _op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    u: torch.Tensor | None,
    lora_b: torch.Tensor | None,
    target: torch.Tensor,
    stats: torch.Tensor | None,
    g_loss: torch.Tensor | None,
    g_entropy: torch.Tensor | None,
    ignore_index: int,
    scale: float,
    softcap: float,
    smoothing: float,
    z_loss: float,
    extras: int,
    needs: int,
    lean: bool,
    chunk_rows: int,
    compute_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return statistics (unless given) and gradients. An op returns only tensors, so an empty one stands for None."""
    rows = RowSpec(ignore_index, scale, softcap, smoothing, z_loss, extras)
    spec = HeadSpec(rows, needs, lean, chunk_rows, compute_dtype)
    head = Head(x, weight, bias, u, lora_b)
    with no_autocast(x.device.type):
        chunks = _chunks_of(head, target, spec, all_rows=False)
        made, grads, _ = _walk(head, target, chunks, needs, lean, spec, g_loss, g_entropy, stats)
    results = (made if stats is None else None, *grads)
    return tuple([x.new_empty(0) if t is None else t for t in results])


@_op.register_fake
def _(x, weight, bias, u, lora_b, target, stats, g_loss, g_entropy, *flat):
    needs, lean = flat[6:8]  # after the six numbers of a `RowSpec`, as in `HeadSpec.flat`
    shapes = (x.shape, weight.shape, weight.shape[:1], *((None, None) if u is None else (u.shape, lora_b.shape)))
    of_lora = (None, None) if u is None else (u.dtype, sum_dtype(lora_b, lean))
    sums = (x.dtype, sum_dtype(weight, lean), torch.float32, *of_lora)
    grads = []
    for k, (shape, dtype) in enumerate(zip(shapes, sums, strict=True)):
        needed = needs >> k & 1
        grads.append(x.new_empty(shape, dtype=dtype) if needed else x.new_empty(0))
    rows = x.new_empty((N_STATS, x.shape[0]), dtype=torch.float32) if stats is None else x.new_empty(0)
    return rows, *grads


def _where_wanted(grads, needs):
    """Return the gradients of an op, with None in place of the empty tensors of those that are not in `needs`."""
    return [g if needs >> k & 1 else None for k, g in enumerate(grads)]


class _KeptLogits(NamedTuple):
    """What forward keeps for a backward that computes the gradients: the chunks, and the last chunk's logits.

    `buffer` holds these logits. It is None in a backward that must not overwrite them.
    """

    chunks: Chunks
    buffer: torch.Tensor | None


def _statistics(head: Head, target, row_weight, mode, spec: HeadSpec, may_keep_logits):
    """Return (statistics, gradients, None), or (statistics, None, `_KeptLogits`) if backward computes the gradients."""
    with no_autocast(head.x.device.type):
        # With one chunk, the kept logits replace the fp32 sum, so they cost no memory, unless several calls keep theirs
        # at the same time.
        summed = spec.needs & DW and spec.compute_dtype != torch.float16
        all_rows = mode == "recompute" or bool(may_keep_logits and summed)
        chunks = _chunks_of(head, target, spec, all_rows)
        if mode == "recompute" or (all_rows and chunks.number <= 1):
            stats, _, buffer = _walk(head, target, chunks, 0, False, spec, None, None)
            return stats, None, _KeptLogits(chunks, buffer)
        stats, grads, _ = _walk(head, target, chunks, spec.needs, spec.lean, spec, row_weight, None)
        return stats, list(grads), None


def _gradients(head: Head, target, kept_logits: _KeptLogits | None, stats, g_loss, g_entropy, spec: HeadSpec):
    """Return the gradients in `spec.needs`, from `kept_logits` and from recomputed logits of the other chunks."""
    with no_autocast(head.x.device.type):
        chunks, buffer = kept_logits or (_chunks_of(head, target, spec, True), None)
        lean = spec.lean or chunks.number <= 1  # one chunk needs no sum, and dl includes the upstream gradient
        return _walk(head, target, chunks, spec.needs, lean, spec, g_loss, g_entropy, stats, buffer)[1]


class _LinearHead(torch.autograd.Function):
    """Return (loss * row_weight, entropy or None, statistics) of T rows. The module docstring explains `mode`."""

    @staticmethod
    def forward(ctx, x, weight, bias, u, lora_b, target, row_weight, mode, spec, may_keep_logits):
        ctx.set_materialize_grads(False)
        head = Head(x, weight, bias, u, lora_b)
        traced = torch.compiler.is_compiling()
        ctx.mode = mode
        ctx.spec = spec
        ctx.kept_logits = None
        dtypes = [None if t is None else t.dtype for t in head]
        # Gradients are computed with the row weights `factor`, and multiplied by `later` in backward (for fp16).
        factor = row_weight
        later = None
        if mode != "recompute":
            factor, later = split_pow2_scale(row_weight, spec.rows.scale, spec.compute_dtype, target)
        if traced:
            now = spec._replace(needs=0) if mode == "recompute" else spec
            stats, *grads = _op(*head, target, None, factor, None, *now.flat())
            grads = None if mode == "recompute" else _where_wanted(grads, spec.needs)
        else:
            stats, grads, ctx.kept_logits = _statistics(head, target, factor, mode, spec, may_keep_logits)
        ctx.early = grads is not None  # forward has computed the gradients, and backward only scales them
        if ctx.early:
            stash_grads(ctx, grads, dtypes, target, later)
        else:
            ctx.save_for_backward(*head, target, row_weight, stats)
            ctx.dtypes = dtypes
        loss = stats[LOSS].clone() if row_weight is None else stats[LOSS] * row_weight
        asked = spec.rows.extras >> ENTROPY & 1 or traced
        entropy = stats[ENTROPY].clone() if asked else None
        ctx.mark_non_differentiable(stats)
        return loss, entropy, stats

    @staticmethod
    @once_differentiable
    def backward(ctx, g_loss, g_entropy, _):
        spec, traced = ctx.spec, torch.compiler.is_compiling()
        if not spec.rows.extras >> ENTROPY & 1:
            g_entropy = None  # not requested, but a traced call gets a gradient of zeros for it
        if ctx.mode != "recompute":
            if g_entropy is not None and not traced:
                raise RuntimeError(
                    "The entropy received a gradient, but uniform_grad=True computed only the gradient of log_probs. "
                    "Call linear_logprobs with uniform_grad=False, or detach the entropy."
                )
            if g_loss is None:
                return (None,) * 10  # one for each argument of forward: five tensors of the head, and five others
        saved = ctx.saved_tensors  # PyTorch raises if an earlier backward did not keep the graph
        if ctx.early:
            target, later = saved[:2]
            g, counted = g_loss.float(), target != spec.rows.ignore_index
            factor = one_number(g, counted) if ctx.mode == "uniform" else torch.where(counted, g, 0.0)
            if g_entropy is not None:  # traced: a value other than 0 gives NaN, like any broken promise
                factor = torch.where((g_entropy == 0).all(), factor, torch.nan)
            return *take_scaled_grads(ctx, saved, factor if later is None else factor * later), *(None,) * 5
        *tensors, target, row_weight, stats = saved
        head, kept_logits = Head(*tensors), ctx.kept_logits
        if kept_logits is not None and graph_is_kept():
            kept_logits = kept_logits._replace(buffer=None)  # only the last backward pass may write over the logits
        else:
            ctx.kept_logits = None
        g = torch.zeros_like(stats[LOSS]) if g_loss is None else g_loss.float()
        if ctx.mode == "uniform" and g.stride(0) != 0:  # with stride 0, it is one number expanded
            g = one_number(g, target != spec.rows.ignore_index).expand(g.shape)
        g = (g if row_weight is None else g * row_weight).contiguous()
        g_entropy = None if g_entropy is None else g_entropy.float().contiguous()
        if traced:
            _, *grads = _op(*head, target, stats, g, g_entropy, *spec.flat())
        else:
            grads = _gradients(head, target, kept_logits, stats, g, g_entropy, spec)
        del kept_logits  # free the logits before an fp32 sum is rounded
        grads = _where_wanted(grads, spec.needs)
        return *[None if g is None else g.to(d) for g, d in zip(grads, ctx.dtypes, strict=True)], *(None,) * 5


def run_head(
    head: Head, target, dtype, row_weight, rows: RowSpec, known_upstream, accumulate, chunk_rows, may_keep_logits=True
):
    """Return (loss, entropy, stats), each for T rows, in the mode that fits.

    `head`, `target` and `dtype` come from `prepare`. `known_upstream` promises that the upstream gradient of the loss
    is one number for all rows. `may_keep_logits` lets the call hold a chunk of logits until its backward pass; it is
    False if several calls wait for one backward pass.
    """
    needs = head.needs()
    spec = HeadSpec(rows, needs, accumulate == "lean", chunk_rows or 0, dtype)
    if row_weight is not None:
        row_weight = row_weight.contiguous()  # the kernel indexes rows of a contiguous tensor
    if not needs:
        stats = _op(*head, target, None, None, None, *spec.flat())[0]
        loss = stats[LOSS] if row_weight is None else stats[LOSS] * row_weight
        return loss, stats[ENTROPY], stats
    if known_upstream:
        mode = "uniform"
    elif not needs & (DW | DBIAS | DB) and not rows.extras >> ENTROPY & 1:
        mode = "rows"
    else:
        mode = "recompute"
    return _LinearHead.apply(*head, target, row_weight, mode, spec, may_keep_logits)


def linear_cross_entropy(
    hidden: torch.Tensor,  # (..., H)
    weight: torch.Tensor,  # (V, H)
    target: torch.Tensor,  # (...)
    bias: torch.Tensor | None = None,  # (V,)
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    token_weights: torch.Tensor | None = None,  # (...)
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,  # A (r, H), B (V, r), scaling
    lora_input: torch.Tensor | None = None,  # (..., H)
    accumulate: str = "fp32",
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """Compute F.cross_entropy(z.float(), target, ...) with z = softcap * tanh(logit_scale * l / softcap), in nats and
    fp32, and l = F.linear(hidden, weight, bias) + scaling * lora_input @ A.T @ B.T. The logits of all rows never exist.

    For `"mean"` and `"sum"`, the gradients are computed with the loss. Any upstream gradient is honoured. A frozen
    weight costs neither a product nor memory. Inside torch.autocast everything is cast as in F.linear, and the gradient
    of an fp32 weight stays in fp32.

    Args:
        hidden (`torch.Tensor`): (..., H); bf16, fp16 or fp32 (float64: the PyTorch twin, with all logits). A slice such
            as `hidden[:, :-1]` is copied; to avoid that, pass all of it and set the last target to `ignore_index`.
        weight (`torch.Tensor`): (V, H), dtype and device of `hidden` (the dtype may differ under autocast).
        target (`torch.Tensor`): Class ids (...), integers in [0, V) or `ignore_index`.
        bias (`torch.Tensor`, *optional*): (V,).
        ignore_index (`int`, *optional*, defaults to -100): Rows with this target are dropped before the product.
        reduction (`str`, *optional*, defaults to `"mean"`): `"mean"` over the rows not ignored, `"sum"` or `"none"`.
        label_smoothing (`float`, *optional*, defaults to 0.0): As in F.cross_entropy, in [0, 1].
        softcap (`float`, *optional*): Unset: z = logit_scale * l.
        logit_scale (`float`, *optional*, defaults to 1.0): Multiplies the logits.
        z_loss (`float`, *optional*, defaults to 0.0): Adds z_loss * logsumexp(z)**2 to each row.
        token_weights (`torch.Tensor`, *optional*): fp32, of the shape of `target`, without gradient; the factor of each
            row. `"mean"` then divides by the sum of the weights of the rows that are not ignored, as F.cross_entropy
            does with class weights.
        lora (`tuple`, *optional*): (A, B, scaling) of a LoRA on the head. A and B may have another dtype than `hidden`.
        lora_input (`torch.Tensor`, *optional*): Input of the LoRA, if dropout made it differ from `hidden`.
        accumulate (`str`, *optional*, defaults to `"fp32"`): Where the weight's gradient is summed over the chunks.
            `"lean"` sums it in its own dtype, which for bf16 halves its memory and rounds once per chunk instead of
            once.
        chunk_rows (`int`, *optional*): Rows of logits alive at once. Unset: all rows, if their logits take no more
            memory than the fp32 sum of the weight's gradient (one chunk needs no sum). Otherwise at most 4096 rows,
            with logits no larger than that sum, or 640 MiB if that is more. On a CPU: 64 MiB.

    Returns:
        `torch.Tensor`, fp32 (float64 for float64): () or, for `"none"`, the shape of `target`. Nothing to average
        over (all rows ignored, or weights that sum to 0): 0 with zero gradients, where PyTorch's mean is NaN.

    Raises:
        ValueError: Shapes, dtypes or devices disagree, or an option is out of its range.
        IndexError: A target is outside [0, V). (While a CUDA graph is captured, loss and gradient of the row become NaN
            instead.)
    """
    head, y, dtype = prepare(hidden, weight, target, bias, lora, lora_input, accumulate, chunk_rows)
    check_numbers(reduction, label_smoothing, softcap, logit_scale, z_loss)
    row_weight = None
    if token_weights is not None:
        check_weights("token_weights", token_weights, (target.shape,), hidden)
    if takes_twin(*head, target, token_weights):
        check_target_of_twin(y, ignore_index, weight.shape[0], hidden)
        return reference.linear_cross_entropy(
            hidden,
            weight,
            target.long(),
            bias,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            softcap=softcap,
            logit_scale=logit_scale,
            z_loss=z_loss,
            token_weights=token_weights,
            lora=lora,
            lora_input=lora_input,
        )
    if token_weights is not None:
        row_weight = torch.where(y != ignore_index, token_weights.reshape(-1), 0.0)
    divisor = None  # launched before the head, because the head waits for the device
    if reduction == "mean" and row_weight is None:
        divisor = (y != ignore_index).sum().clamp(min=1)
    elif reduction == "mean":
        divisor = row_weight.sum()
        divisor = torch.where(divisor == 0, torch.inf, divisor)
    rows = RowSpec(ignore_index, float(logit_scale), float(softcap or 0.0), float(label_smoothing), float(z_loss))
    loss, _, _ = run_head(head, y, dtype, row_weight, rows, reduction != "none", accumulate, chunk_rows)
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() if divisor is None else loss.sum() / divisor


def linear_logprobs(
    hidden: torch.Tensor,  # (..., H)
    weight: torch.Tensor,  # (V, H)
    target: torch.Tensor,  # (...)
    bias: torch.Tensor | None = None,  # (V,)
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    lora: tuple[torch.Tensor, torch.Tensor, float] | None = None,  # A (r, H), B (V, r), scaling
    lora_input: torch.Tensor | None = None,  # (..., H)
    outputs: tuple[str, ...] = ("log_probs",),
    uniform_grad: bool = False,
    accumulate: str = "fp32",
    chunk_rows: int | None = None,
) -> LogProbs:
    """Compute log_softmax(z)[target] with z = softcap * tanh(logit_scale * l / softcap) / temperature and the logits l
    of `linear_cross_entropy`, and further per-token quantities of p = softmax(z). The logits of all rows never exist.

    Any upstream gradient is honoured. So backward recomputes the logits (four products in all), except for the last or
    only chunk, which is kept (three products). With a frozen weight and no entropy, it only scales what forward
    computed (two products). `uniform_grad=True` saves the fourth product of every chunk.

    Args:
        hidden, weight, target, bias, softcap, logit_scale, ignore_index, lora, lora_input, accumulate, chunk_rows:
            As in `linear_cross_entropy`.
        temperature (`float`, *optional*, defaults to 1.0): Divides the logits, after the softcap.
        label_smoothing (`float`, *optional*, defaults to 0.0): With e, `log_probs` is
            (1 - e) * log p_target + e * mean_v log p_v: minus the row's term of a label-smoothed loss.
        outputs (`tuple`, *optional*, defaults to `("log_probs",)`): Fields to return. `entropy` is
            -sum_v p_v log p_v, `log_sum_sq_probs` is log(sum_v p_v**2), `mean_logits` is mean_v z_v, and `is_top1` says
            whether the target has the first largest logit. Only `log_probs` and `entropy` are differentiable.
        uniform_grad (`bool`, *optional*, defaults to `False`): Promise that all rows that are not ignored get the same
            upstream gradient, as from a sum or mean of `log_probs`. If the promise is broken, every gradient is NaN; a
            gradient for the entropy raises a RuntimeError.

    Returns:
        `LogProbs`.

    Raises:
        ValueError: Shapes, dtypes or devices disagree, or an option is out of its range or unknown.
        IndexError: A target is outside [0, V). (While a CUDA graph is captured, the values of the row become NaN
            instead.)
    """
    head, y, dtype = prepare(hidden, weight, target, bias, lora, lora_input, accumulate, chunk_rows)
    check_numbers("none", label_smoothing, softcap, logit_scale, 0.0)
    if not temperature > 0.0:
        raise ValueError(f"temperature is {temperature}; expected a positive number.")
    if isinstance(outputs, str):
        raise ValueError(f"outputs is the string {outputs!r}; expected a tuple of names: ({outputs!r},).")
    extras = 0
    for name in outputs:
        if name not in LogProbs._fields:
            raise ValueError(f"outputs has {name!r}; expected names out of {', '.join(LogProbs._fields)}.")
        if name != "log_probs":
            extras |= 1 << _STATISTIC[name]
    if takes_twin(*head, target):
        check_target_of_twin(y, ignore_index, weight.shape[0], hidden)
        return reference.linear_logprobs(
            hidden,
            weight,
            target.long(),
            bias,
            temperature=temperature,
            softcap=softcap,
            logit_scale=logit_scale,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            lora=lora,
            lora_input=lora_input,
            outputs=outputs,
        )
    rows = RowSpec(
        ignore_index, logit_scale / temperature, (softcap or 0.0) / temperature, float(label_smoothing), 0.0, extras
    )
    loss, entropy, stats = run_head(head, y, dtype, None, rows, uniform_grad, accumulate, chunk_rows)
    # A result with a gradient must not be a view. FSDP2 attaches its gather to what a module returns, and a write into
    # a view would drop it.
    fields = {}
    for name in outputs:
        if name == "log_probs":
            fields[name] = -loss.view(target.shape)
        elif name == "entropy":
            fields[name] = entropy.view(target.shape).clone()
        elif name == "is_top1":
            fields[name] = stats[IS_TOP1].view(target.shape) > 0
        else:
            fields[name] = stats[_STATISTIC[name]].view(target.shape)
    return LogProbs(**fields)


def _head(x, weight, target, share, rows, accumulate, chunk_rows, may_keep_logits=False):
    """Return (loss (), statistics) of the rows of x with one weight. `may_keep_logits` promises that no other head
    waits for its backward pass meanwhile."""
    prepared = prepare(x, weight, target, None, None, None, accumulate, chunk_rows)
    loss, _, stats = run_head(*prepared, share, rows, True, accumulate, chunk_rows, may_keep_logits)
    return loss.sum(), stats


def _head_and_gradients(x, weight, *options):
    """Run `_head` and its backward at once, which frees its logits, or the fp32 sum of the weight's gradient.

    The loss that is returned has these gradients: its backward pass only scales them.
    """
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in (x, weight)]
    loss, stats = _head(*leaves, *options, may_keep_logits=True)
    grads = torch.autograd.grad(loss, [t for t in leaves if t.requires_grad])
    return with_gradients(loss.detach(), [t for t in (x, weight) if t.requires_grad], grads), stats


def counted_rows(target: torch.Tensor, vocab: int, ignore_index: int = -100) -> list[torch.Tensor]:
    """Return, for each head, the rows t (int64) with a target that counts.

    Given only these rows and `ignore_index=EVERY_ROW`, `linear_heads_cross_entropy` does not wait for the device. So
    the host waits once for all heads instead of twice for each, and runs ahead of the device from the first head on.

    Args:
        target (`torch.Tensor`): Class ids (K, T), integers in [0, V) or `ignore_index`.
        vocab (`int`): V.

    Raises:
        IndexError: A target is outside [0, V).
    """
    check_target_range(target, ignore_index, vocab)
    counted = target != ignore_index
    return list(counted.nonzero()[:, 1].split(counted.sum(1).tolist()))


def linear_heads_cross_entropy(
    hidden: torch.Tensor | Sequence[torch.Tensor],  # (K, T, H), or K of (T, H)
    weight: torch.Tensor | Sequence[torch.Tensor],  # (V, H), or K of (V, H)
    target: torch.Tensor,  # (K, T)
    *,
    row_weight: torch.Tensor | None = None,  # (K,) or (K, T)
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    accumulate: str = "fp32",
    chunk_rows: int | None = None,
) -> HeadsLoss:
    """Sum row_weight[k, t] * F.cross_entropy(z[k, t], target[k, t]) over heads k and rows t, in nats and fp32, with
    z[k] = softcap * tanh(logit_scale * l / softcap) and l = hidden[k] @ weight[k].T. Only one chunk of logits exists at
    a time, for any K.

    The gradients are computed with the loss. Any upstream gradient is honoured. A frozen weight costs neither a product
    nor memory. Tied heads are one call on K * T rows. Inside torch.autocast everything is cast as in F.linear.

    Rounding. The gradient of a tied weight is summed in fp32 over all heads and chunks and rounded once, after the
    multiplication by the upstream gradient. The gradients of untied bf16 weights are summed in fp32 too, but each is
    rounded as soon as its head is done: K sums of V * H * 4 bytes never exist together. An upstream gradient that is
    not a power of two then rounds it again (two roundings of at most 2**-9 each; bf16 needs at least one). fp16 weights
    keep their fp32 sums until backward, because a sum before the upstream gradient may overflow. So do bf16 weights
    under torch.compile.

    Args:
        hidden (`torch.Tensor` or `list`): Rows of each head, (K, T, H) or K tensors (T, H); bf16, fp16 or fp32
            (float64: the PyTorch twin, with all logits). A list is copied into one tensor for a tied weight; for untied
            ones nothing is copied.
        weight (`torch.Tensor` or `list`): (V, H), tied, or K tensors (V, H), untied; dtype and device of `hidden` (the
            dtype may differ under autocast).
        target (`torch.Tensor`): Class ids (K, T), integers in [0, V) or `ignore_index`. The caller shifts them for each
            head: Medusa's head k, counted from 1, predicts the token k + 1 places ahead.
        row_weight (`torch.Tensor`, *optional*): fp32, (K,) or (K, T), without gradient; the factor of each row's loss.
            Unset: 1. Nothing is divided by a number of rows.
        ignore_index (`int`, *optional*, defaults to -100): Rows with this target are dropped before the product.
            `EVERY_ROW` promises that no row is ignored and no target is outside [0, V).
        softcap (`float`, *optional*): Unset: z = logit_scale * l.
        logit_scale (`float`, *optional*, defaults to 1.0): Multiplies the logits.
        accumulate (`str`, *optional*, defaults to `"fp32"`): Where the weight's gradient is summed over the chunks.
            `"lean"` sums it in its own dtype, which for bf16 halves that memory and rounds once per chunk.
        chunk_rows (`int`, *optional*): Rows of logits alive at once. Unset: as in `linear_cross_entropy`.

    Returns:
        `HeadsLoss`. All rows ignored: 0 with zero gradients.

    Raises:
        ValueError: Shapes, dtypes or devices disagree, or an option is out of its range.
        IndexError: A target is outside [0, V). (While a CUDA graph is captured, loss and gradient of the row become NaN
            instead.)
    """
    heads, rows, tied = check_heads(hidden, weight)
    check_per_row("target", target, heads, rows, hidden[0])
    check_options("hidden", hidden[0], target, "sum", 0.0, softcap, logit_scale, 0.0)
    counted = target != ignore_index
    share = spread(row_weight, counted, hidden[0])
    weights = [weight] if tied else weight
    if takes_twin(*hidden, *weights, target, share):
        compute_dtype(hidden[0], *(("weight", w) for w in weights))
        check_target_of_twin(target, ignore_index, weights[0].shape[0], hidden[0])
        return reference.linear_heads_cross_entropy(
            hidden,
            weight,
            target.long(),
            row_weight=share,
            ignore_index=ignore_index,
            softcap=softcap,
            logit_scale=logit_scale,
        )
    spec = RowSpec(ignore_index, float(logit_scale), float(softcap or 0.0), extras=1 << IS_TOP1)
    if tied:
        x = hidden if isinstance(hidden, torch.Tensor) else torch.stack(tuple(hidden))
        flat = None if share is None else share.view(-1)
        loss, stats = _head(x, weight, target, flat, spec, accumulate, chunk_rows, may_keep_logits=True)
        stats = stats.view(N_STATS, heads, rows)
    else:
        # Under "Rounding" in the docstring: only the gradients of bf16 weights are rounded head by head.
        early = accumulate == "fp32" and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        per_head = []
        for k, w in enumerate(weight):
            run = _head_and_gradients if early and w.requires_grad and w.dtype == torch.bfloat16 else _head
            own = None if share is None else share[k]
            per_head.append(run(hidden[k], w, target[k], own, spec, accumulate, chunk_rows))
        losses, all_stats = zip(*per_head, strict=True)
        loss = torch.stack(losses).sum()
        stats = torch.stack(all_stats, 1)
    return HeadsLoss(loss, stats[LOSS].sum(1), (stats[IS_TOP1] > 0).sum(1), counted.sum(1))
