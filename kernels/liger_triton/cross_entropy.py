"""Cross-entropy of given logits, its gradient written over them. Formulas and exactness: `_row_pass.py`.

Shapes  logits (T, V), target (T,) int64; loss () or (T,) fp32.
Dtypes  bf16, fp16, fp32. Arithmetic in fp32; the gradient is rounded once, to the dtype of the logits.
Bytes   b per element. Forward reads TVb (twice, the second time from L2 where a row fits) and writes TVb. Backward:
        nothing where the upstream gradient is 1, else 2TVb. Kept for backward: the gradient, in the memory of the
        logits.
"""

import torch
from torch.autograd.function import once_differentiable

from . import reference
from ._dispatch import kernel_op, takes_twin, use_triton
from ._head_checks import check_options, check_target_of_twin, check_target_range
from ._row_pass import LOSS, N_STATS, RowSpec, row_pass
from ._scale import scaled

_TORCH_ELEMENTS = 1 << 24  # logits that the plain PyTorch pass takes at a time: 64 MiB for each of its fp32 copies


def _pass_over(logits, grad, target, g_loss, spec):
    """Loss of each row (T,), the gradient into `grad`. The plain PyTorch pass makes copies, so it takes a few rows at a
    time."""
    rows, vocab = logits.shape
    stats = logits.new_zeros((N_STATS, rows), dtype=torch.float32)
    step = rows if use_triton(logits) else max(1, _TORCH_ELEMENTS // vocab)
    for a in range(0, rows, max(1, step)):
        part = slice(a, a + step)
        row_pass(
            logits[part], None if grad is None else grad[part], target[part], stats[:, part],
            None if g_loss is None else g_loss[part], None, spec,
        )  # fmt: skip
    return stats[LOSS].clone()


@kernel_op("cross_entropy_rows")
def _rows(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, scale: float, softcap: float, smoothing: float,
    z_loss: float,
) -> torch.Tensor:  # fmt: skip
    return _pass_over(logits, None, target, None, RowSpec(ignore_index, scale, softcap, smoothing, z_loss))


@_rows.register_fake
def _(logits, target, *spec):
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


@kernel_op("cross_entropy_rows_and_grad")
def _rows_and_grad(
    logits: torch.Tensor, target: torch.Tensor, g_loss: torch.Tensor, ignore_index: int, scale: float, softcap: float,
    smoothing: float, z_loss: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    grad = logits.new_empty(logits.shape)
    return _pass_over(logits, grad, target, g_loss, RowSpec(ignore_index, scale, softcap, smoothing, z_loss)), grad


@_rows_and_grad.register_fake
def _(logits, target, g_loss, *spec):
    return logits.new_empty(logits.shape[0], dtype=torch.float32), logits.new_empty(logits.shape)


class _CrossEntropy(torch.autograd.Function):
    """Loss of each row times fold * later, both fp32 (). `fold` is in the gradient now, `later` in the backward."""

    @staticmethod
    def forward(ctx, logits, target, fold, later, overwrite, spec):
        ctx.set_materialize_grads(False)
        ctx.spent = False
        fold_rows = fold.expand(target.shape).contiguous()
        if not overwrite:
            loss, grad = _rows_and_grad(logits, target, fold_rows, *spec[:5])
            ctx.save_for_backward(grad, later)
            return loss * (fold * later), None
        with torch.cuda.device_of(logits):
            loss = _pass_over(logits, logits, target, fold_rows, spec) * (fold * later)
        # Whoever saved the logits for a backward of its own now gets PyTorch's "modified by an inplace operation"
        # error. As an output, the tensor also tells a later differentiable use of it, which _CrossEntropy.backward
        # refuses. A view cannot be one: PyTorch would copy the gradient of its base.
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
                "The logits were used again after cross_entropy had written their gradient over them. Use them before "
                "the call, or pass logits.clone()."
            )
        if g is None:
            return None, None, None, None, None, None
        if ctx.spent:
            raise RuntimeError(
                "Second backward through cross_entropy: its gradient, kept in the memory of the logits, was handed "
                "over in the first. Call cross_entropy again on fresh logits."
            )
        grad, later = ctx.saved_tensors
        scale = g.float() * later
        if torch.compiler.is_compiling():
            return scaled(grad, scale, grad.dtype), None, None, None, None, None
        ctx.spent = True
        grad = scaled(grad.detach(), scale, grad.dtype)
        torch.autograd.graph.increment_version(grad)
        return grad, None, None, None, None, None


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
) -> torch.Tensor:
    """F.cross_entropy(z.float(), target, ...), z = softcap * tanh(logit_scale * logits / softcap), in nats and fp32.

    **The logits are overwritten.** Where they need a gradient, it is computed in the forward pass and takes their
    memory, so that training needs no second (T, V) tensor: read what you need of them (argmax, say) before the call. An
    earlier operation that saved them, a second backward, and a later differentiable use raise a RuntimeError instead of
    computing with the overwritten values (a later use is not noticed if `logits` is a view, such as `x.view(-1, V)`).
    Not overwritten: leaf tensors, rows without unit stride, calls under `torch.no_grad()` or `torch.compile`.

    Args:
        logits (`torch.Tensor`): (T, V); bf16, fp16 or fp32.
        target (`torch.Tensor`): Class ids (T,), integers in [0, V) or `ignore_index`.
        ignore_index (`int`, *optional*, defaults to -100): Rows with this target have loss 0 and gradient 0.
        reduction (`str`, *optional*, defaults to `"mean"`): `"mean"` over the rows not ignored, `"sum"` or `"none"`.
        label_smoothing (`float`, *optional*, defaults to 0.0): As in F.cross_entropy, in [0, 1].
        softcap (`float`, *optional*): Unset: z = logit_scale * logits.
        logit_scale (`float`, *optional*, defaults to 1.0): Multiplies the logits.
        z_loss (`float`, *optional*, defaults to 0.0): Adds z_loss * logsumexp(z)**2 to each row.

    Returns:
        `torch.Tensor`, fp32: () or, for `"none"`, (T,). All rows ignored: 0 (PyTorch's mean is NaN).

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
    if logits.device.type == "cpu" and not torch.compiler.is_compiling():
        check_target_range(target, ignore_index, logits.shape[1])
    if takes_twin(logits):
        check_target_of_twin(target, ignore_index, logits.shape[1])
        return reference.cross_entropy(
            logits, target.long(), ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
            softcap=softcap, logit_scale=logit_scale, z_loss=z_loss,
        )  # fmt: skip
    spec = RowSpec(ignore_index, float(logit_scale), float(softcap or 0.0), float(label_smoothing), float(z_loss))
    target = target.long().contiguous()
    kept = target != ignore_index
    share = torch.ones((), device=logits.device)  # of one row in the result
    if reduction == "mean":
        share = kept.sum().clamp(min=1).reciprocal()
    if not (torch.is_grad_enabled() and logits.requires_grad):
        rows = _rows(logits if logits.stride(1) == 1 else logits.contiguous(), target, *spec[:5])
        return rows if reduction == "none" else rows.sum() * share
    # fp16 has no room for p / T: there the share waits for the backward, whose upstream gradient carries a loss scale.
    # Elsewhere it is folded in now, so that an upstream gradient of 1 leaves nothing to do.
    one = torch.ones_like(share)
    fold, later = (one, share) if logits.dtype == torch.float16 else (share, one)
    overwrite = not (
        torch.compiler.is_compiling() or logits.is_leaf or logits.stride(1) != 1 or logits.stride(0) < logits.shape[1]
    )
    source = logits if overwrite or logits.stride(1) == 1 else logits.contiguous()
    rows, _ = _CrossEntropy.apply(source, target, fold, later, overwrite, spec)
    return rows if reduction == "none" else rows.sum()
