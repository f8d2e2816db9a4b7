"""Cross-entropy of given logits. `_row_pass.py` has the formulas and their exactness.

Shapes  logits (T, V), target (T,) int64; loss () or (T,) fp32.
Dtypes  bf16, fp16, fp32. Arithmetic in fp32; the gradient is rounded once, to the dtype of the logits.
Bytes   b per element. Forward reads TVb. Backward reads TVb and writes the gradient, TVb. Kept for backward: the logits
        themselves, and 28 bytes a row.
        With `inplace`, the forward pass writes the gradient over the logits. It reads TVb (twice, the second time from
        L2, if a row fits) and writes TVb. The backward pass moves nothing if the upstream gradient is 1, and 2TVb
        otherwise. No second (T, V) tensor ever exists.
"""

import torch

from . import reference
from ._autograd import is_of_leaf, once_differentiable, records_graph
from ._dispatch import kernel_op, takes_twin, use_triton
from ._head_inputs import check_options, check_target_of_twin
from ._launch import as_rows
from ._row_pass import LOSS, N_STATS, RowSpec, row_pass
from .known_gradients import scaled, split_pow2_scale

_TORCH_ELEMENTS = 1 << 24  # logits that the plain PyTorch pass takes at a time: 64 MiB for each of its fp32 copies


def _pass_over(logits, grad, target, stats, g_loss, spec, do_stats=True):
    """Run `row_pass` over all rows. Plain PyTorch copies the logits, so it gets a few rows at a time."""
    n, vocab = logits.shape
    step = n if use_triton(logits) else max(1, _TORCH_ELEMENTS // vocab)
    for start in range(0, n, max(1, step)):
        rows = slice(start, start + step)
        row_pass(
            logits[rows],
            None if grad is None else grad[rows],
            target[rows],
            stats[:, rows],
            None if g_loss is None else g_loss[rows],
            None,
            spec,
            do_stats,
        )


@kernel_op("cross_entropy_statistics")
def _statistics(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    scale: float,
    softcap: float,
    smoothing: float,
    z_loss: float,
) -> torch.Tensor:
    stats = logits.new_zeros((N_STATS, logits.shape[0]), dtype=torch.float32)
    _pass_over(as_rows(logits), None, target, stats, None, RowSpec(ignore_index, scale, softcap, smoothing, z_loss))
    return stats


@_statistics.register_fake
def _(logits, target, *spec):
    return logits.new_empty((N_STATS, logits.shape[0]), dtype=torch.float32)


@kernel_op("cross_entropy_gradient")
def _gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    g_loss: torch.Tensor,
    ignore_index: int,
    scale: float,
    softcap: float,
    smoothing: float,
    z_loss: float,
) -> torch.Tensor:
    grad = logits.new_empty(logits.shape)
    spec = RowSpec(ignore_index, scale, softcap, smoothing, z_loss)
    _pass_over(as_rows(logits), grad, target, stats, g_loss, spec, do_stats=False)
    return grad


@_gradient.register_fake
def _(logits, target, stats, g_loss, *spec):
    return logits.new_empty(logits.shape)


class _CrossEntropy(torch.autograd.Function):
    """Return the loss of each row."""

    @staticmethod
    def forward(ctx, logits, target, spec):
        stats = _statistics(logits, target, *spec[:5])
        ctx.save_for_backward(logits, target, stats)
        ctx.spec = spec
        return stats[LOSS].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        logits, target, stats = ctx.saved_tensors
        return _gradient(logits, target, stats, g.float().contiguous(), *ctx.spec[:5]), None, None


class _CrossEntropyInPlace(torch.autograd.Function):
    """Return each row's loss times fold * later, both () in fp32. The gradient is multiplied by `fold` in forward and
    by `later` in backward."""

    @staticmethod
    def forward(ctx, logits, target, fold, later, spec):
        ctx.set_materialize_grads(False)
        ctx.spent = False
        stats = logits.new_zeros((N_STATS, logits.shape[0]), dtype=torch.float32)
        _pass_over(logits, logits, target, stats, fold.expand(target.shape).contiguous(), spec)
        loss = stats[LOSS] * (fold * later)
        # An operation that saved the logits for its own backward now gets PyTorch's error "modified by an inplace
        # operation". If the logits are an output, a later differentiable use is noticed too, and backward refuses it. A
        # view cannot be an output: PyTorch would copy the gradient of its base.
        if logits._is_view():
            torch.autograd.graph.increment_version(logits)
            ctx.save_for_backward(logits, later)
            return loss, None
        ctx.mark_dirty(logits)
        ctx.save_for_backward(logits, later)
        return loss, logits

    @staticmethod
    @once_differentiable
    def backward(ctx, g, g_logits):
        if g_logits is not None:
            raise RuntimeError(
                "The logits were used again after cross_entropy(inplace=True) had written their gradient over them. "
                "Use them before the call, or call it with inplace=False."
            )
        if g is None:
            return None, None, None, None, None
        if ctx.spent:
            raise RuntimeError(
                "Second backward through cross_entropy(inplace=True): its gradient, kept in the memory of the logits, "
                "was handed over in the first. Call it with inplace=False."
            )
        grad, later = ctx.saved_tensors
        ctx.spent = True
        grad = scaled(grad.detach(), g.float() * later, grad.dtype)
        torch.autograd.graph.increment_version(grad)
        return grad, None, None, None, None


def cross_entropy(
    logits: torch.Tensor,  # (T, V)
    target: torch.Tensor,  # (T,)
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    inplace: bool = False,
) -> torch.Tensor:
    """Compute F.cross_entropy(z.float(), target, ...) with z = softcap * tanh(logit_scale * logits / softcap), in nats
    and fp32.

    The logits are not changed, and backward may run more than once. Backward reads them again, so changing them in
    place before it is an error.

    Args:
        logits (`torch.Tensor`): (T, V); bf16, fp16 or fp32 (float64: the PyTorch twin).
        target (`torch.Tensor`): Class ids (T,), integers in [0, V) or `ignore_index`.
        ignore_index (`int`, *optional*, defaults to -100): Rows with this target have loss 0 and gradient 0.
        reduction (`str`, *optional*, defaults to `"mean"`): `"mean"` over the rows not ignored, `"sum"` or `"none"`.
        label_smoothing (`float`, *optional*, defaults to 0.0): As in F.cross_entropy, in [0, 1].
        softcap (`float`, *optional*): Unset: z = logit_scale * logits.
        logit_scale (`float`, *optional*, defaults to 1.0): Multiplies the logits.
        z_loss (`float`, *optional*, defaults to 0.0): Adds z_loss * logsumexp(z)**2 to each row.
        inplace (`bool`, *optional*, defaults to `False`): Write the gradient over the logits, in the forward pass.
            This saves T * V elements of memory and a third of the memory traffic. Read what you need from the logits
            (argmax, say) before the call. Later uses of the overwritten values raise a RuntimeError: an earlier
            operation that saved the logits, a second backward pass, a change of the logits since the call, and a later
            differentiable use (not noticed if `logits` is a view). Ignored for leaf tensors and their views, rows
            without unit stride, float64, and under `torch.no_grad()` or `torch.compile`.

    Returns:
        `torch.Tensor`, fp32 (float64 for float64): () or, for `"none"`, (T,). All rows ignored: 0
        (PyTorch's mean is NaN).

    Raises:
        ValueError: Shapes, dtypes or devices disagree, or an option is out of its range.
        IndexError: A target is outside [0, V), on CPU. On a GPU that row's loss and gradient are NaN instead: raising
            would make the host wait for the device.
    """
    if logits.ndim != 2 or target.shape != logits.shape[:1]:
        raise ValueError(
            f"logits is {tuple(logits.shape)}, target {tuple(target.shape)}; expected logits (T, V) and target (T,). "
            "Flatten both: logits.flatten(0, -2), target.flatten()."
        )
    check_options("logits", logits, target, reduction, label_smoothing, softcap, logit_scale, z_loss)
    twin = takes_twin(logits, target)
    if twin or logits.device.type == "cpu":
        check_target_of_twin(target, ignore_index, logits.shape[1], logits)
    if twin:
        return reference.cross_entropy(
            logits,
            target.long(),
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            softcap=softcap,
            logit_scale=logit_scale,
            z_loss=z_loss,
        )
    spec = RowSpec(ignore_index, float(logit_scale), float(softcap or 0.0), float(label_smoothing), float(z_loss))
    target = target.long().contiguous()
    kept = target != ignore_index
    share = torch.ones((), device=logits.device)  # the weight of one row in the result
    if reduction == "mean":
        share = kept.sum().clamp(min=1).reciprocal()
    if not records_graph(logits):
        rows = _statistics(logits, target, *spec[:5])[LOSS]
        return rows.clone() if reduction == "none" else rows.sum() * share
    can = inplace and not torch.compiler.is_compiling() and not is_of_leaf(logits)
    if not (can and logits.stride(1) == 1 and logits.stride(0) >= logits.shape[1]):
        rows = _CrossEntropy.apply(logits, target, spec)
        return rows if reduction == "none" else rows.sum() * share
    # p / T would underflow in fp16, so the share is applied in backward, where the upstream gradient carries the loss
    # scale. Other dtypes apply it now: an upstream gradient of 1 then leaves nothing to do.
    fold, later = share, torch.ones_like(share)
    if logits.dtype == torch.float16:
        fold, later = split_pow2_scale(torch.ones_like(share), logit_scale, torch.float16, share)
        later = share * later
    rows, _ = _CrossEntropyInPlace.apply(logits, target, fold, later, spec)
    return rows if reduction == "none" else rows.sum()
